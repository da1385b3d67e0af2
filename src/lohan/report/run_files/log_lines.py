"""The log of a run, `log.jsonl`: one JSON object per logging step, read as far as it is whole.

Owns what counts as a line, how lines of one step are joined, and what a resumed run leaves out. A
run may have been killed while it wrote: a line that is cut or damaged is left out and said, never
an error. Writing the log is the trainer's business.
"""

import json
import math
import pathlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO

_LONGEST_LINE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLog:
    """Logged steps in rising order, and what is to be said about the file."""

    steps: tuple[int, ...]
    rows: tuple[Mapping[str, object], ...]
    """What was logged at each of the steps."""
    remarks: tuple[str, ...] = ()

    def column(self, key: str) -> list[float | None]:
        """Return one number per step; None where none was logged. NaN and infinities stay."""
        return [_number(row.get(key)) for row in self.rows]

    def texts(self, key: str) -> list[str]:
        """Return the texts logged under a key, steps without one left out."""
        found = (row.get(key) for row in self.rows)
        return [value for value in found if isinstance(value, str) and value]


def read_log(path: pathlib.Path) -> RunLog:
    """Read a log. Raises: OSError, if the file cannot be read."""
    reading = _Reading()
    with path.open("rb") as file:
        reading.read(file)
    rows = dict(sorted(reading.rows.items()))
    return RunLog(
        steps=tuple(rows), rows=tuple(rows.values()), remarks=tuple(reading.remarks(path.name))
    )


class _Reading:
    """Lines seen so far, joined by step."""

    def __init__(self) -> None:
        self.rows: dict[int, dict[str, object]] = {}
        self._damaged_lines: list[int] = []
        self._lines_without_step = 0
        self._is_last_cut = False
        self._resumed_at: list[int] = []
        self._num_dropped = 0
        self._newest_step = -1

    def read(self, file: IO[bytes]) -> None:
        number = 0
        while line := file.readline(_LONGEST_LINE_BYTES):
            number += 1
            is_whole = line.endswith(b"\n")
            is_short = len(line) < _LONGEST_LINE_BYTES
            while not is_whole and not is_short and line:
                # Never held as a whole: this is no line of a log.
                line = file.readline(_LONGEST_LINE_BYTES)
                is_whole = line.endswith(b"\n")
            if not line.strip() and is_short:
                continue
            row = _object(line) if is_short else None
            if row is None:
                self._is_last_cut = not is_whole
                if is_whole:
                    self._damaged_lines.append(number)
                continue
            self._add(row)

    def _add(self, row: dict[str, object]) -> None:
        step = _step(row)
        if step is None:
            self._lines_without_step += 1
            return
        if step < self._newest_step:
            # The run was stopped and taken up from an earlier seal: what followed it is lost work.
            lost = [other for other in self.rows if other >= step]
            for other in lost:
                del self.rows[other]
            self._num_dropped += len(lost)
            self._resumed_at.append(step)
        self._newest_step = step
        # Evaluation and training may log the same step in two lines.
        self.rows.setdefault(step, {}).update(row)

    def remarks(self, name: str) -> list[str]:
        """What a reader of the report has to know."""
        said = []
        if self._is_last_cut:
            said.append(
                f"{name}: the last line is cut short and left out; the run was stopped while it "
                "wrote, or is writing now"
            )
        if self._damaged_lines:
            count = len(self._damaged_lines)
            lines = "1 line is" if count == 1 else f"{count} lines are"
            first = self._damaged_lines[0]
            said.append(f"{name}: {lines} damaged and left out (the first: line {first})")
        if self._lines_without_step:
            said.append(f"{name}: {self._lines_without_step} line(s) name no step and are left out")
        if self._resumed_at:
            places = ", ".join(f"{step:,}" for step in self._resumed_at[:5])
            more = "" if len(self._resumed_at) <= 5 else f" and {len(self._resumed_at) - 5} more"
            said.append(
                f"{name}: the run was resumed (it goes on with step {places}{more}); "
                f"{self._num_dropped} logged step(s) of lost work are left out"
            )
        return said


def _object(line: bytes) -> dict[str, object] | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _step(row: Mapping[str, object]) -> int | None:
    value = row.get("step")
    is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    if not is_whole or isinstance(value, bool):
        return None
    step = int(value)  # type: ignore[call-overload]
    return step if 0 <= step < 10**15 else None


def _number(value: object) -> float | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, str):
        # Writers of strict JSON put what is not finite in quotes; other texts are no numbers.
        folded = value.strip().lstrip("+-").casefold()
        return math.nan if folded in ("nan", "inf", "infinity") else None
    if isinstance(value, int | float):
        try:
            return float(value)
        except OverflowError:
            return math.inf
    return None
