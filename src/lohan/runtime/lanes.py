"""Lanes that run tasks for real: a thread each, in listed order, each task after its dependencies.

Owns threads, order, the first failure and its story. What a task does is the caller's action; when
it may run is in its `after`. The `gpu` lane has no thread: the main thread drives it, because the
model's own forward runs there (`drive`).

Note "Lane threads".
Runs on: actions on the thread of their lane; `submit`, `drive`, `wait`, `close` on the caller's.
May block: `drive` and `wait`, on tasks of other lanes; never on memory, a settled order proves it.
Owns until: what a task leases belongs to its lane from the start of its action to its end.
The first exception of any action stops all lanes after the task each is at; it is what every
waiting call raises, with the task's story attached. A stopped executor runs nothing any more.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from lohan.errors import ScheduleError
from lohan.schedule.task import Move, Task
from lohan.trace import Recorder
from lohan.vocabulary import Lane, TaskId

Action = Callable[[Task], None]

_NUM_STORY_SPANS = 10


class LaneExecutor:
    """Runs submitted tasks on their lanes. A context manager; leaving it closes the lanes."""

    def __init__(
        self,
        actions: Mapping[Lane, Action],
        *,
        driven: Lane = Lane.GPU,
        recorder: Recorder | None = None,
    ) -> None:
        """`actions` has one entry per lane with a thread; `driven` is run by the caller."""
        self._actions, self._driven = dict(actions), driven
        self._recorder = recorder if recorder is not None else Recorder(is_on=False)
        self._changed = threading.Condition()
        self._queues: dict[Lane, deque[Task]] = {lane: deque() for lane in (*actions, driven)}
        self._submitted: set[TaskId] = set()
        self._done: set[TaskId] = set()
        self._failure: BaseException | None = None
        self._is_closing = False
        self._threads = [
            threading.Thread(target=self._run_lane, args=(lane,), name=f"lohan-{lane}", daemon=True)
            for lane in self._actions
        ]
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
        """Append tasks to their lanes, in the given order.

        Raises:
            ScheduleError: if a lane is unknown, an id was used before, or a task would come after
                one that was never submitted; then none of the tasks is taken.
        """
        batch = list(tasks)
        with self._changed:
            self._raise_failure()
            known = self._submitted | {task.id for task in batch}
            if len(known) != len(self._submitted) + len(batch):
                raise self._refused("a task id is used twice", batch[0])
            for task in batch:
                if task.lane not in self._queues:
                    raise self._refused(f"lane {task.lane} has no action", task)
                if not known.issuperset(task.after):
                    missing = sorted(set(task.after) - known)
                    raise self._refused(f"it comes after {missing}, never submitted", task)
            self._submitted = known
            for task in batch:
                self._queues[task.lane].append(task)
            self._changed.notify_all()

    @contextmanager
    def drive(self, task: Task) -> Iterator[None]:
        """Run a task of the driven lane as a with-block: wait for what it comes after, then work.

        Raises:
            ScheduleError: if another task is next on the driven lane.
            BaseException: the first failure of any lane.
        """
        with self._changed:
            queue = self._queues[self._driven]
            if not queue or queue[0].id != task.id:
                expected = queue[0].name if queue else "nothing"
                raise self._refused(f"{expected} is next on {self._driven}", task)
            waited_for = self._await_turn(task)
            queue.popleft()
        started = self._recorder.now()
        try:
            yield
        except BaseException as error:
            self._fail(error, task)
            raise
        self._finish(task, started, waited_for)

    def wait(self, task: TaskId) -> None:
        """Wait until a task is done.

        Raises:
            BaseException: the first failure of any lane.
        """
        with self._changed:
            self._changed.wait_for(lambda: task in self._done or self._is_over())
            if task not in self._done:
                self._raise_failure()

    def wait_all(self) -> None:
        """Wait until every submitted task is done. Raises the first failure of any lane."""
        with self._changed:
            self._changed.wait_for(
                lambda: len(self._done) == len(self._submitted) or self._is_over()
            )
            if len(self._done) != len(self._submitted):
                self._raise_failure()

    def forget_before(self, task: TaskId) -> None:
        """Drop the memory of finished tasks with smaller ids; nothing may come after them later."""
        with self._changed:
            old = {known for known in self._done if known < task}
            self._done -= old
            self._submitted -= old

    def close(self, *, should_finish: bool = True) -> None:
        """Stop the lanes and join their threads; may be called twice.

        Each lane ends after the task it is at. With `should_finish` all submitted tasks run first.
        """
        try:
            if should_finish and not self._is_closing:
                self.wait_all()
        finally:
            with self._changed:
                self._is_closing = True
                self._changed.notify_all()
            for thread in self._threads:
                thread.join()

    # What a lane does --------------------------------------------------------------------------

    def _run_lane(self, lane: Lane) -> None:
        queue, action = self._queues[lane], self._actions[lane]
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(queue) or self._is_over())
                if self._is_over():
                    return
                task = queue[0]
                waited_for = self._await_turn(task, should_raise=False)
                if self._is_over():
                    return
                queue.popleft()
            started = self._recorder.now()
            try:
                action(task)
            # Whatever an action raises, an interrupt included, must reach the main thread.
            except BaseException as error:
                self._fail(error, task)
                return
            self._finish(task, started, waited_for)

    def _is_over(self) -> bool:
        return self._is_closing or self._failure is not None

    def _await_turn(self, task: Task, *, should_raise: bool = True) -> str | None:
        """Wait, with the lock held, for everything a task comes after; says what was last."""
        waited_for = None
        while not self._is_over():
            missing = next((before for before in task.after if before not in self._done), None)
            if missing is None:
                break
            waited_for = f"task {missing}"
            self._changed.wait()
        if should_raise:
            self._raise_failure()
        return waited_for

    def _finish(self, task: Task, started: float, waited_for: str | None) -> None:
        action = task.action
        self._recorder.record(
            task.lane,
            task.name,
            started,
            self._recorder.now(),
            kind=action.kind.value,
            task=task.id,
            block=task.block,
            nbytes=action.nbytes if isinstance(action, Move) else None,
            waited_for=waited_for,
            step=task.step,
        )
        with self._changed:
            self._done.add(task.id)
            self._changed.notify_all()

    # Failure -----------------------------------------------------------------------------------

    def _fail(self, error: BaseException, task: Task) -> None:
        with self._changed:
            if self._failure is None:
                error.add_note(self._story(task))
                self._failure = error
            self._changed.notify_all()

    def _story(self, task: Task) -> str:
        lines = [f"in {task.name} of step {task.step} on lane {task.lane}"]
        if task.after:
            lines.append("it came after tasks " + ", ".join(str(before) for before in task.after))
        spans = self._recorder.last_spans(task.lane, _NUM_STORY_SPANS)
        lines += [
            f"  before it: {span.name} of step {span.step}, {span.seconds:.6f} s" for span in spans
        ]
        return "\n".join(lines)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._is_closing:
            raise ScheduleError(
                "the lanes are closed",
                why="nothing runs after close",
                remedy="make a new engine",
            )

    @staticmethod
    def _refused(what: str, task: Task) -> ScheduleError:
        return ScheduleError(
            f"{task.name} (task {task.id} of step {task.step}) cannot be run now: {what}",
            why="lanes run exactly the settled order",
            remedy="report this schedule; it is a mistake of lohan",
        )
