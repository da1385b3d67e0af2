"""One bit flipped in a file of a run, an archive or an exported model, and put back.

Owns where bits are flipped and what must notice: `lohan check`, called within a forked child, which
takes milliseconds; where that finds nothing, a whole `--resume` must refuse, or end with the bytes
of the undisturbed run. Files that no resume reads are named with the reason (`NOT_READ`); a resume
is tried for some of those too.
"""

import json
import os
import pathlib
import re
import shutil
import warnings
from dataclasses import dataclass

from torturing import children, judge
from torturing.lives import Life
from torturing.places import Run

NOT_READ = {
    r"/lock$": "says who holds a run, for messages; the lock itself is the system's",
    r"/_lohan/(log\.jsonl|report\.html|summary\.json|plan\.(json|txt)|machine\.json)$": (
        "written for people and for the report; a resume plans and measures anew"
    ),
    r"/states\.\d+\.bin$": "outside the sealed extents: the slot that is written to next",
}
_NUM_FLIPS = 2500
_MOST_RESUMES = 5
_SHARE_TRIED = 0.005
"""Of flips in files that are not read, how many are tried by a resume all the same."""


@dataclass(frozen=True)
class Subject:
    """Something to flip bits in, and what to check."""

    name: str
    files: tuple[pathlib.Path, ...]
    checked: tuple[pathlib.Path, ...]
    run: Run | None


def flips(life: Life) -> None:
    """Some hundred flips in all files of four things."""
    subjects = _subjects(life)
    answers = life.workshop.scratch / "flips.jsonl"
    wishes = [_draw(life, subjects) for _ in range(_NUM_FLIPS)]

    def judge_all() -> None:
        for subject in subjects:
            assert not (found := _noticed(subject)), f"{subject.name} is whole: {found}"
        with open(answers, "w", encoding="utf-8") as file:
            for subject, path, bit in wishes:
                file.write(json.dumps(_noticed_flip(subject, path, bit)) + "\n")

    ended = children.run([], scratch=life.workshop.scratch, program=judge_all)
    lines = answers.read_text(encoding="utf-8").splitlines()
    if ended.code or len(lines) != len(wishes):
        which = wishes[len(lines)] if len(lines) < len(wishes) else None
        life.tell(["the judge of flips ended: " + judge.last_lines(ended.output)], f"flip {which}")
        return
    num_resumed = 0
    for (subject, path, bit), line in zip(wishes, lines, strict=True):
        noticed = json.loads(line)
        where = f"bit {bit} of {path.relative_to(life.workshop.root)}"
        if noticed.startswith("raised"):
            life.totals.count(life.kind, "wrong judge")
            life.tell([f"lohan check {noticed}"], where)
        elif noticed:
            life.totals.count(life.kind, "found by lohan check")
        elif _reason_not_read(subject, path, bit) and life.draw.random() > _SHARE_TRIED:
            life.totals.count(life.kind, "in what is not read")
        elif subject.run is None:
            life.totals.count(life.kind, "not found")
            life.tell(["nothing finds it"], where)
        elif num_resumed < _MOST_RESUMES:
            num_resumed += 1
            _resume(life, subject.run, path, bit, where)
        # Others of these are left out, and not counted: a resume takes seconds.


def _subjects(life: Life) -> list[Subject]:
    workshop = life.workshop
    judge.undisturbed(workshop, "plain"), judge.undisturbed(workshop, "copies")
    stopped, ended = workshop.run_of("copies"), workshop.run_of("plain")
    workshop.bring(stopped, workshop.stopped("copies", 3))
    workshop.bring(ended, judge.done_name(ended))
    archive, export = workshop.root / "archive", workshop.root / "export"
    if not archive.exists():
        kept = workshop.root / "kept" / judge.done_name(stopped)
        shutil.copytree(kept / "out" / "checkpoint-6", archive)
    if not export.exists():
        done = life.command(["export", str(ended.out), "--out", str(export)])
        assert done.code == 0, done.output
    copies = tuple(path.parent for path in stopped.out.glob("checkpoint-*/states"))
    return [
        Subject("a stopped run", _files(stopped), (stopped.out, *copies), stopped),
        Subject("an ended run", _files(ended), (ended.out, *ended.ssd), ended),
        Subject("an archive", _files_in(archive), (archive,), None),
        Subject("an exported model", _files_in(export), (export,), None),
    ]


