"""Fixes the order of every lane, and reads the steady state off the last step of that order.

`simulate_plan` is the door: plan in, SimulatedStep out. The events are in `clock`; what a step's
numbers mean is in `result`. A replay keeps to the order that `settle` wrote down; the engine does
not, its lanes choose anew by the same rule (`schedule.ready`).
"""

from lohan.errors import bug
from lohan.hardware.machine import Machine
from lohan.plan.plan import Plan
from lohan.plan.system import DrivingRates
from lohan.schedule.build import build_schedule
from lohan.schedule.check import check_schedule, check_serial
from lohan.schedule.task import Compute, Move, Schedule
from lohan.simulate.bottleneck import bottleneck_words, busiest_resource
from lohan.simulate.clock import Clock, ClockResult
from lohan.simulate.durations import Durations
from lohan.simulate.result import SimulatedStep
from lohan.vocabulary import ComputeKind, Lane, Tier

NUM_STEPS = 5
"""Steps simulated where steps overlap: the first ones fill the pipeline, the last one drains it."""
NUM_STEADY_STEPS = 1
"""Steps at the end that are measured: the pipeline is full, and what follows is not waited for."""


def settle(
    schedule: Schedule, machine: Machine, rates: DrivingRates, durations: Durations | None = None
) -> tuple[Schedule, ClockResult]:
    """The same tasks in the order a run takes them, and when each ran: a replay says the same.

    Each lease gets an edge from the tasks whose returned bytes it uses, so room in a pool follows
    from the order alone.

    Raises:
        ScheduleError: if the tasks cannot all run.
    """
    durations = durations or Durations(machine, rates)
    result = Clock(schedule, durations, machine, rates).run(by_priority=True)
    settled = schedule.with_order(
        {lane: tuple(ids) for lane, ids in result.order.items()},
        {task: tuple(givers) for task, givers in result.edges.items()},
    )
    return settled, result


def settled_schedule(plan: Plan, machine: Machine, *, num_steps: int = NUM_STEPS) -> Schedule:
    """The plan's tasks for several steps, in their final order, checked.

    Raises:
        ScheduleError: if the tasks cannot run, or a check fails.
    """
    return _settled(plan, machine, Durations(machine, plan.system.rates), num_steps)[0]


def _settled(
    plan: Plan, machine: Machine, durations: Durations, num_steps: int
) -> tuple[Schedule, ClockResult]:
    """The settled schedule, and when its tasks ran while it was settled: a replay says the same."""
    # With a barrier every step begins when the one before has ended: two steps show them all.
    schedule = build_schedule(plan, num_steps=2 if plan.system.has_barrier else num_steps)
    check_serial(schedule)
    schedule, times = settle(schedule, machine, plan.system.rates, durations)
    check_schedule(schedule, plan)
    return schedule, times


def replay(schedule: Schedule, plan: Plan, machine: Machine) -> ClockResult:
    """When each task of a settled schedule runs.

    Raises:
        ScheduleError: if the schedule is not settled.
    """
    if not schedule.is_settled:
        raise bug("a schedule that has no final order was to be replayed")
    rates = plan.system.rates
    return Clock(schedule, Durations(machine, rates), machine, rates).run(by_priority=False)


def simulate_plan(
    plan: Plan,
    machine: Machine,
    *,
    num_steps: int = NUM_STEPS,
    durations: Durations | None = None,
) -> SimulatedStep:
    """Predict one step of a plan in the steady state. `durations`: of tasks, if better known than
    by the machine's rates."""
    durations = durations or Durations(machine, plan.system.rates)
    schedule, times = _settled(plan, machine, durations, num_steps)
    return read_off(schedule, times, plan, machine, durations)


