"""The part of a trace that is worth a picture: its last whole steps, beginning at time 0.

Owns the choice of steps and the cut. A step begins where its first work on the GPU lane begins, so
a predicted and a measured trace cut this way stand above each other from the same moment. Called
by the lanes section of a page.
"""

from dataclasses import dataclass, replace

from lohan.trace import Counter, Trace
from lohan.vocabulary import Lane


@dataclass(frozen=True, slots=True, kw_only=True)
class SteadySteps:
    """A cut trace and what it holds."""

    trace: Trace
    seconds: float
    num_steps: int
    """0: the trace tells no whole step from the next; all of it is shown."""
    first_step: int

    @property
    def words(self) -> str:
        """Which steps these are, for a caption."""
        if self.num_steps == 0:
            return "all that was recorded"
        last = self.first_step + self.num_steps - 1
        return f"step {last}" if self.num_steps == 1 else f"steps {self.first_step} to {last}"


def num_whole_steps(trace: Trace) -> int:
    """Return how many steps have an end, the first one left out where there are others."""
    return max(0, len(_beginnings(trace)) - 2) or max(0, len(_beginnings(trace)) - 1)


def steady_steps(trace: Trace, num_steps: int) -> SteadySteps:
    """Return the last whole steps of a trace, at most `num_steps` of them."""
    begins = _beginnings(trace)
    count = min(num_steps, num_whole_steps(trace))
    if count <= 0:
        start, end, first = trace.start_seconds, trace.end_seconds, 0
    else:
        steps = list(begins)
        # The last step has a beginning only: where it ends is not known.
        first, start = steps[-count - 1], begins[steps[-count - 1]]
        end = begins[steps[-1]]
    return SteadySteps(
        trace=_cut(trace, start, end),
        seconds=end - start,
        num_steps=count,
        first_step=first,
    )


def _beginnings(trace: Trace) -> dict[int, float]:
    """When each step begins, in order; a step that begins before an older one is none."""
    on_gpu = [span for span in trace.spans if span.lane is Lane.GPU]
    begins: dict[int, float] = {}
    for span in on_gpu or trace.spans:
        begins[span.step] = min(begins.get(span.step, span.start_seconds), span.start_seconds)
    found: dict[int, float] = {}
    newest = float("-inf")
    for step in sorted(begins):
        if begins[step] > newest:
            newest = found[step] = begins[step]
    return found


def _cut(trace: Trace, start: float, end: float) -> Trace:
    spans = tuple(
        replace(
            span,
            start_seconds=max(span.start_seconds, start) - start,
            end_seconds=min(span.end_seconds, end) - start,
        )
        for span in trace.spans
        if (span.end_seconds > start and span.start_seconds < end)
        or start <= span.start_seconds == span.end_seconds <= end
    )
    counters = tuple(_cut_counter(counter, start, end) for counter in trace.counters)
    return replace(trace, spans=spans, counters=counters)


def _cut_counter(counter: Counter, start: float, end: float) -> Counter:
    samples = list(zip(counter.at_seconds, counter.used_bytes, strict=True))
    # What holds at the beginning was set before it.
    before = [(start, used) for at, used in samples if at <= start][-1:]
    kept = before + [(at, used) for at, used in samples if start < at <= end]
    return replace(
        counter,
        at_seconds=tuple(at - start for at, _ in kept),
        used_bytes=tuple(used for _, used in kept),
    )
