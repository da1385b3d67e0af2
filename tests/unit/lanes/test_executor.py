"""The lane executor: order, dependencies, the first failure, and nothing left behind."""

import random
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest

from lohan.errors import ScheduleError
from lohan.lanes.executor import LaneExecutor
from lohan.schedule import RollingSchedule
from lohan.schedule.task import Compute, Lease, Move, Task
from lohan.trace import Recorder
from lohan.vocabulary import BlockId, ComputeKind, Lane, TaskId, TensorKind, Tier
from support.random_plans import random_plan

THREADED = (Lane.SSD_READ, Lane.SSD_WRITE, Lane.RAM_TO_GPU, Lane.GPU_TO_RAM, Lane.CPU)


def task(number: int, lane: Lane, *after: int) -> Task:
    action = (
        Compute(ComputeKind.FORWARD)
        if lane in (Lane.GPU, Lane.CPU)
        else Move(TensorKind.P16, Tier.SSD, Tier.RAM, 8)
    )
    return Task(TaskId(number), lane, BlockId(0), 0, action, tuple(TaskId(n) for n in after))


def executor_of(action: Callable[[Task], None], recorder: Recorder | None = None) -> LaneExecutor:
    return LaneExecutor(dict.fromkeys(THREADED, action), recorder=recorder)


def lane_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("lohan-")]


@pytest.mark.parametrize("seed", range(20))
def test_random_graphs_run_after_their_dependencies_and_wholly(seed: int) -> None:
    chance = random.Random(seed)
    lanes = [*THREADED, Lane.GPU]
    tasks = [
        task(n, chance.choice(lanes), *chance.sample(range(n), min(n, chance.randrange(4))))
        for n in range(120)
    ]
    finished: list[int] = []
    lock = threading.Lock()

    def action(done: Task) -> None:
        with lock:
            assert set(done.after) <= set(finished)
            finished.append(done.id)

    with executor_of(action) as executor:
        executor.submit(tasks[:50])
        executor.submit(tasks[50:])
        for driven in [known for known in tasks if known.lane is Lane.GPU]:
            with executor.drive(driven):
                action(driven)
        executor.wait_all()
    assert sorted(finished) == list(range(120))
    assert not lane_threads()


@pytest.mark.parametrize("failing", range(8))
def test_the_first_failure_stops_all_lanes_and_is_what_the_caller_sees(failing: int) -> None:
    lanes = [Lane.SSD_READ, Lane.RAM_TO_GPU, Lane.CPU, Lane.SSD_WRITE]
    tasks = [task(n, lanes[n % 4], *([n - 1] if n else [])) for n in range(8)]
    ran: list[int] = []

    def action(done: Task) -> None:
        ran.append(done.id)
        if done.id == failing:
            raise OSError(5, "no more")

    executor = executor_of(action, Recorder())
    executor.submit(tasks)
    with pytest.raises(OSError, match="no more") as caught:
        executor.wait_all()
    executor.close(should_finish=False)
    assert ran == list(range(failing + 1))
    story = "\n".join(caught.value.__notes__)
    assert f"on lane {lanes[failing % 4]}" in story
    assert ("before it" in story) == (failing >= 4)
    assert not lane_threads()


def test_a_failure_reaches_a_driver_that_waits_for_another_lane() -> None:
    def action(done: Task) -> None:
        raise OSError(5, "gone")

    executor = executor_of(action)
    driven = task(1, Lane.GPU, 0)
    executor.submit([task(0, Lane.SSD_READ), driven])
    with pytest.raises(OSError, match="gone"), executor.drive(driven):
        pytest.fail("it must not start")
    with pytest.raises(OSError, match="gone"):
        executor.submit([task(2, Lane.CPU)])
    executor.close(should_finish=False)
    assert not lane_threads()


def test_an_interrupt_in_the_driver_stops_the_lanes() -> None:
    def interrupted() -> None:
        with executor_of(lambda _: None) as executor:
            driven = task(0, Lane.GPU)
            executor.submit([driven, task(1, Lane.CPU, 0)])
            with executor.drive(driven):
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not lane_threads()


