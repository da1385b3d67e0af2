"""Lanes over time: what was predicted above what was measured, on one time axis.

Owns which steps are shown, the table beside the picture, and the size of the picture in bytes: a
page stays small however long a trace is.
"""

import re
from dataclasses import replace

from lohan.report.html.markup import Table, as_markup
from lohan.report.lane_chart import lane_chart_svg
from lohan.report.run_files import RunFiles
from lohan.report.steady_steps import SteadySteps, num_whole_steps, steady_steps
from lohan.trace import LaneSummary, Trace, summarise
from lohan.units import format_bytes, format_rate, format_seconds

_MOST_BYTES = 700_000
_WIDTH_PX, _NARROW_PX = 1180, 640
_MOST_STEPS = 2
_HINT = re.compile(r"<title>[^<]*</title>")


def lanes(run: RunFiles) -> dict[str, object]:
    """The picture, and both traces in numbers; no table where there is neither."""
    files = {"Predicted": "predicted_trace.json", "Measured": "trace.json"}
    traces = {"Predicted": run.predicted, "Measured": run.measured}
    present = {name: trace for name, trace in traces.items() if trace is not None and trace.spans}
    missing = [(name, file) for name, file in files.items() if name not in present]
    if not present:
        return {"missing": missing, "table": None}
    num_steps = min(_MOST_STEPS, *(num_whole_steps(trace) for trace in present.values()))
    cuts = {name: steady_steps(trace, num_steps) for name, trace in present.items()}
    picture, said = _picture(present, cuts)
    return {
        "missing": missing,
        "picture": as_markup(picture),
        "said": "".join(f" {words}" for words in said),
        "table": _table(cuts),
    }


def _picture(present: dict[str, Trace], cuts: dict[str, SteadySteps]) -> tuple[str, list[str]]:
    """Draw it, smaller and smaller until it is small enough."""
    named = [_named(name, cut) for name, cut in cuts.items()]
    drawn = _drawn(named, _WIDTH_PX)
    if len(drawn) <= _MOST_BYTES:
        return drawn, []
    named = [_named(name, steady_steps(trace, 1)) for name, trace in present.items()]
    drawn = _drawn(named, _WIDTH_PX)
    if len(drawn) <= _MOST_BYTES:
        return drawn, []
    said = ["The spans are too many to name each of them here: open the trace in Perfetto."]
    drawn = _HINT.sub("", drawn)
    if len(drawn) > _MOST_BYTES:
        drawn = _HINT.sub("", _drawn(named, _NARROW_PX))
    ranks = sorted({span.rank for trace in named for span in trace.spans})
    while len(drawn) > _MOST_BYTES and len(ranks) > 1:
        ranks = ranks[: len(ranks) // 2]
        kept = [_only(trace, frozenset(ranks)) for trace in named]
        drawn = _HINT.sub("", _drawn(kept, _NARROW_PX))
        said[1:] = [f"Only the lanes of the first {len(ranks)} GPU(s) are shown."]
    if len(drawn) > _MOST_BYTES:
        return "", ["The trace is too large to be drawn here: open it in Perfetto."]
    return drawn, said


def _named(name: str, cut: SteadySteps) -> Trace:
    return replace(cut.trace, name=f"{name}: {cut.words}", metadata={})


def _drawn(traces: list[Trace], width_px: int) -> str:
    end = max(trace.end_seconds for trace in traces)
    return lane_chart_svg(*traces, start_seconds=0.0, end_seconds=end, width_px=width_px)


def _only(trace: Trace, ranks: frozenset[int]) -> Trace:
    return replace(
        trace,
        spans=tuple(span for span in trace.spans if span.rank in ranks),
        counters=tuple(counter for counter in trace.counters if counter.rank in ranks),
    )


def _table(cuts: dict[str, SteadySteps]) -> Table:
    columns = ["lane"]
    by_trace: list[dict[str, LaneSummary]] = []
    labels: dict[str, None] = {}
    times = []
    for name, cut in cuts.items():
        columns += [f"{name.lower()}: busy", "share", "moved", "rate while busy"]
        summary = summarise(cut.trace, start_seconds=0.0, end_seconds=cut.seconds)
        by_trace.append({lane.label: lane for lane in summary.lanes})
        labels |= dict.fromkeys(by_trace[-1])
        per_step = cut.seconds / max(1, cut.num_steps)
        times.append(f"{name.lower()} {format_seconds(per_step)} per step")
    rows = [
        [label, *(cell for lanes in by_trace for cell in _cells(lanes.get(label)))]
        for label in labels
    ]
    caption = f"Lanes in numbers: {', '.join(times)}"
    return Table(caption=caption, columns=columns, rows=rows)


def _cells(lane: LaneSummary | None) -> list[str]:
    if lane is None:
        return ["-"] * 4
    cells = [format_seconds(lane.busy_seconds), f"{lane.busy_share:.0%}"]
    if not lane.moved_bytes:
        return [*cells, "-", "-"]
    return [*cells, format_bytes(lane.moved_bytes), format_rate(lane.moved_bytes_per_second)]
