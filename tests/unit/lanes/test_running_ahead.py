"""Driven tasks on a device with a queue of its own: what may be launched, and what must wait."""

import threading
from typing import Any

import pytest

from lohan.errors import HardwareError
from lohan.lanes.executor import LaneExecutor
from lohan.lanes.lane_load import LaneLoad
from lohan.schedule.task import Compute, Lease, Move, Pool, Task
from lohan.trace import Recorder
from lohan.vocabulary import BlockId, ComputeKind, Lane, PoolName, TaskId, TensorKind, Tier

PATIENCE_SECONDS = 60


class Point:
    """One point of compute, done when the test says so."""

    def __init__(self, number: int) -> None:
        self.number, self.done, self.error = number, threading.Event(), None

    def is_done(self) -> bool:
        return self.done.is_set()


class HandQueue:
    """Compute that goes on when it is told to; its clock counts points."""

    def __init__(self) -> None:
        self.points: list[Point] = []

    def record(self) -> Point:
        self.points.append(Point(len(self.points)))
        return self.points[-1]

    def wait(self, event: Any) -> None:
        assert event.done.wait(PATIENCE_SECONDS)
        if event.error is not None:
            raise event.error

    def seconds_between(self, first: Any, second: Any) -> float:
        assert first.number <= second.number
        return float(second.number - first.number)

    def copy_in(self, dst: Any, src: Any) -> None:
        raise AssertionError("nothing is copied here")

    def finish(self, error: BaseException | None = None) -> None:
        for point in self.points:
            if not point.is_done():
                point.error = error
                point.done.set()


def task(number: int, lane: Lane, *after: int, **more: Any) -> Task:
    action = (
        Compute(ComputeKind.FORWARD)
        if lane is Lane.GPU
        else Move(TensorKind.G16, Tier.GPU, Tier.RAM, 8)
    )
    before = tuple(TaskId(one) for one in after)
    return Task(TaskId(number), lane, BlockId(number), 0, action, before, **more)


def launch(executor: LaneExecutor, *tasks: Task) -> None:
    for one in tasks:
        with executor.drive(one):
            pass


def test_the_next_task_is_launched_and_other_lanes_wait_for_the_device() -> None:
    queue, left = HandQueue(), list[int]()
    has_left = threading.Event()

    def leave(moved: Task) -> None:
        left.append(moved.id)
        has_left.set()

    first, second = task(0, Lane.GPU), task(2, Lane.GPU, 0)
    with LaneExecutor({Lane.GPU_TO_RAM: leave}, queue=queue) as executor:
        executor.submit([first, task(1, Lane.GPU_TO_RAM, 0), second])
        launch(executor, first, second)
        assert not left
        assert not executor.is_idle
        queue.finish()
        executor.wait_all()
        assert has_left.is_set()


def test_room_is_there_when_the_device_is_done() -> None:
    """So that pools bound how far the host runs ahead."""
    queue, given_back = HandQueue(), list[str]()
    leases = [Lease(PoolName.KEPT, str(number), 8) for number in range(2)]
    tasks = [
        task(number, Lane.GPU, *([0] if number else []), leases=(lease,), returns=(lease,))
        for number, lease in enumerate(leases)
    ]
    pools = {PoolName.KEPT: Pool(PoolName.KEPT, Tier.GPU, 8)}
    with LaneExecutor(
        {}, pools=pools, queue=queue, give_back=lambda lease: given_back.append(lease.key)
    ) as executor:
        executor.submit(tasks)
        launch(executor, tasks[0])
        second = threading.Thread(target=launch, args=(executor, tasks[1]))
        second.start()
        second.join(0.05)
        assert second.is_alive()
        assert given_back == []
        queue.finish()
        second.join(PATIENCE_SECONDS)
        assert not second.is_alive()
        queue.finish()
        executor.wait_all()
    assert given_back == ["0", "1"]


def test_times_are_the_devices_own() -> None:
    queue, ran = HandQueue(), list[tuple[int, float]]()
    load = LaneLoad()

    def finished(done: Task, start: float, end: float, *, is_starved: bool = False) -> None:
        ran.append((done.id, round(end - start, 6)))
        load.add(done, start, end, is_starved=is_starved)

    tasks = [task(0, Lane.GPU), task(1, Lane.GPU, 0)]
    with LaneExecutor(
        {},
        queue=queue,
        recorder=Recorder(),
        on_finish=finished,
    ) as executor:
        executor.submit(tasks)
        launch(executor, *tasks)
        queue.finish()
        executor.wait_all()
    assert ran == [(0, 1.0), (1, 1.0)]  # a point each: one begins where the other ends
    # By its clock the device took a second for each, which the host launched at once.
    assert load.starved_seconds == 0


def test_a_device_that_is_done_as_soon_as_work_is_launched_has_waited_for_the_host() -> None:
    class QuickQueue(HandQueue):
        def seconds_between(self, first: Any, second: Any) -> float:
            return 1e-9 * super().seconds_between(first, second)

    queue, load, only = QuickQueue(), LaneLoad(), task(0, Lane.GPU)
    with LaneExecutor({}, queue=queue, recorder=Recorder(), on_finish=load.add) as executor:
        executor.submit([only])
        launch(executor, only)
        queue.finish()
        executor.wait_all()
    assert 0 < load.starved_seconds < 1e-8


def test_a_failure_of_the_device_is_told_with_the_first_task_it_may_be_of() -> None:
    queue = HandQueue()
    tasks = [task(0, Lane.GPU), task(1, Lane.GPU, 0)]
    executor = LaneExecutor({}, queue=queue)
    executor.submit(tasks)
    launch(executor, *tasks)
    queue.finish(HardwareError("the device failed", why="a kernel did", remedy="start again"))
    with pytest.raises(HardwareError) as caught:
        executor.wait_all()
    executor.close(should_finish=False)
    (story,) = caught.value.__notes__
    assert tasks[0].name in story.splitlines()[0]
    assert f"or in what was launched behind it ({tasks[1].name})" in story.splitlines()[0]
