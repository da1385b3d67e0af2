"""The folder of a run: which files a report is made from, and how much of them can be used.

Owns the names of the files and the tolerance towards them: what counts as a line of a log, how
lines of one step are joined, what a resumed run leaves out. Each file is optional; one that is
missing or damaged, or a line that was cut by a kill, is said and does without. Knows nothing of how
a report looks. The files, in OUT/_lohan (in OUT itself, where an older release made them):

    log.jsonl              one object per logging step
    lohan.yaml             the complete configuration
    plan.json, plan.txt    `Plan.to_json`, and the plan in words
    trace.json             measured lanes; predicted_trace.json: simulated ones
    machine.json           `Machine.to_json`
    summary.json           written when a run ends; used, where they are there: model, data,
                           ended, num_steps, max_steps, seconds, read_bytes, written_bytes,
                           peak_bytes (by tier), gpu_reserved_bytes, process_peak_bytes,
                           versions (by name)

Bytes and seconds in the log are those of one step, at the step they are logged for.
"""

import json
import math
import pathlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import IO, TypeVar

from lohan.errors import ConfigError, LohanError
from lohan.hardware.machine import Machine
from lohan.trace import Trace, traces_of_chrome
from lohan.units import format_bytes
from lohan.working_folder import working_folder

T = TypeVar("T")

LOG, CONFIG = "log.jsonl", "lohan.yaml"
PLAN, PLAN_WORDS, MACHINE, SUMMARY = "plan.json", "plan.txt", "machine.json", "summary.json"
MEASURED, PREDICTED = "trace.json", "predicted_trace.json"
_FILES_OF_A_RUN = (LOG, CONFIG, PLAN, PLAN_WORDS, MACHINE, SUMMARY, MEASURED, PREDICTED)
_LARGEST_BYTES = 32 << 20
_LONGEST_LINE_BYTES = 1 << 20
_LARGEST_TRACE_BYTES = 512 << 20


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


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFiles:
    """What was found in a run folder; None: not there, or of no use."""

    folder: pathlib.Path
    log: RunLog | None
    config: str | None
    """The configuration as text."""
    plan: Mapping[str, object] | None
    plan_words: str | None
    measured: Trace | None
    predicted: Trace | None
    machine: Machine | None
    summary: Mapping[str, object] | None
    remarks: tuple[str, ...]
    """What is wrong with files that are there."""


def read_run(folder: pathlib.Path) -> RunFiles:
    """Read what a run left in its folder.

    Raises:
        ConfigError: there is no such folder, or no file of a run in it.
    """
    if not folder.is_dir():
        raise ConfigError(
            f"{folder} is not a run folder",
            why="it is a file" if folder.exists() else "there is no such folder",
            remedy="give the folder that --out named when the run was started",
        )
    working = working_folder(folder)
    if not any((working / name).exists() for name in _FILES_OF_A_RUN):
        raise ConfigError(
            f"{folder} is not a run folder",
            why=f"none of {', '.join(_FILES_OF_A_RUN)} is in it",
            remedy="give the folder that --out named when the run was started",
        )
    remarks: list[str] = []

    def read(name: str, use: Callable[[pathlib.Path], T]) -> T | None:
        path = working / name
        try:
            if not path.is_file():
                return None
            limit_bytes = _LARGEST_TRACE_BYTES if name in (MEASURED, PREDICTED) else _LARGEST_BYTES
            found_bytes = path.stat().st_size
            if name != LOG and found_bytes > limit_bytes:
                remarks.append(
                    f"{name} is not used: it has {format_bytes(found_bytes)}, more than "
                    f"{format_bytes(limit_bytes)}"
                )
                return None
            return use(path)
        except LohanError as error:
            remarks.append(f"{name} is not used: {error.why}")
        except (OSError, ValueError, RecursionError) as error:
            reason = error.strerror if isinstance(error, OSError) else None
            remarks.append(f"{name} is not used: {reason or _short(error)}")
        return None

    log = read(LOG, read_log)
    traces = [*(read(MEASURED, _traces) or ()), *(read(PREDICTED, _traces) or ())]
    return RunFiles(
        folder=folder,
        log=log,
        config=read(CONFIG, _words),
        plan=read(PLAN, _object),
        plan_words=read(PLAN_WORDS, _words),
        measured=next((trace for trace in traces if not trace.is_simulated), None),
        predicted=next((trace for trace in traces if trace.is_simulated), None),
        machine=read(MACHINE, Machine.load),
        summary=read(SUMMARY, _object),
        remarks=(*(log.remarks if log else ()), *remarks),
    )


def _object(path: pathlib.Path) -> Mapping[str, object]:
    found = json.loads(path.read_bytes())
    if not isinstance(found, dict):
        raise ValueError("it holds no JSON object")
    return found


def _words(path: pathlib.Path) -> str:
    return path.read_bytes().decode("utf-8", "replace")


def _traces(path: pathlib.Path) -> tuple[Trace, ...]:
    text = path.read_bytes().decode("utf-8")
    if '"span_columns"' in text[:4096] or '"traceEvents"' not in text[:4096]:
        # The plain form of a trace, one per file.
        return (Trace.from_json(text, where=path.name),)
    return traces_of_chrome(text, where=path.name)


def _short(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8 text"
    if isinstance(error, json.JSONDecodeError):
        return f"it is no JSON from line {error.lineno} on (cut short, or damaged)"
    return str(error) if isinstance(error, ValueError) else "it nests too deep"


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
            row = _object_in(line) if is_short else None
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


def _object_in(line: bytes) -> dict[str, object] | None:
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
