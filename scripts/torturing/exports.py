"""`lohan export` disturbed at any system call: a whole model is there, or none.

Owns faults of exports: kills, power cuts, failures, short writes, from a run that has ended. An
export takes a part of a second, so a life has many.
"""

import errno
import hashlib
import pathlib
import shutil
import signal

from torturing import children, judge
from torturing.children import AtCall, Ended
from torturing.lives import Life
from torturing.places import Run

_NUM_FAULTS = 40
_SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)


def exports(life: Life) -> None:
    """Many exports with a fault each; then one without."""
    judge.undisturbed(life.workshop, "plain")
    run = life.workshop.run_of("plain")
    life.workshop.bring(run, judge.done_name(run))
    life.run = run
    has_disks = not life.workshop.why_no_disks
    place = (life.workshop.disks[0] if has_disks else run.folder) / "exported"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    out = place / "model"
    counted = _export(life, run, out, AtCall(nth=0, action=children.COUNT))
    assert counted.code == 0, counted.output
    expected = _content(out)
    for _ in range(_NUM_FAULTS):
        shutil.rmtree(out, ignore_errors=True)
        action = life.draw.choices(
            (children.SIGNAL, children.POWER_CUT, children.FAIL, children.SHORT),
            (5, 5 if has_disks else 0, 3, 1),
        )[0]
        number = life.draw.choice((errno.EIO, errno.ENOSPC))
        if action == children.SIGNAL:
            number = life.draw.choice(_SIGNALS)
        fault = AtCall(
            nth=life.draw.randint(1, counted.num_calls),
            classes=children.WRITES if action == children.SHORT else children.CHANGES,
            action=action,
            number=int(number),
        )
        before = _left(place)
        with life.workshop.opened_disks() as disks:
            ended = _export(life, run, out, fault, disks=disks)
        if action == children.POWER_CUT:
            life.workshop.power_on()
        if ended.is_disturbed:
            name = ("", "killed", "failing call", "short write", "power cut")[action]
            life.totals.count(life.kind, name)
        life.tell(_wrong(ended, fault, out, expected), f"export, {ended.where}")
        if ended.code >= 0:  # what a killed one leaves, the next one that gets there removes
            own = [one for one in _left(place) if ended.code == judge.DONE or one not in before]
            life.tell(own, f"export, {ended.where}")
    shutil.rmtree(out, ignore_errors=True)
    ended = _export(life, run, out, None)
    life.tell(_wrong(ended, None, out, expected) + _left(place), "export without a fault")
    shutil.rmtree(place)


def _export(
    life: Life, run: Run, out: pathlib.Path, fault: AtCall | None, disks: list[int] | None = None
) -> Ended:
    return children.run(
        ["export", str(run.out), "--out", str(out)],
        scratch=life.workshop.scratch,
        watched=[out.parent],
        fault=fault,
        disks=disks or [],
    )


def _wrong(
    ended: Ended, fault: AtCall | None, out: pathlib.Path, expected: dict[str, str]
) -> list[str]:
    wrong = []
    if ended.code != -signal.SIGKILL:
        wrong += judge.of_ending(ended, may_stop=fault is not None)
    if out.exists() and _content(out) != expected:
        wrong.append(f"a model is there that is not whole: {sorted(_content(out))}")
    if ended.code == judge.DONE and not out.exists():
        wrong.append("it says it is done, and no model is there")
    return wrong


def _left(place: pathlib.Path) -> list[str]:
    return [f"left beside the output folder: {path.name}" for path in place.glob(".*")]


def _content(folder: pathlib.Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }
