"""One judge for every fault: what may be said about a command that ended, and about what it left.

Owns the promises: a run that ends has the undisturbed run's bytes; one that is refused says what,
why and what to do; no traceback, no process, no file is left. Answers are sentences about what is
wrong; none means nothing is.
"""

import json
import pathlib
import re
import time

from torturing import children
from torturing.children import Ended
from torturing.places import Run, Undisturbed, Workshop, undisturbed_run

DONE, REFUSED, STOPPED = 0, 2, (130, 143)
EARLY = (-2, -15)
"""A signal before anything was begun ends a process as it ends any."""
_RUN_NAME = re.compile(r"lohan-[0-9a-f]{8}\b")
# Names that differ from run to run within the tables of rows, which are the library's own.
_TABLES = re.compile(r"^out/_lohan/tables/.*")


def undisturbed(workshop: Workshop, variant: str) -> Undisturbed:
    """What a variant ends with; run once."""
    if variant not in workshop.undisturbed:
        started = time.monotonic()
        run, done = undisturbed_run(workshop, variant)
        workshop.undisturbed[variant] = Undisturbed(
            weights=weights_of(run),
            losses=dict(losses_of(run)),
            files=files_of(run),
            num_calls=done.num_calls,
            seconds=time.monotonic() - started,
        )
        workshop.keep(run, done_name(run))
    return workshop.undisturbed[variant]


def done_name(run: Run) -> str:
    """Of the kept copy of an undisturbed run."""
    return f"{run.variant}-done"


def weights_of(run: Run) -> bytes:
    """The bytes of the model."""
    return (run.out / "model.safetensors").read_bytes()


def losses_of(run: Run) -> list[tuple[int, float]]:
    """Step and loss of every line of the log; steps that were run again are there again."""
    lines = (run.out / "_lohan" / "log.jsonl").read_text().splitlines()
    entries = [json.loads(line) for line in lines]
    return [(entry["step"], entry["loss"]) for entry in entries if "loss" in entry]


def files_of(run: Run) -> frozenset[str]:
    """Names of all files of a run, as far as they are the same in every run."""
    found = set()
    for folder in (run.out, *run.ssd):
        for path in folder.rglob("*"):
            name = _RUN_NAME.sub("lohan-ID", f"{folder.name}/{path.relative_to(folder)}")
            if path.is_file() and not _TABLES.match(name):
                found.add(name)
    return frozenset(found)


def of_ending(ended: Ended, *, may_stop: bool = False) -> list[str]:
    """What is wrong with how a command ended that was not killed."""
    wrong = []
    if "Traceback (most recent call last)" in ended.output:
        wrong.append("a traceback is shown: " + last_lines(ended.output))
    if ended.is_late:
        wrong.append(f"it hung: ended after {children.LIMIT_SECONDS:.0f} s")
    if ended.num_left:
        wrong.append(f"{ended.num_left} processes outlived it")
    allowed = (DONE, REFUSED, *((*STOPPED, *EARLY) if may_stop else ()))
    if ended.code not in allowed and not wrong:
        wrong.append(f"exit code {ended.code}: " + last_lines(ended.output))
    if ended.code == REFUSED:
        missing = [word for word in ("error: ", "  why: ", "  do:  ") if word not in ended.output]
        if missing:
            wrong.append(f"refused without {missing}: " + last_lines(ended.output))
    if ended.code in STOPPED and "Traceback" not in ended.output:
        says_sealed = "stopped and sealed" in ended.output or "stopped at once" in ended.output
        if "training begins" in ended.output and not says_sealed:
            wrong.append("stopped by a signal without a word about it: " + last_lines(ended.output))
    if ended.code >= 0 and ended.temporary:
        wrong.append(f"left in the folder for temporary files: {ended.temporary[:3]}")
    return wrong


def of_numbers(run: Run, expected: Undisturbed) -> list[str]:
    """What is wrong with the weights and the losses of a run that has ended."""
    wrong = []
    if weights_of(run) != expected.weights:
        wrong.append("the weights are not those of the undisturbed run")
    try:
        losses = losses_of(run)
    except ValueError as error:
        return [*wrong, f"the log has a line that is no JSON: {error}"]
    for step, loss in losses:
        if expected.losses.get(step) != loss:
            wrong.append(f"the loss of step {step} is {loss}, not {expected.losses.get(step)}")
    steps = {step for step, _ in losses}
    if steps != set(expected.losses):
        wrong.append(f"the log has steps {sorted(steps)}")
    return wrong


def of_result(run: Run, expected: Undisturbed) -> list[str]:
    """What is wrong with a run that has ended."""
    wrong = of_numbers(run, expected)
    files = files_of(run)
    more, fewer = sorted(files - expected.files), sorted(expected.files - files)
    if more:
        wrong.append(f"{len(more)} files more than the undisturbed run: {more[:4]}")
    if fewer:
        wrong.append(f"{len(fewer)} files fewer than the undisturbed run: {fewer[:4]}")
    beside = sorted(path.name for path in run.out.parent.glob(f".{run.out.name}*"))
    if beside:
        wrong.append(f"left beside the output folder: {beside[:3]}")
    return wrong


def left_runs(run: Run) -> list[pathlib.Path]:
    """Directories on the SSDs of runs that OUT does not name."""
    record = run.out / "_lohan" / "run.json"
    own = json.loads(record.read_text())["run_id"] if record.exists() else None
    return [
        path for folder in run.ssd for path in folder.glob("lohan-*") if path.name != f"lohan-{own}"
    ]


def last_lines(output: str) -> str:
    """The end of what a command said, on one line."""
    return " | ".join(output.strip().splitlines()[-6:])[-700:]
