"""Rates of a machine as one real step reached them: the paper's profiling step.

Owns the arithmetic from tasks that ran to a Machine: per lane, how long its tasks should have taken
by the machine's rates, over how long they did. `Durations` is the model on both sides, so a
simulation of the refined machine gives the observed times back. Pure: records and measures nothing.
Called by `learned`, and by whoever has a trace of a run.

Note "Shared links". A task that shares its link takes longer than the link needs for it, and the
simulator knows that. So time on a simplex SSD path counts half while both directions are busy, and
compute counts less while copies take their share of the GPU, exactly as `clock.py` has it; where
the processor computes, it counts half while updates have the cores too, and they do.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from lohan.fields import LEAST_RATE, MOST_RATE
from lohan.hardware.machine import Machine, Ssd
from lohan.plan.system import DrivingRates
from lohan.schedule.task import Compute, Move, Task
from lohan.simulate.durations import Durations
from lohan.trace import Trace
from lohan.trace.rows import Interval, merged, overlap_seconds
from lohan.vocabulary import ComputeKind, Lane, TensorKind

TimedTask = tuple[Task, float, float]
"""With its beginning and end in seconds."""
_LEAST_TASKS = 2
"""Fewer tasks of a lane say nothing about its rate."""
LEAST_BUSY_SECONDS = 1e-3
"""Shorter work is mostly the cost of starting it and of reading the clock."""
_LEAST_COMPUTE_SHARE = 0.1

_SSD_LANES = (Lane.SSD_READ, Lane.SSD_WRITE)
_COPY_LANES = (Lane.GPU_TO_RAM, Lane.RAM_TO_GPU)
_CORE_LANES = (Lane.GPU, Lane.CPU)
DEFAULT_RATES = DrivingRates()


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedRate:
    """What one lane reached: bytes, FLOPs (`gpu`) or updated parameters (`cpu`) per second."""

    lane: Lane
    before_per_second: float
    """The machine's rate, as it was."""
    observed_per_second: float


def observed_rates(
    machine: Machine, ran: Sequence[TimedTask], rates: DrivingRates = DEFAULT_RATES
) -> tuple[ObservedRate, ...]:
    """Return what the lanes reached, those with enough evidence, in the vocabulary's order.

    Args:
        machine: what the tasks were planned for; its GPU's own memory rate is taken as right.
        ran: tasks of its schedule.
        rates: how the system drives the machine, as the plan has it.
    """
    # What shares a link does so whether or not its own rate can be told.
    busy = busy_lanes(ran)
    durations = Durations(machine, rates)
    timed = [
        one
        for one in ran
        if _is_timed(one[0], rates) and not _is_launching(one[0], machine, durations)
    ]
    found = (
        _observe(
            lane, [one for one in timed if one[0].lane is lane], busy, machine, rates, durations
        )
        for lane in Lane
    )
    return tuple(observed for observed in found if observed is not None)


def refine(
    machine: Machine, tasks: Iterable[Task], trace: Trace, rates: DrivingRates = DEFAULT_RATES
) -> Machine:
    """Return the machine with the rates that a traced run of these tasks reached.

    Spans are matched by lane, step and id. The SSD write rate is not raised: a machine's is the one
    its drives hold for hours, and one step may well end inside their cache.
    """
    by_id = {(task.lane, task.step, int(task.id)): task for task in tasks}
    keyed = [
        ((one.lane, one.step, -1 if one.task is None else one.task), one) for one in trace.spans
    ]
    ran = [(by_id[key], one.start_seconds, one.end_seconds) for key, one in keyed if key in by_id]
    for observed in observed_rates(machine, ran, rates):
        is_raised = observed.observed_per_second > observed.before_per_second
        if observed.lane is not Lane.SSD_WRITE or not is_raised:
            machine = with_rate(machine, observed)
    return machine


def busy_lanes(ran: Sequence[TimedTask]) -> dict[Lane, list[Interval]]:
    """When each lane worked."""
    by_lane: dict[Lane, list[Interval]] = {lane: [] for lane in Lane}
    for task, start, end in ran:
        by_lane[task.lane].append((start, end))
    return {lane: merged(sorted(found)) for lane, found in by_lane.items()}


def _is_timed(task: Task, rates: DrivingRates) -> bool:
    """Whether the task's time follows from its lane's rate alone."""
    action = task.action
    if isinstance(action, Move):
        is_pageable = rates.activation_copy_bytes_per_second is not None
        is_own = is_pageable and task.lane in _COPY_LANES and action.kind is TensorKind.A16
        return action.nbytes > 0 and not is_own
    if task.lane is Lane.GPU:
        return action.flops > 0 or action.touched_bytes > 0
    return action.kind is ComputeKind.UPDATE and action.num_parameters > 0


def _is_launching(task: Task, machine: Machine, durations: Durations) -> bool:
    """Whether a GPU waits for the host all along, so that its time says nothing about its rate."""
    if machine.gpu.is_processor or task.lane is not Lane.GPU:
        return False
    return durations.of(task) <= task.fixed_seconds + durations.launching(task)


