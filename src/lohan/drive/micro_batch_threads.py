"""Running unmodified `forward` functions side by side, one at a time.

Owns the thread of one micro-batch and the handing over of control (the baton). Knows nothing of
models or tensors. Called by `segmented_model`.

Note "One at a time". A `Strand` runs a function in a thread of its own, but never at the same
time as the thread that drives it: `resume` hands the baton to the strand and blocks until the
strand hands it back, by asking for something or by ending.
- runs on: the body on the strand's thread, everything else on the driving (main) thread.
- may block: `resume`, until the body asks or ends; `ask`, until the next `resume` or `stop`.
- owns until: whoever holds the baton may touch the model, the random state and every tensor of
  the step; it is given up inside `resume` and `ask` and nowhere else.
So nothing here is locked: the two queues order every access.
"""

import contextvars
import queue
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

RequestT = TypeVar("RequestT")
ResultT = TypeVar("ResultT")


class _Stopped(BaseException):
    """Unwinds the body of a strand that is to end early. Not an Exception: bodies catch those."""


class Strand(Generic[RequestT, ResultT]):
    """A function that can be stopped at the places where it asks for something.

    `body` is called with `ask`; `ask(request)` returns what the next `resume` was given.
    """

    def __init__(self, body: Callable[[Callable[[RequestT], Any]], ResultT], *, name: str) -> None:
        self._body = body
        self._to_strand: queue.SimpleQueue[Callable[[], Any]] = queue.SimpleQueue()
        self._to_driver: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        # The body sees the context variables of whoever made the strand, as a call would.
        within = contextvars.copy_context()
        self._thread = threading.Thread(
            target=within.run, args=(self._run,), name=name, daemon=True
        )
        self._is_started = False
        self._is_over = False
        self._is_stopping = False
        self._request: RequestT | None = None
        self._result: ResultT | None = None

    @property
    def is_over(self) -> bool:
        """Whether the body has returned, raised or been stopped."""
        return self._is_over

    def resume(self, reply: Any = None) -> RequestT | None:
        """Run the body until it asks (returns the request) or returns (None; see `result`).

        Runs on the driving thread, blocks until then. Raises what the body raises.
        """
        assert not self._is_over, "the strand has ended"
        if not self._is_started:
            self._is_started = True
            self._thread.start()
        else:
            self._to_strand.put(lambda: reply)
        return self._wait()

    def result(self) -> ResultT:
        """What the body returned; given out once, so that the strand does not keep it alive."""
        result, self._result = self._result, None
        assert result is not None, "no result, or it was taken before"
        return result

    def stop(self) -> None:
        """End the body where it stands and wait for its thread. May be called at any time, twice.

        Runs on the driving thread; blocks until the body reaches its next `ask` or its end.
        """
        if not self._is_started or self._is_over:
            self._is_over = True
            return
        self._is_stopping = True
        self._to_strand.put(self._raise_stopped)
        # From here on no `ask` blocks, so the thread ends. What it delivers is not looked at: a
        # driving thread that was interrupted may have lost a delivery, and would wait for ever.
        self._thread.join()
        self._is_over = True

    @staticmethod
    def _raise_stopped() -> None:
        raise _Stopped

    def _wait(self) -> RequestT | None:
        self._to_driver.get()()
        request, self._request = self._request, None
        return request

    def _ask(self, request: RequestT) -> Any:
        """Runs on the strand's thread."""
        if self._is_stopping:  # the body caught the first one and went on
            raise _Stopped

        def deliver() -> None:
            self._request = request

        self._to_driver.put(deliver)
        return self._to_strand.get()()

    def _run(self) -> None:
        """Runs on the strand's thread: the whole of it."""
        raised: BaseException | None = None
        result: ResultT | None = None
        try:
            result = self._body(self._ask)
        except BaseException as error:
            raised = error

        def deliver() -> None:
            # Joining here, on the driving thread, means that a strand that is over has no thread.
            self._thread.join()
            self._is_over = True
            self._result = result
            if raised is not None and not isinstance(raised, _Stopped):
                raise raised

        self._to_driver.put(deliver)
