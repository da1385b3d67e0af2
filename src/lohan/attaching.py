"""`lohan.attach`: from a model, an optimizer and SSD directories to an engine that trains.

Owns the defaults a user may leave out: what machine this is (measured once, kept), how much memory
is free. The rest is `runtime.attach`.
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from lohan.device import Device, open_device
from lohan.errors import ConfigError, DoesNotFit
from lohan.hardware import Machine, machine_from
from lohan.hardware.limits import available_ram_bytes, is_bound_by_locking
from lohan.measure import MeasuredMachine, profile_machine
from lohan.optimizer.torch_optimizer import AdamW
from lohan.runtime.attach import attach_engine
from lohan.runtime.engine import Engine
from lohan.runtime.planning import Policy
from lohan.runtime.segments import LossFunction
from lohan.runtime.write_limit import WriteLimit
from lohan.ssd import check_directories
from lohan.store.initial import Moments
from lohan.units import format_bytes, parse_bytes

Directories = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

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
        machine: a Machine, its name or file. None: this machine, measured once and remembered.
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
        found = _machine(machine, directories, opened, progress)
        measured = found if isinstance(found, MeasuredMachine) else None
        engine = attach_engine(
            model,
            optimizer,
            ssd=directories,
            ram_bytes=ram_bytes,
            gpu_bytes=gpu_bytes,
            machine=found.machine if isinstance(found, MeasuredMachine) else found,
            device=opened,
            policy=policy,
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
            drive_settings=measured.settings if measured is not None else None,
            drive_weights=measured.weights if measured is not None else None,
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


def _machine(
    machine: Machine | MeasuredMachine | str | None,
    directories: Sequence[str | os.PathLike[str]],
    device: Device,
    progress: Callable[[str], None] | None,
) -> Machine | MeasuredMachine:
    if isinstance(machine, str):
        return machine_from(machine)
    if machine is not None:
        return machine
    # Whether a machine is measured or remembered must not change what a run draws.
    target = device.torch_device
    with torch.random.fork_rng(devices=[] if target.type == "cpu" else [target]):
        measured, _ = profile_machine(ssd=directories, device=device, report=progress)
    return measured