def _observe(
    lane: Lane,
    ran: Sequence[TimedTask],
    busy: Mapping[Lane, Sequence[Interval]],
    machine: Machine,
    rates: DrivingRates,
    durations: Durations,
) -> ObservedRate | None:
    if len(ran) < _LEAST_TASKS:
        return None
    own = merged(sorted((start, end) for _, start, end in ran))
    took_seconds = whole_seconds = sum(end - start for start, end in own)
    took_seconds -= lost_seconds(lane, own, busy, machine, rates)
    took_seconds -= math.fsum(task.fixed_seconds for task, _, _ in ran)
    tasks = [replace(task, fixed_seconds=0.0) for task, _, _ in ran]
    if lane is Lane.GPU:
        # The rate of the GPU's own memory is not in question, nor is the host's: their parts of
        # the time are set aside.
        took_seconds -= math.fsum(durations.of(_touching(task)) for task in tasks)
        if machine.gpu.is_processor:
            took_seconds -= math.fsum(map(durations.launching, tasks))
        tasks = [_computing(task) for task in tasks]
        if took_seconds < _LEAST_COMPUTE_SHARE * whole_seconds:
            return None  # What is left is the error of that rate.
    expected_seconds = math.fsum(durations.of(task) for task in tasks)
    if max(took_seconds, expected_seconds) < LEAST_BUSY_SECONDS or expected_seconds <= 0:
        return None
    # Work that should have taken long and took no time (a copy that vanished) is evidence too, of
    # a rate as high as can be told.
    took_seconds = max(took_seconds, LEAST_BUSY_SECONDS)
    before = _rate_of(machine, lane)
    observed = before * expected_seconds / took_seconds
    if not LEAST_RATE <= observed <= MOST_RATE:
        return None
    return ObservedRate(lane=lane, before_per_second=before, observed_per_second=observed)


def lost_seconds(
    lane: Lane,
    own: Sequence[Interval],
    busy: Mapping[Lane, Sequence[Interval]],
    machine: Machine,
    rates: DrivingRates,
) -> float:
    """Time in which the lane worked for nothing, because others had their share."""
    if lane in _SSD_LANES and not machine.ssd_path.is_duplex:
        other = _SSD_LANES[1 - _SSD_LANES.index(lane)]
        return overlap_seconds(own, busy[other]) / 2
    if machine.gpu.is_processor:
        if lane not in _CORE_LANES:
            return 0.0
        other = _CORE_LANES[1 - _CORE_LANES.index(lane)]
        return overlap_seconds(own, busy[other]) / 2
    if lane is Lane.GPU:
        shared = sum(overlap_seconds(own, busy[copies]) for copies in _COPY_LANES)
        return rates.copy_interference * shared
    return 0.0


def _computing(task: Task) -> Task:
    assert isinstance(task.action, Compute)
    return replace(task, action=replace(task.action, touched_bytes=0, num_launches=0))


def _touching(task: Task) -> Task:
    assert isinstance(task.action, Compute)
    return replace(task, action=replace(task.action, flops=0, num_launches=0))


def _rate_of(machine: Machine, lane: Lane) -> float:
    return {
        Lane.GPU: machine.gpu.flops_per_second,
        Lane.GPU_TO_RAM: machine.gpu_to_ram_bytes_per_second,
        Lane.RAM_TO_GPU: machine.ram_to_gpu_bytes_per_second,
        Lane.SSD_READ: machine.ssd_read_bytes_per_second,
        Lane.SSD_WRITE: machine.ssd_write_bytes_per_second,
        Lane.CPU: machine.cpu_update_parameters_per_second,
    }[lane]


def with_rate(machine: Machine, observed: ObservedRate) -> Machine:
    """The machine with one lane as fast as it was observed to be."""
    rate, lane = observed.observed_per_second, observed.lane
    factor = rate / observed.before_per_second
    if lane is Lane.GPU:
        by_dtype = tuple(
            (name, _scaled(other, factor)) for name, other in machine.gpu.flops_per_second_by_dtype
        )
        gpu = replace(machine.gpu, flops_per_second=rate, flops_per_second_by_dtype=by_dtype)
        return replace(machine, gpu=gpu)
    if lane is Lane.GPU_TO_RAM:
        return replace(machine, gpu_to_ram_bytes_per_second=rate)
    if lane is Lane.RAM_TO_GPU:
        return replace(machine, ram_to_gpu_bytes_per_second=rate)
    if lane is Lane.CPU:
        return replace(machine, cpu_update_parameters_per_second=rate)
    # Which drive was slower cannot be told from the sum: all change alike, and the path with them.
    path = machine.ssd_path
    if lane is Lane.SSD_READ:
        ceiling = _scaled(path.read_ceiling_bytes_per_second, factor)
        path = replace(path, read_ceiling_bytes_per_second=ceiling)
    else:
        ceiling = _scaled(path.write_ceiling_bytes_per_second, factor)
        path = replace(path, write_ceiling_bytes_per_second=ceiling)
    drives = tuple(_with_factor(ssd, lane, factor) for ssd in machine.ssds)
    return replace(machine, ssds=drives, ssd_path=path)


def _with_factor(ssd: Ssd, lane: Lane, factor: float) -> Ssd:
    if lane is Lane.SSD_READ:
        rate = _scaled(ssd.read_bytes_per_second, factor)
        return replace(ssd, read_bytes_per_second=rate)
    return replace(ssd, write_bytes_per_second=_scaled(ssd.write_bytes_per_second, factor))


def _scaled(rate: float, factor: float) -> float:
    return min(max(rate * factor, LEAST_RATE), MOST_RATE)
