"""Lanes that run tasks for real: a thread each, the most urgent task that may run first.

Owns threads, the first failure and its story. What a task does is the caller's action; which task
may run is the rule of `schedule.ready`, as for the simulator. The `gpu` lane has no thread: the
main thread drives it, because the model's own forward runs there (`drive`).

Note "Running ahead". Where the device has a queue of compute, the work of a driven task is only
queued when its with-block ends, and the next one may be queued behind it as soon as everything it
needs from other lanes is there: weights, and room in the pools it leases from. A task is done, for
whoever comes after it and for what it returns, when the device is done with it: a thread of its own
waits for that, the launching one never does. So pools bound how far it runs ahead.

Note "Lane threads".
Runs on: actions on the thread of their lane; `submit`, `drive`, `wait`, `close` on the caller's.
May block: `drive` and `wait`, on tasks of other lanes.
Owns until: what a task leases belongs to it from the start of its action until a task returns it.
The first exception of any action stops all lanes after the task each is at; it is what every
waiting call raises, with the task's story attached. A stopped executor runs nothing any more.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Protocol, Self

from lohan.device.device import ComputeQueue
from lohan.errors import HardwareError, LohanError, bug
from lohan.lanes.launched import Launch, Launched
from lohan.schedule.ready import Ready
from lohan.schedule.task import Lease, Move, Pool, Task
from lohan.trace import Recorder
from lohan.vocabulary import Lane, PoolName, TaskId

Action = Callable[[Task], None]


class OnFinish(Protocol):
    """Told each task that ended, with start and end."""

    def __call__(self, task: Task, start: float, end: float, *, is_starved: bool = False) -> None:
        """`is_starved`: the device waited for the host to launch its work, to the end."""


_NUM_STORY_SPANS = 10
_STARVED_SHARE = 0.25
"""Of a task's time: if the device is done so soon after the host, it had nothing left to do."""


