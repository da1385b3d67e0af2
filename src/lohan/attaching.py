"""`lohan.attach`: from a model, an optimizer and SSD directories to an engine that trains.

Owns the defaults a user may leave out: what machine this is (measured when it must be, kept), how
much memory is free. The rest is `engine.attach`.
"""

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from lohan.device import Device, open_device
from lohan.drive import LossFunction
from lohan.engine.attach import attach_engine
from lohan.engine.engine import Engine
from lohan.engine.planning.known_drives import KnownDrives
from lohan.engine.planning.plan_run import PlannedRun
from lohan.engine.planning.write_limit import WriteLimit
from lohan.errors import ConfigError, DoesNotFit
from lohan.hardware import Machine, machine_from
from lohan.hardware.limits import available_ram_bytes, is_bound_by_locking
from lohan.measure import (
    Instruments,
    MeasuredMachine,
    Part,
    Sizes,
    measuring_bar,
    profile_machine,
)
from lohan.measure.machine import MOST_WRITTEN_BYTES
from lohan.optimizer.torch_optimizer import AdamW
from lohan.paper import policy_named
from lohan.plan.policies import Policy
from lohan.ssd import check_directories
from lohan.store.initial import Moments
from lohan.units import MIB, format_bytes, parse_bytes

Directories = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

_MEASURING_SHARE = 0.05
"""Of all that a run may write, where that is limited."""
_LEAST_MEASURING_BYTES = 64 * MIB
"""Less says nothing about a drive."""
_FREE_SHARE = 0.9
"""Of what is free, lohan takes this much unless told: other programs go on living."""


def attach(
    model: torch.nn.Module,
    optimizer: AdamW,
    *,
    ssd: Directories,
    ram: int | str | None = None,
    gpu: int | str | None = None,
    device: str | Device | None = None,
    policy: str | Policy = "lohan+",
    machine: Machine | MeasuredMachine | str | None = None,
    weights: Iterable[tuple[str, torch.Tensor]] | None = None,
    moments: Moments | None = None,
    counters: Mapping[str, Any] | None = None,
    buffers: Mapping[str, Any] | None = None,
    run: str | None = None,
    example: Any | None = None,
    largest_step: Sequence[Any] | None = None,
    write_limit: WriteLimit | None = None,
    loss_fn: LossFunction | None = None,
    nonfinite: str = "stop",
    slots: int = 2,
    threads: int | None = None,
    progress: Callable[[str], None] | None = None,
    is_tracing: bool = False,
    on_planned: Callable[[PlannedRun], None] | None = None,
) -> Engine:
    """Put a model's states on SSD and return the engine that trains it.

    Args:
        model: with data, or on the meta device with `weights`. Its parameters leave; they keep
            their shapes, and `Engine.weights` gives their values.
        optimizer: a `lohan.AdamW` over the model's parameters.
        ssd: directories, one per drive; states are striped over all of them.
        ram: all that lohan may hold in main memory, as bytes or "8GiB". None: most of what is free.
        gpu: all that may live on the device. None: what it has free.
        device: "cuda", "cpu", "emulated", or an open device. None: a GPU if there is one.
        policy: a name (`lohan compare` lists them), or a function of machine, model shape and
            workload that returns a Plan.
        machine: a Machine, its name or file: nothing is measured. None: this machine, measured once
            and remembered; its drives only if steps use them, with 2 GiB of writes at most.
        weights: (name, tensor) of every parameter, in any order; streamed to SSD.
        moments: both moments of a parameter by its name, to go on from a copy of a run; with
            `counters` and `buffers`, the copied `Engine.counters` and `Engine.buffers`.
        run: id of a run in the same directories, to go on from its last seal.
        example: a micro-batch, for models whose inputs are not `input_ids` and `labels`.
        largest_step: micro-batches of the largest step to come; whether it fits is then known
            before anything is written.
        write_limit: the most a run of so many steps may write to its SSDs; a plan that keeps to it
            is taken, or the run refused.
        loss_fn: `loss_fn(model, batch)`, in place of the loss of `model(**batch)`.
        nonfinite: "stop" or "skip", for gradients that are infinite or NaN.
        slots: 2 keeps the last seal whole whatever happens; 1 halves the SSD space and does not.
        threads: of the CPU update.
        progress: is told what is going on, in sentences.
        is_tracing: keep what every lane does, for `Engine.trace`.
        on_planned: gets the plan of `largest_step` before anything but measuring is written; what
            it raises ends attaching.

    Raises:
        ConfigError: what was asked for cannot be meant; nothing was written.
        DoesNotFit, OutOfSpace: budgets or drives are too small.
        StorageError, CheckpointError: a directory cannot be used, or the run not be resumed.
    """
    directories = _directories(ssd)
    if slots not in (1, 2):
        raise ConfigError(
            f"slots is {slots!r}",
            why="states are kept once or twice",
            remedy="use 2, or 1 if the drives are too small for 2",
        )
    chosen = policy_named(policy) if isinstance(policy, str) else policy
    check_directories(directories)
    given_gpu_bytes = parse_bytes(gpu) if gpu is not None else None
    owns_device = device is None or isinstance(device, str)
    opened: Device = (
        open_device(device, memory_bytes=given_gpu_bytes)
        if device is None or isinstance(device, str)
        else device
    )
    try:
        if progress is not None:
            progress(f"device {opened.name}: {opened.reason}")
        if ram is not None:
            ram_bytes = parse_bytes(ram)
            _refuse_more_than_there_is(ram_bytes)
        else:
            ram_bytes = _free_ram(opened)
        gpu_bytes = given_gpu_bytes if given_gpu_bytes is not None else _free_gpu(opened)
        known = _known_drives(machine, directories, opened, progress, write_limit)
        engine = attach_engine(
            model,
            optimizer,
            ssd=directories,
            ram_bytes=ram_bytes,
            gpu_bytes=gpu_bytes,
            machine=known,
            device=opened,
            policy=chosen,
            weights=weights,
            moments=moments,
            counters=counters,
            buffers=buffers,
            run=run,
            example=example,
            largest_step=largest_step,
            write_limit=write_limit,
            loss_fn=loss_fn,
            nonfinite=nonfinite,
            num_slots=slots,
            num_threads=threads,
            progress=progress,
            is_tracing=is_tracing,
            on_planned=on_planned,
            owns_device=owns_device,
        )
    except BaseException:
        if owns_device:
            opened.close()
        raise
    return engine


