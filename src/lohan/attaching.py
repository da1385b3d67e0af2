"""`lohan.attach`: from a model, an optimizer and SSD directories to an engine that trains.

Owns the defaults a user may leave out: what machine this is (measured when it must be, kept), how
much memory is free. The rest is `engine.attach`.
"""

import functools
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from lohan.device import Device, open_device
from lohan.drive import LossFunction
from lohan.engine.attach import attach_engine
from lohan.engine.engine import Engine
from lohan.engine.options import FirstStates, Options
from lohan.engine.planning.known_drives import KnownDrives
from lohan.engine.planning.plan_run import PlannedRun
from lohan.engine.planning.write_limit import WriteLimit
from lohan.errors import ConfigError, DoesNotFit
from lohan.hardware import Machine, machine_from
from lohan.hardware.drive_life import one_per_drive
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
from lohan.measure.profile import remember_drives
from lohan.optimizer.torch_optimizer import AdamW
from lohan.paper import policy_named
from lohan.parallel.peers import TIMEOUT_SECONDS, Peers
from lohan.plan.policies import Policy
from lohan.ssd import DirectoryReport, check_directories
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
    ssd_rated_bytes: Sequence[int] | None = None,
    weights: Iterable[tuple[str, torch.Tensor]] | None = None,
    moments: Moments | None = None,
    counters: Mapping[str, Any] | None = None,
    buffers: Mapping[str, Any] | None = None,
    run: str | None = None,
    example: Any | None = None,
    largest_step: Sequence[Any] | None = None,
    write_limit: WriteLimit | None = None,
    loss_fn: LossFunction | None = None,
    chunked_loss: bool = False,
    nonfinite: str = "stop",
    slots: int = 2,
    reduction_groups: int | None = None,
    process_group: Any | None = None,
    peer_timeout_seconds: float = TIMEOUT_SECONDS,
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
        ssd_rated_bytes: what drives are rated for, one figure for all or one per directory; plans
            show shares of it. None: from their own wear counters, or what is usual.
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
        chunked_loss: the loss of a language model may be computed in chunks, so that its logits
            never exist as a whole; on a GPU that may change last bits.
        nonfinite: "stop" or "skip", for gradients that are infinite or NaN.
        slots: 2 keeps the last seal whole whatever happens; 1 halves the SSD space and does not.
        reduction_groups: a step's micro-batches are dealt to so many groups, in order, whose
            gradients are added in fp32; results depend on this number and not on that of ranks.
            None: one per rank, or as the run was made with.
        process_group: of torch.distributed, the ranks that take every step together; each gives
            its own micro-batches and directories. None: the default group, if there is one.
        peer_timeout_seconds: how long a rank waits for another before it gives up.
        threads: of the CPU update.
        progress: is told what is going on, in sentences.
        is_tracing: keep what every lane does, for `Engine.trace`.
        on_planned: gets the plan of `largest_step` before anything but measuring is written; what
            it raises ends attaching.

    Raises:
        ConfigError: what was asked for is not valid; nothing was written.
        DoesNotFit, OutOfSpace: budgets or drives are too small.
        StorageError, CheckpointError: a directory cannot be used, or the run not be resumed.
    """
    if isinstance(machine, str):
        machine = machine_from(machine)
    peers = Peers.join(process_group, timeout_seconds=peer_timeout_seconds)
    return attach_with(
        model,
        optimizer,
        Options(
            ssd=_directories(ssd),
            ram_bytes=parse_bytes(ram) if ram is not None else None,
            gpu_bytes=parse_bytes(gpu) if gpu is not None else None,
            device=device,
            policy=policy_named(policy) if isinstance(policy, str) else policy,
            machine=_known(machine) if isinstance(machine, MeasuredMachine) else machine,
            example=example,
            largest_step=largest_step,
            write_limit=write_limit,
            loss_fn=loss_fn,
            should_chunk_loss=chunked_loss,
            nonfinite=nonfinite,
            num_slots=slots,
            reduction_groups=reduction_groups,
            peers=peers,
            num_threads=threads,
            progress=progress,
            is_tracing=is_tracing,
            on_planned=on_planned,
            ssd_rated_bytes=ssd_rated_bytes,
        ),
        FirstStates(run=run, weights=weights, moments=moments, counters=counters, buffers=buffers),
    )


def attach_with(
    model: torch.nn.Module, optimizer: AdamW, options: Options, first: FirstStates
) -> Engine:
    """`attach`, for callers that have their options in one piece: the trainers. Raises as it."""
    peers = options.peers or Peers()
    with peers.told_of_failure():
        return _attach(model, optimizer, options, first, peers)


def _attach(
    model: torch.nn.Module, optimizer: AdamW, options: Options, first: FirstStates, peers: Peers
) -> Engine:
    if options.num_slots not in (1, 2):
        raise ConfigError(
            f"slots is {options.num_slots!r}",
            why="states are kept once or twice",
            remedy="use 2, or 1 if the drives are too small for 2",
        )
    reports = check_directories(options.ssd)
    device = options.device
    owns_device = device is None or isinstance(device, str)
    if device is None or isinstance(device, str):
        device = open_device(
            device,
            memory_bytes=options.gpu_bytes,
            place=peers.place_here,
            num_here=peers.num_here,
        )
    try:
        options.tell(f"device {device.name}: {device.reason}")
        ram_bytes, gpu_bytes = options.ram_bytes, options.gpu_bytes
        if ram_bytes is None:
            ram_bytes = _free_ram(device) // peers.num_here
        else:
            _refuse_more_than_there_is(ram_bytes)
        known = _known_drives(options, device, peers)
        if options.ssd_rated_bytes is not None:
            known = known.with_rated_lives(_lives_of_directories(options.ssd_rated_bytes, reports))
        return attach_engine(
            model,
            optimizer,
            replace(
                options,
                ram_bytes=ram_bytes,
                gpu_bytes=gpu_bytes if gpu_bytes is not None else _free_gpu(device),
                machine=known,
                device=device,
                owns_device=owns_device,
            ),
            first,
        )
    except BaseException:
        if owns_device:
            device.close()
        raise


def _known_drives(options: Options, device: Device, peers: Peers) -> KnownDrives:
    """The machine as given or measured. The first rank plans for all, and measures."""
    known = options.machine
    if known is None and peers.is_first:
        known = _this_machine(options, device)
    if known is not None and not isinstance(known, KnownDrives):
        known = KnownDrives(machine=known)

    def machine() -> Machine:
        assert known is not None, "the first rank knows its machine"
        return known.machine

    found = peers.from_first(machine, what="what is known of the first rank's machine")
    return known or KnownDrives(machine=found)


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


def _lives_of_directories(
    lives_bytes: Sequence[int], reports: Sequence[DirectoryReport]
) -> list[int]:
    """What each directory has of the stated lives: those on one drive share its life."""
    num_on = Counter(report.device for report in reports)
    lives = one_per_drive(lives_bytes, len(reports))
    if len(lives_bytes) == 1 and len(num_on) == len(reports):
        return [*lives_bytes]  # also of a machine that was named, whatever it has
    return [
        max(1, nbytes // num_on[report.device])
        for nbytes, report in zip(lives, reports, strict=True)
    ]


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


def _this_machine(options: Options, device: Device) -> KnownDrives:
    """What is known of this machine without writing to its drives, and how to know more."""
    progress, write_limit = options.progress, options.write_limit

    def profile(needed: Collection[Part], most_bytes: int) -> MeasuredMachine:
        # Whether a machine is measured or remembered must not change what a run draws.
        target = device.torch_device
        cards = [] if target.type == "cpu" else [target]
        with torch.random.fork_rng(devices=cards), measuring_bar() as on_share:
            return profile_machine(
                ssd=options.ssd,
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
        remember=functools.partial(remember_drives, measured)
        if measured.drives and Part.DRIVES in measured.unsure_parts()
        else None,
    )