def _files(run: Run) -> tuple[pathlib.Path, ...]:
    return tuple(path for folder in (run.out, *run.ssd) for path in _files_in(folder))


def _files_in(folder: pathlib.Path) -> tuple[pathlib.Path, ...]:
    """All but locks, which every command writes anew."""
    found = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "lock")
    return tuple(path for path in found if path.stat().st_size)


def _draw(life: Life, subjects: list[Subject]) -> tuple[Subject, pathlib.Path, int]:
    """A file of a subject, each as likely as any other, and a bit of it."""
    subject = life.draw.choice(subjects)
    path = life.draw.choice(subject.files)
    nbytes = path.stat().st_size
    if path.name.startswith("states.") and life.draw.random() < 0.9:
        inside = _sealed_ranges(path)
        if inside:
            begin, end = life.draw.choice(inside)
            return subject, path, life.draw.randrange(8 * begin, 8 * end)
    return subject, path, life.draw.randrange(8 * nbytes)


def _flip(path: pathlib.Path, bit: int) -> None:
    descriptor = os.open(path, os.O_RDWR)
    try:
        was = os.pread(descriptor, 1, bit // 8)[0]
        os.pwrite(descriptor, bytes([was ^ (1 << bit % 8)]), bit // 8)
    finally:
        os.close(descriptor)


def _noticed_flip(subject: Subject, path: pathlib.Path, bit: int) -> str:
    """What `lohan check` says about a flip, if anything. Runs in a child."""
    _flip(path, bit)
    try:
        return _noticed(subject, path)
    except Exception as error:
        return f"raised {type(error).__name__}: {error}"
    finally:
        _flip(path, bit)


def _noticed(subject: Subject, path: pathlib.Path | None = None) -> str:
    """What `lohan check` finds in a subject, the folder of the path first."""
    from lohan.errors import LohanError
    from lohan.train.run.checking import check_directory

    nearest = sorted(subject.checked, key=lambda place: -len(place.parts))
    for place in sorted(nearest, key=lambda place: path is None or not path.is_relative_to(place)):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                reports = check_directory(place, [], quick=False, trust_remote_code=False)
        except LohanError as error:
            return error.what
        problems = [str(one) for report in reports for one in report["problems"]]
        if problems:
            return problems[0]
    return ""


def _reason_not_read(subject: Subject, path: pathlib.Path, bit: int) -> str | None:
    for words, reason in NOT_READ.items():
        if re.search(words, str(path)):
            if path.name.startswith("states."):
                is_sealed = any(begin <= bit // 8 < end for begin, end in _sealed_ranges(path))
                return None if is_sealed else reason
            return reason if subject.run is not None else None
    return None


def _sealed_ranges(path: pathlib.Path) -> list[tuple[int, int]]:
    """Bytes of a states file that the manifest beside it seals (docs/on-disk-format.md)."""
    manifest = json.loads((path.parent / "manifest.json").read_text())
    stripe = manifest["file"]["stripe"]
    chunk_bytes, pattern = stripe["chunk_bytes"], stripe["pattern"]
    drive = int(path.name.split(".")[1])
    found = []
    for block in manifest["blocks"]:
        for name, part in block["parts"].items():
            offset, nbytes = part["extents"][0 if name == "FROZEN16" else block["slot"]]
            end = offset + nbytes
            while offset < end:
                chunk, inside = divmod(offset, chunk_bytes)
                piece_bytes = min(chunk_bytes - inside, end - offset)
                rounds, place = divmod(chunk, len(pattern))
                if pattern[place] == drive:
                    number = rounds * pattern.count(drive) + pattern[:place].count(drive)
                    begin = number * chunk_bytes + inside
                    found.append((begin, begin + piece_bytes))
                offset += piece_bytes
    return found


def _resume(life: Life, run: Run, path: pathlib.Path, bit: int, where: str) -> None:
    """What `lohan check` does not find, a resume refuses or does not mind."""
    name = (
        life.workshop.stopped(run.variant, 3) if run.variant == "copies" else judge.done_name(run)
    )
    _flip(path, bit)
    ended = life.command(["train", str(run.out), "--resume"])
    wrong = judge.of_ending(ended)
    if ended.code == judge.DONE:
        expected = judge.undisturbed(life.workshop, run.variant)
        wrong += judge.of_numbers(run, expected)
        life.totals.count(life.kind, "minded by no resume: the same bytes")
    else:
        life.totals.count(life.kind, "refused by the resume")
    life.tell(wrong, where)
    life.workshop.bring(run, name)
