"""Runs of the engine in which something goes wrong, and what must hold afterwards.

A run seals after its first and its last step but one. Whatever happens to it: no thread, file
descriptor or buffer is left, and going on from the last seal ends with the bits of a run that
nothing happened to.
"""

import contextlib
import copy
import gc
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from lohan.device.cpu import CpuDevice
from lohan.device.device import Device
from lohan.device.emulated import EmulatedDevice
from lohan.engine import engine as engine_module
from lohan.engine.engine import Engine
from lohan.engine.running import RunningPlan
from lohan.ssd import IoEngine
from lohan.vocabulary import Choice
from support.engine_runs import (
    EngineCase,
    Outcome,
    assert_same,
    attach,
    batches_of,
    build,
    optimizer_for,
    plain_run,
)
from support.fault_engine import Fault, FaultEngine, Place
from support.ssd_engines import nothing_leaks

NUM_STEPS = 4
SEALED_AFTER = (1, 3)

States = dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
"""Master, m and v by name."""


def everything_moves(device: str, **changes: Any) -> EngineCase:
    """Nothing is resident; gradients, activations and all states go through the drives."""
    return EngineCase(
        **{
            "residents": False,
            "spills": True,
            "num_parts": 2,
            "choice": Choice.SWAP_TO_SSD,
            "device": device,
            "num_steps": NUM_STEPS,
            **changes,
        }
    )


def make_device(name: str) -> Device:
    """A device of the test's own, to look at after the engine is gone."""
    return CpuDevice() if name == "cpu" else EmulatedDevice(memory_bytes=64 << 20)


def threads_io() -> IoEngine:
    return IoEngine(is_uring=False)


def states_of(engine: Engine) -> States:
    masters = {name: master.clone() for name, master in engine.weights()}
    return {name: (masters[name], m.clone(), v.clone()) for name, m, v in engine.moments()}


def differing(one: States, other: States) -> list[str]:
    """Names whose bits differ."""
    assert one.keys() == other.keys()
    return [
        name
        for name in one
        if any(
            not torch.equal(a.view(torch.int32), b.view(torch.int32))
            for a, b in zip(one[name], other[name], strict=True)
        )
    ]


def assert_states(found: States, expected: States) -> None:
    assert not differing(found, expected)


_UNDISTURBED: dict[str, list[States]] = {}


def undisturbed(case: EngineCase, root: Path) -> list[States]:
    """States before the first step and after each; the last ones are those of a plain loop."""
    if str(case) not in _UNDISTURBED:
        _UNDISTURBED[str(case)] = _undisturbed(case, root)
    return _UNDISTURBED[str(case)]


def _undisturbed(case: EngineCase, root: Path) -> list[States]:
    model = build(case)
    twin = copy.deepcopy(model)
    found: list[States] = []
    with attach(case, model, optimizer_for(case, model), root) as engine:
        found.append(states_of(engine))
        results = []
        for batches in batches_of(case):
            results.append(engine.step(batches))
            found.append(states_of(engine))
        outcome = Outcome(
            losses=[list(result.losses) for result in results],
            norms=[result.grad_norm for result in results],
            masters={name: state[0] for name, state in found[-1].items()},
            moments={name: (state[1], state[2]) for name, state in found[-1].items()},
            engine_peak_bytes=0,
        )
        assert_same(outcome, plain_run(case, engine, twin), norms=case.max_grad_norm is not None)
        engine.close(should_delete=True)
    return found


@dataclass
class Watched:
    """What is made while an engine lives."""

    running: list[RunningPlan] = field(default_factory=list)

    def judge(self) -> None:
        """All buffers are back."""
        for one in self.running:
            assert one.host.in_use_bytes == 0
            assert one.host._pool.in_use_bytes == 0
            assert not one.book._held
            assert not len(one.activations)


