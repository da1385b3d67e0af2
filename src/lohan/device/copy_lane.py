"""One direction of the emulated link: a thread that copies bytes at a set rate, in order.

Owns the thread, its clockwork and the events of copies and of compute, and time as the device sees
it: every wait for a time to come goes through a `Clock`, so that tests can drive it by hand. Knows
addresses only; what may be copied where is checked before, in `emulated.py`, its only caller.

Note "Late bytes". Bytes are read from the source when they are due, not before, and the destination
is all ones (NaN in every float type) until they arrive. So a source freed or overwritten too early,
and a destination read too early, both show.
"""

import ctypes
import queue
import threading
import time
import traceback
from dataclasses import dataclass

from lohan.device.device import closed_error
from lohan.device.memory import Span
from lohan.errors import HardwareError, LohanError, bug
from lohan.units import format_bytes
from lohan.vocabulary import Lane

_CHUNK_SECONDS = 2e-3  # how finely bytes trickle in
_MIN_CHUNK_BYTES, _MAX_CHUNK_BYTES = 2**16, 2**20
_SHORTEST_SLEEP_SECONDS = 2e-4  # sleeping costs about this much: shorter delays are made up later
_LONGEST_WAIT_SECONDS = 3600.0  # beyond some years, the system call refuses the number


class Clock:
    """The machine's clock; tests have others, with the same methods."""

    def now_seconds(self) -> float:
        """Return seconds since some fixed moment; never goes back."""
        return time.monotonic()

    def sleep_until(self, deadline_seconds: float, stop: threading.Event) -> None:
        """Block until the deadline, or until `stop` is set. Safe from several threads at once."""
        while (left_seconds := deadline_seconds - time.monotonic()) > 0:
            if stop.wait(min(left_seconds, _LONGEST_WAIT_SECONDS)):
                return


class ComputeEvent:
    """Compute up to here has run; it counts as done when the emulated time is over."""

    __slots__ = ("_clock", "done_seconds")

    def __init__(self, clock: Clock, done_seconds: float) -> None:
        self._clock, self.done_seconds = clock, done_seconds

    def is_done(self) -> bool:
        """Whether the time charged for the compute has passed."""
        return self._clock.now_seconds() >= self.done_seconds


class CopyEvent:
    """One copy. Finished once, by the thread of its lane; waited for by anyone."""

    __slots__ = ("_finished", "_title", "done_seconds", "failure")

    def __init__(self, title: str) -> None:
        self._title = title
        self._finished = threading.Event()
        self.done_seconds = 0.0
        self.failure: Exception | None = None

    def is_done(self) -> bool:
        """Whether the copy has ended, well or badly."""
        return self._finished.is_set()

    def finish(self, done_seconds: float, failure: Exception | None = None) -> None:
        """Let the waiters go."""
        self.done_seconds, self.failure = done_seconds, failure
        self._finished.set()

    def block(self) -> float:
        """Wait for the copy; return when it was done.

        Runs on any thread. May block: on the copy, or until the device is closed.

        Raises:
            HardwareError: if the copy failed.
        """
        self.await_end()
        failure = self.failure
        if failure is None:
            return self.done_seconds
        why, remedy = repr(failure), "report this with the trace of the run"
        if isinstance(failure, LohanError):
            why, remedy = f"{failure.what} ({failure.why})", failure.remedy
        raise HardwareError(f"{self._title} failed", why=why, remedy=remedy) from failure

    def await_end(self) -> None:
        """Wait until the copy has ended, well or badly."""
        self._finished.wait()


EmulatedEvent = ComputeEvent | CopyEvent


@dataclass(slots=True, kw_only=True)
class QueuedCopy:
    """A copy under way, owning both ends until its event is finished."""

    dst: Span
    src: Span
    after: tuple[EmulatedEvent, ...]
    submitted_seconds: float
    needs_poison: bool
    event: CopyEvent


def poison(address: int, nbytes: int) -> None:
    """Fill memory with ones: NaN as bf16, fp16, fp32 or fp64, and -1 as an index."""
    if nbytes:
        ctypes.memset(address, 0xFF, nbytes)