def test_closing_without_finishing_leaves_queued_tasks_unrun() -> None:
    ran: list[int] = []
    executor = executor_of(lambda done: ran.append(done.id))
    executor.submit([task(0, Lane.GPU), task(1, Lane.CPU, 0)])
    executor.close(should_finish=False)
    executor.close()
    assert ran == []
    with pytest.raises(ScheduleError, match="closed"):
        executor.wait(TaskId(1))


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ([task(0, Lane.CPU), task(0, Lane.CPU)], "used before"),
        ([task(0, Lane.PEER)], "no action"),
        ([task(0, Lane.CPU, 7)], "never run"),
    ],
)
def test_tasks_that_could_never_run_are_refused_whole(tasks: list[Task], message: str) -> None:
    with executor_of(lambda _: None) as executor:
        with pytest.raises(ScheduleError, match=message):
            executor.submit(tasks)
        executor.wait_all()


def test_driving_out_of_order_is_refused() -> None:
    first, second = task(0, Lane.GPU), task(1, Lane.GPU)
    executor = executor_of(lambda _: None)
    executor.submit([first, second])
    with pytest.raises(ScheduleError, match="is next on gpu"), executor.drive(second):
        pytest.fail("it must not start")
    executor.close(should_finish=False)


def test_finished_tasks_are_forgotten() -> None:
    with executor_of(lambda _: None) as executor:
        for number in range(1000):
            executor.submit([task(number, Lane.CPU, *([number - 1] if number else []))])
            executor.wait(TaskId(number))
            assert executor.is_idle
        assert not any(executor._ready._may_run.values())
        assert not executor._last_before


def test_the_most_urgent_task_that_may_run_goes_first() -> None:
    gate, ran = threading.Event(), []

    def action(done: Task) -> None:
        gate.wait()
        ran.append(done.id)

    late = replace(task(1, Lane.CPU), priority=(1, 1))
    urgent = replace(task(2, Lane.CPU), priority=(0, 2))
    blocked = replace(task(3, Lane.CPU, 4), priority=(0, 0))
    with executor_of(action) as executor:
        executor.submit([task(0, Lane.CPU)])
        executor.submit([late, urgent, task(4, Lane.SSD_READ), replace(blocked, id=TaskId(5))])
        gate.set()
        executor.wait_all()
    cpu = [number for number in ran if number != 4]
    assert cpu.index(2) < cpu.index(1)


@pytest.mark.parametrize("seed", range(6))
def test_schedules_of_random_plans_run_to_their_end_within_their_pools(seed: int) -> None:
    plan, _ = random_plan(seed)
    rolling = RollingSchedule(plan)
    in_use = dict.fromkeys(rolling.pools, 0)
    held: dict[tuple[str, str], int] = {}
    lock = threading.Lock()

    def lease(done: Task) -> None:
        with lock:
            for one in done.leases:
                in_use[one.pool] += one.nbytes
                held[one.pool, one.key] = one.nbytes
                assert in_use[one.pool] <= rolling.pools[one.pool].capacity_bytes

    def give_back(one: Lease) -> None:
        with lock:
            in_use[one.pool] -= held.pop((one.pool, one.key))

    with LaneExecutor(
        dict.fromkeys(THREADED, lease), pools=rolling.pools, give_back=give_back
    ) as executor:
        for pass_number in range(6):
            is_evaluation = pass_number == 3
            tasks = rolling.flush() + rolling.evaluation() if is_evaluation else rolling.step()
            executor.submit(tasks)
            for driven in [one for one in tasks if one.lane is Lane.GPU]:
                with executor.drive(driven):
                    lease(driven)
        executor.submit(rolling.flush())
        executor.wait_all()
    assert not held
    assert not any(in_use.values())


def test_spans_say_what_was_waited_for() -> None:
    recorder = Recorder()
    release = threading.Event()

    def action(done: Task) -> None:
        if done.id == 0:
            release.wait()

    with executor_of(action, recorder) as executor:
        executor.submit([task(0, Lane.SSD_READ), task(1, Lane.CPU, 0)])
        release.set()
        executor.wait_all()
    spans = {span.task: span for span in recorder.trace("run").spans}
    assert spans[TaskId(1)].start_seconds >= spans[TaskId(0)].end_seconds
    assert spans[TaskId(0)].nbytes == 8