@contextlib.contextmanager
def watched() -> Iterator[Watched]:
    """No thread, descriptor or buffer may be left behind by what runs inside."""
    seen = Watched()
    real = engine_module.start_running

    def start(*args: Any, **kwargs: Any) -> RunningPlan:
        seen.running.append(real(*args, **kwargs))
        return seen.running[-1]

    with mock.patch.object(engine_module, "start_running", start), nothing_leaks():
        yield seen
        left = [one.name for one in threading.enumerate() if one.name.startswith("lohan-")]
        assert not left, left
        seen.judge()


def is_empty(directory: Path) -> bool:
    """Whether no run is left in any SSD directory."""
    return not [path for place in directory.iterdir() for path in place.iterdir()]


@dataclass
class Disturbed:
    """How a run ended."""

    error: BaseException | None = None
    run_id: str | None = None
    """None: it did not come to be."""
    sealed: int | None = None
    """Step of the last seal that returned."""
    stage: str = "attach"


BeforeStep = Callable[[Engine, str], None]
"""Called before each step and seal of a run, with its stage."""


def train(
    engine: Engine, case: EngineCase, told: Disturbed, before: BeforeStep | None = None
) -> None:
    """The steps that are left, with their seals."""
    steps = batches_of(case)
    before = before or (lambda engine, stage: None)
    while engine.num_steps < case.num_steps:
        told.stage = f"step {engine.num_steps + 1}"
        before(engine, told.stage)
        engine.step(steps[engine.num_steps])
        if engine.num_steps in SEALED_AFTER:
            told.stage = f"seal {engine.num_steps}"
            before(engine, told.stage)
            engine.seal()
            told.sealed = engine.num_steps
    told.stage = "synchronize"
    before(engine, told.stage)
    engine.synchronize()


def disturbed_run(
    case: EngineCase,
    directory: Path,
    *,
    io: IoEngine | None = None,
    before: BeforeStep | None = None,
    **options: Any,
) -> Disturbed:
    """A run that may fail; closes it and checks that nothing is left of it."""
    told = Disturbed()
    device = make_device(case.device)
    try:
        with watched():
            _run(case, directory, told, before, {"io": io, "device": device, **options})
            gc.collect()
        if case.device == "emulated" and told.error is None:
            assert device.bytes_in_use == 0
    finally:
        device.close()
    return told


def _run(
    case: EngineCase,
    directory: Path,
    told: Disturbed,
    before: BeforeStep | None,
    options: dict[str, Any],
) -> None:
    model = build(case)
    engine = None
    try:
        engine = attach(case, model, optimizer_for(case, model), directory, **options)
        told.run_id, told.sealed = engine.run_id, engine.num_steps
        train(engine, case, told, before)
    except BaseException as error:
        told.error = error.with_traceback(None)
    finally:
        if engine is not None:
            engine.close()


def go_on(case: EngineCase, directory: Path, told: Disturbed, expected: list[States]) -> None:
    """Resume from the last seal: its bits, and in the end those of an undisturbed run."""
    assert told.run_id is not None
    model = build(case)
    # What the model holds must not matter: the states are those of the run.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    with watched():
        engine = attach(case, model, optimizer_for(case, model), directory, run=told.run_id)
        with engine:
            assert engine.sealed is not None
            assert engine.sealed.step == told.sealed == engine.num_steps
            assert_states(states_of(engine), expected[engine.num_steps])
            train(engine, case, told)
            assert_states(states_of(engine), expected[-1])
            engine.close(should_delete=True)
    assert is_empty(directory)


def run_with_faults(
    case: EngineCase, directory: Path, faults: Mapping[int | Place, Fault], **options: Any
) -> tuple[Disturbed, FaultEngine]:
    io = FaultEngine(threads_io(), faults=faults, **options)

    def before(engine: Engine, stage: str) -> None:
        # Lanes are idle only after a seal: what a step asks for may come when the seal waits.
        if stage.startswith("step") and engine.num_steps in (0, *SEALED_AFTER):
            io.phase = stage

    return disturbed_run(case, directory, io=io, before=before), io