class CopyLane:
    """Runs copies of one direction, one after another, on a thread of its own."""

    def __init__(
        self,
        lane: Lane,
        *,
        bytes_per_second: float | None,
        clock: Clock,
        poisons: bool,
        stop: threading.Event,
    ) -> None:
        """`stop` is shared by the lanes of a device: both give up before either is joined."""
        self._lane, self._bytes_per_second = lane, bytes_per_second
        self._clock, self._poisons, self._stop = clock, poisons, stop
        self._free_at_seconds = 0.0
        self._queue: queue.SimpleQueue[QueuedCopy | None] = queue.SimpleQueue()
        self._submit_lock = threading.Lock()
        self._last: CopyEvent | None = None
        self._first_failed: CopyEvent | None = None
        pace = _MAX_CHUNK_BYTES if bytes_per_second is None else bytes_per_second * _CHUNK_SECONDS
        self._chunk_bytes = int(min(max(pace, _MIN_CHUNK_BYTES), _MAX_CHUNK_BYTES))
        self._thread = threading.Thread(target=self._run, name=f"emulated {lane}", daemon=True)
        self._thread.start()

    def submit(self, dst: Span, src: Span, after: tuple[EmulatedEvent, ...]) -> CopyEvent:
        """Queue a copy.

        Runs on the caller. May block: never. Owns both ends until the event is done.
        """
        event = CopyEvent(f"a copy of {format_bytes(dst.nbytes)} on {self._lane}")
        # Compute up to a compute event has really run, so its reads of the destination are over;
        # a copy event that is not done may still be reading it.
        is_settled = all(isinstance(one, ComputeEvent) or one.is_done() for one in after)
        with self._submit_lock:
            if self._stop.is_set():
                raise closed_error("emulated")
            if self._poisons and is_settled:
                poison(dst.address, dst.nbytes)
            self._last = event
            self._queue.put(
                QueuedCopy(
                    dst=dst,
                    src=src,
                    after=after,
                    submitted_seconds=self._clock.now_seconds(),
                    needs_poison=self._poisons and not is_settled,
                    event=event,
                )
            )
        return event

    def drain(self) -> None:
        """Block until every copy queued so far has ended. Raises the first failure of the lane."""
        last = self._last
        if last is not None:
            last.await_end()
        if self._first_failed is not None:
            self._first_failed.block()

    def join(self) -> None:
        """End the thread; `stop` is set already, so what is queued fails at once."""
        with self._submit_lock:
            self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (copy := self._queue.get()) is not None:
            try:
                done_seconds = self._perform(copy)
            # Whatever went wrong belongs to whoever waits for the copy.
            except Exception as failure:
                if self._first_failed is None:
                    self._first_failed = copy.event
                # The event may live long; the frames of the failure would keep both ends alive.
                traceback.clear_frames(failure.__traceback__)
                copy.event.finish(self._clock.now_seconds(), failure)
            else:
                copy.event.finish(done_seconds)
            # The loop variable would keep both ends alive until the next copy.
            del copy

    def _perform(self, copy: QueuedCopy) -> float:
        start_seconds = copy.submitted_seconds
        for event in copy.after:
            start_seconds = max(start_seconds, self._done_seconds_of(event))
        # From when the lane was due to be free, not from when this thread woke up: waking late
        # once must not make every later copy late.
        start_seconds = max(start_seconds, self._free_at_seconds)
        if copy.needs_poison:
            poison(copy.dst.address, copy.dst.nbytes)
        rate = self._bytes_per_second
        num_copied = 0
        while num_copied < copy.dst.nbytes:
            length = min(self._chunk_bytes, copy.dst.nbytes - num_copied)
            if rate is not None:
                due_seconds = start_seconds + (num_copied + length) / rate
                is_last = num_copied + length == copy.dst.nbytes
                self._sleep_until(due_seconds, 0.0 if is_last else _SHORTEST_SLEEP_SECONDS)
            self._check_may_write(copy)
            ctypes.memmove(copy.dst.address + num_copied, copy.src.address + num_copied, length)
            num_copied += length
        if rate is None:
            self._check_may_write(copy)
            self._free_at_seconds = self._clock.now_seconds()
        else:
            self._free_at_seconds = start_seconds + copy.dst.nbytes / rate
        return self._free_at_seconds

    def _done_seconds_of(self, event: EmulatedEvent) -> float:
        if isinstance(event, CopyEvent):
            return event.block()
        self._sleep_until(event.done_seconds, 0.0)
        return event.done_seconds

    def _sleep_until(self, deadline_seconds: float, shortest_seconds: float) -> None:
        if deadline_seconds - self._clock.now_seconds() > shortest_seconds:
            self._clock.sleep_until(deadline_seconds, self._stop)

    def _check_may_write(self, copy: QueuedCopy) -> None:
        if self._stop.is_set():
            raise closed_error("emulated")
        if copy.dst.memory is not None and copy.dst.memory.is_free:
            raise bug("device memory was freed while a copy into it was under way", HardwareError)