class LaneExecutor:
    """Runs submitted tasks on their lanes. A context manager; leaving it closes the lanes."""

    def __init__(
        self,
        actions: Mapping[Lane, Action],
        *,
        pools: Mapping[PoolName, Pool] | None = None,
        give_back: Callable[[Lease], None] | None = None,
        driven: Lane = Lane.GPU,
        queue: ComputeQueue | None = None,
        recorder: Recorder | None = None,
        on_finish: OnFinish | None = None,
    ) -> None:
        """`actions` has one entry per lane with a thread; `driven` is run by the caller, on the
        device whose `queue` it is; see note "Running ahead".

        `give_back` is told each lease a task returns, on its thread, before others may have the
        room; `on_finish` each task that ended, with start and end. What the caller does between
        two tasks of its lane is work, not waiting: there it counts as the beginning of the second.
        """
        self._actions, self._driven = dict(actions), driven
        self._recorder = recorder if recorder is not None else Recorder(is_on=False)
        self._give_back, self._on_finish = give_back, on_finish
        self._lock = threading.Lock()
        # Threads are woken for what they can do and nothing else: each that wakes for nothing
        # takes Python's lock from the thread that launches work.
        self._may_go_on = {lane: threading.Condition(self._lock) for lane in self._actions}
        self._asleep: set[Lane] = set()
        self._callers = threading.Condition(self._lock)
        self._awaited: list[Callable[[], bool]] = []
        self._pools = pools or {}
        self._ready = Ready(self._pools)
        self._next_id = 0
        self._last_before: dict[TaskId, str] = {}
        self._driven_order: deque[Task] = deque()
        self._driven_since = self._recorder.now()
        self._launched = Launched(queue) if queue is not None else None
        self._has_launched = threading.Condition(self._lock)
        self._failure: BaseException | None = None
        self._last_driven: Task | None = None
        self._is_closing = False
        self._threads = [
            threading.Thread(target=self._run_lane, args=(lane,), name=f"lohan-{lane}", daemon=True)
            for lane in self._actions
        ]
        if self._launched is not None:
            finish = threading.Thread(
                target=self._finish_launched,
                args=(self._launched,),
                name=f"lohan-{driven}",
                daemon=True,
            )
            self._threads.append(finish)
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close(should_finish=error is None)

    # What the caller does ----------------------------------------------------------------------

    def submit(self, tasks: Iterable[Task]) -> None:
        """Add tasks, in an order in which they could run one by one; ids ascend over all calls.

        Raises:
            ScheduleError: if a lane or pool is unknown, an id was used before, or a task would come
                after one that was never submitted; then none of the tasks is taken.
        """
        batch = list(tasks)
        with self._lock:
            self._raise_failure()
            self._check(batch)
            self._ready.add(batch)
            self._driven_order.extend(task for task in batch if task.lane is self._driven)
            self._next_id = batch[-1].id + 1 if batch else self._next_id
            self._driven_since = self._recorder.now()
            if self._launched is not None:
                self._launched.compare_clocks(self._driven_since)
            self._wake()

    def _check(self, batch: list[Task]) -> None:
        known, last = {task.id for task in batch}, self._next_id - 1
        for task in batch:
            if task.id <= last:
                raise self._refused("its id was used before", task)
            last = task.id
            if task.lane not in self._actions and task.lane is not self._driven:
                raise self._refused(f"lane {task.lane} has no action", task)
            missing = sorted(
                before for before in task.after if before >= self._next_id and before not in known
            )
            if missing or any(before >= task.id for before in task.after):
                raise self._refused(f"it comes after {missing or task.after}, never run", task)
            unknown = {lease.pool for lease in task.leases} - self._pools.keys()
            if unknown:
                raise self._refused(f"it leases from unknown pools {sorted(unknown)}", task)

    @contextmanager
    def drive(self, task: Task) -> Iterator[None]:
        """Run a task of the driven lane as a with-block: wait until it may run, then work.

        Raises:
            ScheduleError: if another task is next on the driven lane.
            BaseException: the first failure of any lane.
        """
        entered = self._recorder.now()
        with self._lock:
            order = self._driven_order
            if not order or order[0].id != task.id:
                expected = order[0].name if order else "nothing"
                raise self._refused(f"{expected} is next on {self._driven}", task)
            has_waited = not self._ready.may_run(task)
            self._await(lambda: self._ready.may_run(task))
            self._raise_failure()
            order.popleft()
            self._start(task)
            self._last_driven = task
        started = self._recorder.now()
        ahead = self._launched
        try:
            began = ahead.begin(has_waited=has_waited) if ahead is not None else None
            yield
            if ahead is None or began is None:
                self._finish(task, started, entered - self._driven_since)
            else:
                done = ahead.end()
                with self._lock:
                    ahead.add(Launch(task, began, done, self._recorder.now()))
                    self._ready.launch(task)
                    self._has_launched.notify()
                    self._wake()
        except BaseException as error:
            self._fail(error, task)
            raise
        self._driven_since = self._recorder.now()

    def wait(self, task: TaskId) -> None:
        """Wait until a task is done.

        Raises:
            BaseException: the first failure of any lane.
        """
        with self._lock:
            self._await(lambda: task not in self._ready)
            if task in self._ready:
                self._raise_failure()

    def wait_all(self) -> None:
        """Wait until every submitted task is done. Raises the first failure of any lane."""
        with self._lock:
            self._await(lambda: not self._ready)
            if self._ready:
                self._raise_failure()

    @property
    def is_idle(self) -> bool:
        """Whether every submitted task is done."""
        with self._lock:
            return not self._ready

    def stop(self, error: BaseException) -> None:
        """Stop all lanes because of an error that happened outside the work of any lane.

        What failed on the device was the work of the task driven last, or of one before it; if a
        lane has met the same failure first, its story is that of this error too.
        """
        with self._lock:
            if isinstance(error, HardwareError) and error is not self._failure:
                notes = getattr(self._failure, "__notes__", [])
                if self._failure is None and self._last_driven is not None:
                    notes = [self._story(self._first_suspect(self._last_driven))]
                for note in notes:
                    error.add_note(note)
            self._failure = self._failure or error
            self._wake()

    def close(self, *, should_finish: bool = True) -> None:
        """Stop the lanes and join their threads; may be called twice.

        Each lane ends after the task it is at. With `should_finish` all submitted tasks run first.
        """
        try:
            if should_finish and not self._is_closing:
                self.wait_all()
        finally:
            with self._lock:
                self._is_closing = True
                self._wake()
            for thread in self._threads:
                thread.join()

    # What a lane does --------------------------------------------------------------------------

    def _run_lane(self, lane: Lane) -> None:
        action = self._actions[lane]
        while True:
            with self._lock:
                task = self._ready.next_of(lane)
                while task is None and not self._is_over():
                    self._asleep.add(lane)
                    self._may_go_on[lane].wait()
                    task = self._ready.next_of(lane)
                if task is None or self._is_over():
                    return
                self._start(task)
            started = self._recorder.now()
            try:
                action(task)
                self._finish(task, started)
            # Whatever an action raises, an interrupt included, must reach the main thread.
            except BaseException as error:
                self._fail(error, task)
                return

    def _finish_launched(self, launched: Launched) -> None:
        """Driven tasks are done when the device is done with them. Runs on: a thread of its own."""
        while True:
            with self._lock:
                self._has_launched.wait_for(lambda: launched or self._is_over())
                if self._is_over():
                    return
                one = launched.first
            try:
                began, ended = launched.wait(one)
                is_starved = ended - one.launched_at < _STARVED_SHARE * (ended - began)
                self._finish(one.task, began, ended=ended, is_starved=is_starved)
            except BaseException as error:
                self._fail(error, one.task)
                return

    def _wake(self) -> None:
        """With the lock held: something has changed; wake those who can go on."""
        is_over = self._is_over()
        if is_over:
            self._has_launched.notify()
        for lane in list(self._asleep):
            if is_over or self._ready.next_of(lane) is not None:
                self._asleep.remove(lane)
                self._may_go_on[lane].notify()
        if is_over or any(is_so() for is_so in self._awaited):
            self._callers.notify_all()

    def _await(self, is_so: Callable[[], bool]) -> None:
        """With the lock held: wait until something is so, or the lanes are stopped."""
        self._awaited.append(is_so)
        try:
            self._callers.wait_for(lambda: is_so() or self._is_over())
        finally:
            self._awaited.remove(is_so)

    def _is_over(self) -> bool:
        return self._is_closing or self._failure is not None

    def _start(self, task: Task) -> None:
        """With the lock held: a task starts."""
        self._ready.start(task)
        if task.leases:
            # Its turn in the pools is over: the next in line may be another lane's.
            self._wake()

    def _finish(
        self,
        task: Task,
        started: float,
        before_seconds: float = 0.0,
        *,
        ended: float | None = None,
        is_starved: bool = False,
    ) -> None:
        ended = self._recorder.now() if ended is None else ended
        action = task.action
        self._recorder.record(
            task.lane,
            task.name,
            started,
            ended,
            kind=action.kind.value,
            task=task.id,
            block=task.block,
            nbytes=action.nbytes if isinstance(action, Move) else None,
            waited_for=self._last_before.pop(task.id, None),
            step=task.step,
        )
        if self._on_finish is not None:
            self._on_finish(task, started - before_seconds, ended, is_starved=is_starved)
        if self._give_back is not None:
            for lease in task.returns:
                self._give_back(lease)
        with self._lock:
            if self._launched is not None:
                self._launched.remove(task)
            for follower in self._ready.finish(task):
                self._last_before[follower.id] = f"task {task.id}"
            self._wake()

    # Failure -----------------------------------------------------------------------------------

    def _fail(self, error: BaseException, task: Task) -> None:
        with self._lock:
            if self._failure is None:
                if isinstance(error, HardwareError):
                    task = self._first_suspect(task)
                error.add_note(self._story(task))
                self._failure = error
            self._wake()

    def _first_suspect(self, task: Task) -> Task:
        """With the lock held: where a failure of the device that a driven task met may be of."""
        is_driven = task.lane is self._driven
        return self._launched.first.task if is_driven and self._launched else task

    def _story(self, task: Task) -> str:
        lines = [f"in {task.name} of pass {task.step} (counted from 0) on lane {task.lane}"]
        later = self._launched.behind(task) if self._launched is not None else []
        if later and task.lane is self._driven:
            lines[0] += f", or in what was launched behind it ({', '.join(later)})"
        if task.after:
            lines.append("it came after tasks " + ", ".join(str(before) for before in task.after))
        spans = self._recorder.last_spans(task.lane, _NUM_STORY_SPANS)
        lines += [
            f"  before it: {span.name} of pass {span.step}, {span.seconds:.6f} s" for span in spans
        ]
        return "\n".join(lines)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._is_closing:
            raise bug("the lanes are closed, and were given more to do")

    @staticmethod
    def _refused(what: str, task: Task) -> LohanError:
        return bug(f"{task.name} (task {task.id} of step {task.step}) cannot be run now: {what}")
