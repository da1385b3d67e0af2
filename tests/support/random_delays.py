"""Runs of the engine in which everything takes its time, and freed memory is spoiled.

Requests to drives begin late, destinations of reads are NaN until somebody has waited for them,
tasks begin and end late on every lane, copies of the device trickle at any rate, and main memory is
filled with ones when its lease ends. What is used too early or too late becomes NaN; what runs in
another order than planned gives other bits than the plain loop.
"""

import contextlib
import ctypes
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from lohan.device.device import Device
from lohan.device.emulated import EmulatedDevice, EmulatedRates
from lohan.engine.driver import StepDriver
from lohan.lanes.memory import RamMemory
from lohan.ssd import Buffer, IoEngine, Operation
from lohan.vocabulary import Choice
from support.engine_runs import EngineCase
from support.fault_engine import Delay, FaultEngine, FaultTicket

_LONGEST_SECONDS = 2e-3
_FEW_BYTES_PER_SECOND = 20e6


class Chance:
    """Random delays from many threads."""

    def __init__(self, seed: int) -> None:
        self._random, self._lock = random.Random(seed), threading.Lock()

    def is_so(self, probability: float) -> bool:
        with self._lock:
            return self._random.random() < probability

    def pause(self) -> None:
        """Mostly nothing, sometimes a moment: what is tried is what comes between."""
        with self._lock:
            seconds = max(0.0, self._random.uniform(-_LONGEST_SECONDS, _LONGEST_SECONDS))
        if seconds:
            time.sleep(seconds)


class LateEngine(FaultEngine):
    """Half of the requests begin only when they are waited for; reads are NaN until then."""

    def __init__(self, chance: Chance) -> None:
        super().__init__(IoEngine(is_uring=False))
        self._chance, self._numbering = chance, threading.Lock()

    def _start(self, operation: Operation, *rest: Any) -> FaultTicket:
        if operation is Operation.READ:
            _, _, address, nbytes, _ = rest  # file, offset, ..., priority
            ctypes.memset(address, 0xFF, nbytes)
        is_late = operation is not Operation.FLUSH and self._chance.is_so(0.5)
        with self._numbering:
            if is_late:
                self.faults[self.num_requests + 1] = Delay()
            return super()._start(operation, *rest)

    def wait(self, ticket: Any) -> None:
        self._chance.pause()
        super().wait(ticket)


@contextlib.contextmanager
def late_lanes(chance: Chance) -> Iterator[None]:
    """Tasks of all lanes, and the visits of the model, begin and end late; memory that is given
    back is filled with ones."""
    action, before, after, free = (
        StepDriver.action,
        StepDriver.before,
        StepDriver.after,
        RamMemory.free,
    )

    def late_action(self: StepDriver, task: Any) -> None:
        chance.pause()
        action(self, task)
        chance.pause()

    def late_before(self: StepDriver, *args: Any) -> None:
        before(self, *args)
        chance.pause()

    def late_after(self: StepDriver, *args: Any) -> None:
        chance.pause()
        after(self, *args)

    def spoil(self: RamMemory, buffer: Buffer) -> None:
        ctypes.memset(buffer.address, 0xFF, buffer.nbytes)
        free(self, buffer)

    with (
        mock.patch.object(StepDriver, "action", late_action),
        mock.patch.object(StepDriver, "before", late_before),
        mock.patch.object(StepDriver, "after", late_after),
        mock.patch.object(RamMemory, "free", spoil),
    ):
        yield


def slow_device(case: EngineCase, seed: int) -> str | Device:
    """The device of a case; an emulated one with slow copies or none."""
    if case.device != "emulated":
        return case.device
    chance = random.Random(seed)
    rates = [chance.choice([None, _FEW_BYTES_PER_SECOND, 1e9]) for _ in range(2)]
    return EmulatedDevice(
        memory_bytes=case.gpu_bytes,
        rates=EmulatedRates(
            gpu_to_ram_bytes_per_second=rates[0], ram_to_gpu_bytes_per_second=rates[1]
        ),
    )


def random_case(seed: int) -> EngineCase:
    """Any combination of what must not change a bit."""
    chance = random.Random(seed)
    case = EngineCase(
        model=chance.choice(["llama", "gpt2"]),
        policy=chance.choice(["lohan+", "lohan+", "lohan"]),
        choice=chance.choice([None, *Choice]),
        residents=chance.choice([None, True, False, False]),
        num_parts=chance.choice([1, 2, 3]),
        num_micro_batches=chance.choice([1, 2, 3]),
        max_grad_norm=chance.choice([None, 0.05, 1.0]),
        num_ssds=chance.choice([1, 2]),
        num_threads=chance.choice([1, 2]),
        device=chance.choice(["cpu", "emulated", "emulated"]),
        dtype=chance.choice([torch.bfloat16, torch.bfloat16, torch.float16]),
        num_steps=3,
    )
    if case.model == "gpt2":
        case = replace(case, dropout=chance.choice([0.0, 0.1]))
    if case.max_grad_norm is not None and case.residents is not None:
        case = replace(case, spills=chance.choice([None, True]))
    return case
