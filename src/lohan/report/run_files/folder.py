"""The folder of a run: which files a report is made from, and how much of them can be used.

Owns the names of the files and the tolerance towards them. Each file is optional; one that is
missing or damaged is said and does without. Knows nothing of how a report looks. The files, in
OUT/_lohan (in OUT itself, where an older release made them):

    log.jsonl              one object per logging step (`log_lines`)
    lohan.yaml             the complete configuration
    plan.json, plan.txt    `Plan.to_json`, and the plan in words
    trace.json             measured lanes; predicted_trace.json: simulated ones
    machine.json           `Machine.to_json`
    summary.json           written when a run ends; used, where they are there: model, data,
                           ended, num_steps, max_steps, seconds, read_bytes, written_bytes,
                           peak_bytes (by tier), process_peak_bytes, versions (by name)

Bytes and seconds in the log are those of one step, at the step they are logged for.
"""

import json
import pathlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from lohan.errors import ConfigError, LohanError
from lohan.hardware.machine import Machine
from lohan.report.run_files.log_lines import RunLog, read_log
from lohan.trace import Trace, traces_of_chrome
from lohan.units import format_bytes
from lohan.working_folder import working_folder

T = TypeVar("T")

LOG, CONFIG = "log.jsonl", "lohan.yaml"
PLAN, PLAN_WORDS, MACHINE, SUMMARY = "plan.json", "plan.txt", "machine.json", "summary.json"
MEASURED, PREDICTED = "trace.json", "predicted_trace.json"
_FILES_OF_A_RUN = (LOG, CONFIG, PLAN, PLAN_WORDS, MACHINE, SUMMARY, MEASURED, PREDICTED)
_LARGEST_BYTES = 32 << 20
_LARGEST_TRACE_BYTES = 512 << 20


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