def read_off(
    schedule: Schedule,
    times: ClockResult,
    plan: Plan,
    machine: Machine,
    durations: Durations | None = None,
) -> SimulatedStep:
    """The numbers of a replay's last step."""
    durations = durations or Durations(machine, plan.system.rates)
    last = schedule.num_steps - 1 if schedule.num_steps == 2 else schedule.num_steps - 2
    tasks = [task for task in schedule.tasks if task.step == last]
    alone = dict.fromkeys(Lane, 0.0)
    begin, turn, end, after = _boundaries(schedule, times)
    moved = dict.fromkeys(schedule.lanes, 0)
    launching = sum(map(durations.launching, tasks))
    for task in tasks:
        # How long lanes work when nothing waits or contends. A fixed cost is the system's own.
        alone[task.lane] += durations.of(task) - task.fixed_seconds
        if isinstance(task.action, Move):
            moved[task.lane] += task.action.nbytes
    resource, roofline = busiest_resource(alone, machine, launching)
    # Updates may still fall behind after a few steps; in the long run nothing beats the roofline.
    step_seconds = max(after - begin, roofline)
    return SimulatedStep(
        policy=plan.policy,
        model=plan.shape.name,
        machine=machine.name,
        step_seconds=step_seconds,
        forward_seconds=turn - begin,
        backward_seconds=end - turn,
        optimizer_seconds=max(0.0, after - end),
        num_tokens=plan.workload.num_tokens,
        num_sequences=plan.workload.batch,
        nominal_parameters=plan.shape.nominal_parameters or plan.shape.num_parameters,
        model_flops=_model_flops(plan),
        busy_seconds={lane: alone[lane] for lane in schedule.lanes},
        launch_seconds=launching,
        roofline_seconds=roofline,
        roofline_resource=resource,
        read_bytes=moved.get(Lane.SSD_READ, 0),
        written_bytes=moved.get(Lane.SSD_WRITE, 0),
        gpu_to_ram_bytes=moved.get(Lane.GPU_TO_RAM, 0),
        ram_to_gpu_bytes=moved.get(Lane.RAM_TO_GPU, 0),
        peak_bytes=_peaks(schedule, times),
        endurance_bytes=machine.ssd_endurance_bytes,
        price_dollars=machine.price_dollars,
        bottleneck=bottleneck_words(alone, step_seconds, machine, launching),
    )


def _boundaries(schedule: Schedule, times: ClockResult) -> tuple[float, float, float, float]:
    """Start of a steady forward pass, its turn, its last gradient, the next step's start."""
    forward_starts: dict[int, float] = {}
    forward_ends: dict[int, float] = {}
    backward_ends: dict[int, float] = {}
    everything: dict[int, float] = {}
    for task in schedule.tasks:
        end = times.end_seconds[task.id]
        everything[task.step] = max(everything.get(task.step, 0.0), end)
        if task.lane is not Lane.GPU or not isinstance(task.action, Compute):
            continue
        if task.action.kind is ComputeKind.FORWARD:
            start = times.start_seconds[task.id]
            forward_starts[task.step] = min(forward_starts.get(task.step, start), start)
            forward_ends[task.step] = max(forward_ends.get(task.step, 0.0), end)
        elif task.action.kind is ComputeKind.BACKWARD:
            backward_ends[task.step] = max(backward_ends.get(task.step, 0.0), end)
    last = schedule.num_steps - 1
    if schedule.num_steps == 2:
        begin = everything[0]
        return begin, forward_ends[1], backward_ends[1], everything[1]
    # Without a barrier a step is what lies between two last gradients.
    step = last - 1
    seconds = (backward_ends[step] - backward_ends[step - NUM_STEADY_STEPS]) / NUM_STEADY_STEPS
    end = backward_ends[step]
    turn = end - min(end - forward_ends[step], seconds)
    return end - seconds, turn, end, end


def _peaks(schedule: Schedule, times: ClockResult) -> dict[Tier, int]:
    in_use = dict.fromkeys(schedule.pools, 0)
    tiers = dict.fromkeys(Tier, 0)
    peaks = dict.fromkeys(Tier, 0)
    for _now, pool, nbytes in times.usage:
        tier = schedule.pools[pool].tier
        tiers[tier] += nbytes - in_use[pool]
        in_use[pool] = nbytes
        peaks[tier] = max(peaks[tier], tiers[tier])
    return {tier: peak + schedule.initial.get(tier, 0) for tier, peak in peaks.items()}


def _model_flops(plan: Plan) -> int:
    batch, sequence = plan.workload.batch, plan.workload.sequence
    return sum(
        plan.shape.kinds[kind].forward_flops.at(batch, sequence)
        + plan.shape.kinds[kind].backward_flops.at(batch, sequence)
        for kind in plan.shape.sequence_of_kinds
    )