def _directories(ssd: Directories) -> list[str | os.PathLike[str]]:
    if isinstance(ssd, (str, os.PathLike)):
        return [ssd]
    found = list(ssd)
    if not found:
        raise ConfigError(
            "no SSD directory was given",
            why="states live there",
            remedy="name one directory per drive: ssd=[...]",
        )
    return found


def _refuse_more_than_there_is(ram_bytes: int) -> None:
    """A budget above all memory would be planned with, and end with the process being killed."""
    total_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if ram_bytes > total_bytes:
        raise DoesNotFit(
            f"the RAM budget is {format_bytes(ram_bytes)}",
            why=f"this machine has {format_bytes(total_bytes)} of RAM",
            remedy="give less, or leave it out: then most of what is free is taken",
        )


def _free_ram(device: Device) -> int:
    free = available_ram_bytes(counts_locked=is_bound_by_locking(device))
    return int(free.bytes * _FREE_SHARE)


def _free_gpu(device: Device) -> int | None:
    # Where the device computes in main memory, the plan divides the RAM budget.
    return None if device.shares_ram else device.memory_bytes


def _known_drives(
    machine: Machine | MeasuredMachine | str | None,
    directories: Sequence[str | os.PathLike[str]],
    device: Device,
    progress: Callable[[str], None] | None,
    write_limit: WriteLimit | None,
) -> KnownDrives:
    """What is known of this machine without writing to its drives, and how to know more."""
    if isinstance(machine, str):
        machine = machine_from(machine)
    if isinstance(machine, MeasuredMachine):
        return _known(machine)
    if machine is not None:
        return KnownDrives(machine=machine)

    def profile(needed: Collection[Part], most_bytes: int) -> MeasuredMachine:
        # Whether a machine is measured or remembered must not change what a run draws.
        target = device.torch_device
        cards = [] if target.type == "cpu" else [target]
        with torch.random.fork_rng(devices=cards), measuring_bar() as on_share:
            return profile_machine(
                ssd=directories,
                device=device,
                report=progress,
                on_share=None if progress is None else on_share,
                instruments=Instruments(sizes=Sizes(most_written_bytes=most_bytes)),
                needed=needed,
            )[0]

    most_bytes = MOST_WRITTEN_BYTES
    if write_limit is not None:
        most_bytes = min(most_bytes, int(write_limit.budget_bytes * _MEASURING_SHARE))
    measured = profile([part for part in Part if part is not Part.DRIVES], most_bytes)
    known = _known(measured)
    if Part.DRIVES not in measured.unsure_parts() or most_bytes < _LEAST_MEASURING_BYTES:
        return known
    return replace(
        known,
        measure=lambda: _known(profile([Part.DRIVES], most_bytes)),
        most_measuring_bytes=most_bytes,
    )


def _known(measured: MeasuredMachine) -> KnownDrives:
    note = "the drives' rates are those of usual ones until steps have shown them"
    if measured.drives:
        note = "SSD writes at a burst rate until steps have shown what the drives hold"
    return KnownDrives(
        machine=measured.machine,
        settings=measured.settings or None,
        weights=measured.weights or None,
        written_bytes=measured.written_now_bytes,
        note=note if not measured.drives or measured.is_burst else "",
    )
