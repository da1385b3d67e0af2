"""Facts of a run: the numbers several sections need, each worked out in one place.

Owns where a number is taken from when several files hold it, and what an estimate rests on. Prints
nothing but names.
"""

import contextlib
import math
import statistics
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from lohan.report.html.markup import shortened
from lohan.report.run_files import RunFiles, RunLog
from lohan.simulate.answers.advice import Advice
from lohan.simulate.bottleneck import without_shares
from lohan.vocabulary import Tier

_EMPTY = RunLog(steps=(), rows=())


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Bytes a run moved to or from SSD."""

    nbytes: float
    is_estimate: bool
    """From the logged steps, each standing for those up to it."""


def log_of(run: RunFiles) -> RunLog:
    """The log, or an empty one."""
    return run.log or _EMPTY


def model_name(run: RunFiles) -> str | None:
    """What was trained; of a folder its name only, wherever on somebody's disk it lies."""
    for found in (run.summary, run.plan):
        value = (found or {}).get("model")
        if isinstance(value, str) and value.strip():
            is_folder = value.startswith(("/", "~", "."))
            return (value.rstrip("/").rpartition("/")[2] or value) if is_folder else value
    return None


def data_names(run: RunFiles) -> list[str]:
    """The files of rows, by name only."""
    found = (run.summary or {}).get("data")
    names = found if isinstance(found, list) else []
    return [str(name).rstrip("/").rpartition("/")[2] for name in names]


def number_in(found: Mapping[str, object] | None, key: str) -> float | None:
    """The number under a key, if it is finite."""
    value = (found or {}).get(key)
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    with contextlib.suppress(OverflowError):
        if math.isfinite(float(value)):
            return float(value)
    return None


def finite(run: RunFiles, key: str) -> list[tuple[int, float]]:
    """Steps and values of a column of the log, finite ones only."""
    log = log_of(run)
    return [
        (step, value)
        for step, value in zip(log.steps, log.column(key), strict=True)
        if value is not None and math.isfinite(value)
    ]


def usual(run: RunFiles, key: str) -> float | None:
    """The median of a column, the first logged step left out where there are others."""
    values = [value for _, value in finite(run, key)]
    return statistics.median(values[1:] or values) if values else None


def traffic(run: RunFiles, key: str) -> Traffic | None:
    """All bytes read or written (`read_bytes`, `written_bytes`): the summary's, or from the log."""
    known = number_in(run.summary, key)
    if known is not None:
        return Traffic(nbytes=known, is_estimate=False)
    total, previous = 0.0, 0
    found = finite(run, key)
    for step, nbytes in found:
        total += nbytes * (step - previous)
        previous = step
    return Traffic(nbytes=total, is_estimate=True) if found else None


def endurance_share(run: RunFiles) -> float | None:
    """Share of the drives' rated life the run has used."""
    written = traffic(run, "written_bytes")
    if written is None or run.machine is None:
        return None
    return written.nbytes / run.machine.ssd_endurance_bytes


def bottleneck(run: RunFiles) -> tuple[str, float] | None:
    """The bottleneck named most often in the log, and in which share of the logged steps."""
    named = Counter(without_shares(text) for text in log_of(run).texts("bottleneck"))
    if not named:
        return None
    name, count = named.most_common(1)[0]
    return name, count / named.total()


def advice(run: RunFiles) -> list[Advice] | None:
    """What would have made the run faster, best first; None if that was not worked out."""
    found = (run.summary or {}).get("advice")
    if not isinstance(found, list):
        return None
    listed = [
        (one.get("change"), number_in(one, "factor")) for one in found if isinstance(one, dict)
    ]
    return [
        Advice(change=shortened(change, 80), factor=factor)
        for change, factor in listed
        if isinstance(change, str) and factor is not None
    ]


def peak_bytes(run: RunFiles, tier: Tier) -> int | None:
    """The most that was measured in use in a tier."""
    found = (run.summary or {}).get("peak_bytes")
    known = number_in(found, tier.value) if isinstance(found, dict) else None
    peaks = [round(known)] if known is not None else []
    if run.measured is not None:
        peaks += [one.peak_bytes for one in run.measured.counters if one.tier is tier]
    return max(peaks, default=None)
