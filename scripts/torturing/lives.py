"""Lives of whole runs: begun, disturbed some times, gone on with, and judged at their end.

Owns which faults a life of each kind has. All of them are drawn from the seed and the number of the
life. Flips, which need no whole run each, are in `flips`.
"""

import errno
import os
import pathlib
import random
import shutil
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass

from torturing import children, judge
from torturing.children import AtCall, AtTime, Ended
from torturing.places import Run, Workshop
from torturing.totals import Totals

_MOST_FAULTS = 16
_SHARES = {"plain": 0.55, "copies": 0.35, "moved": 0.1}


@dataclass
class Life:
    """One life: its run, its chance, and where faults are counted."""

    workshop: Workshop
    totals: Totals
    number: int
    kind: str
    draw: random.Random
    run: Run

    def launch(self, fault: AtCall | AtTime | None = None, **more: object) -> Ended:
        """Begin or go on, with a fault."""
        return self.command(self.run.next_words(), fault, **more)

    def command(
        self, words: list[str], fault: AtCall | AtTime | None = None, **more: object
    ) -> Ended:
        """Run any command of lohan."""
        return children.run(
            words,
            scratch=self.workshop.scratch,
            watched=self.run.watched,
            fault=fault,
            **more,  # type: ignore[arg-type]
        )

    def tell(self, sentences: list[str], where: str) -> bool:
        """Note what is wrong; True if anything is."""
        for sentence in sentences:
            self.totals.note_wrong(self.kind, self.number, f"[{where}] {sentence}")
        return bool(sentences)

    def finish(self, where: str, last: Ended | None = None) -> None:
        """Go on without a fault to the end, and judge what the run ends with.

        Args:
            last: the last launch; if its fault never came it was the one without a fault.
        """
        is_done = last is not None and not last.is_disturbed and last.code == judge.DONE
        ended = last if is_done and last is not None else self.launch()
        wrong = judge.of_ending(ended)
        if ended.code != judge.DONE:
            wrong = wrong or ["the run cannot be finished: " + judge.last_lines(ended.output)]
            self.tell(wrong, f"{where}; finishing")
            self.totals.outcomes[self.kind]["not finished"] += 1
            return
        self._remove_left_runs(where)
        expected = judge.undisturbed(self.workshop, self.run.variant)
        self.tell([*wrong, *judge.of_result(self.run, expected)], where)

    def _remove_left_runs(self, where: str) -> None:
        """States of processes that were killed before OUT named them: `lohan clean` finds them."""
        for path in judge.left_runs(self.run):
            if not path.exists():  # its part on another drive was removed with it
                continue
            words = ["clean", *(word for one in self.run.ssd for word in ("--ssd", str(one)))]
            name = path.name.removeprefix("lohan-")
            ended = self.command([*words, "--remove", name, "--yes", "--incomplete"])
            self.totals.outcomes[self.kind]["left runs removed by lohan clean"] += 1
            wrong = judge.of_ending(ended)
            if path.exists():
                wrong.append(f"lohan clean does not remove {path}: " + ended.output[-300:])
                shutil.rmtree(path)
            self.tell(wrong, where)


def new_life(workshop: Workshop, totals: Totals, number: int, kind: str) -> Life:
    """A life of a kind, with its chance and a variant."""
    draw = random.Random(f"{totals.seed}/{number}/{kind}")
    variant = draw.choices(list(_SHARES), list(_SHARES.values()))[0]
    judge.undisturbed(workshop, variant)
    is_on_disks = kind in ("power", "full", "gone") and not workshop.why_no_disks
    run = workshop.run_of(variant, are_on_disks=is_on_disks, is_split=draw.random() < 0.5)
    run.clear()
    return Life(workshop, totals, number, kind, draw, run)


def _early(life: Life) -> float:
    """A share of a whole run, rather early: what goes on from a seal has less before it."""
    return life.draw.random() ** 2


def _nth(life: Life) -> int:
    expected = judge.undisturbed(life.workshop, life.run.variant)
    return 1 + int(_early(life) * expected.num_calls)


def _seconds(life: Life) -> float:
    return _early(life) * 1.05 * judge.undisturbed(life.workshop, life.run.variant).seconds


def kills(life: Life) -> None:
    """SIGKILL, SIGTERM and SIGINT at random instants and at random system calls; sometimes two."""
    for _ in range(life.draw.randint(2, _MOST_FAULTS)):
        number = life.draw.choices((signal.SIGKILL, signal.SIGTERM, signal.SIGINT), (3, 1, 1))[0]
        fault: AtCall | AtTime
        if life.draw.random() < 0.5 and children.is_shim_loaded():
            is_twice = number != signal.SIGKILL and life.draw.random() < 0.2
            fault = AtCall(
                nth=_nth(life), action=children.SIGNAL, number=number, is_lasting=is_twice
            )
        else:
            fault = AtTime(seconds=_seconds(life), act=lambda child, n=number: os.kill(child, n))
        ended = life.launch(fault)
        if not ended.is_disturbed:
            break  # it was done before
        name = signal.Signals(number).name
        life.totals.count(life.kind, name)
        at = f"{fault.seconds:.3f} s" if isinstance(fault, AtTime) else ended.where
        where = f"{name} at {at}"
        if ended.code != -signal.SIGKILL:
            life.tell(judge.of_ending(ended, may_stop=True), where)
        elif ended.num_left:
            life.tell([f"{ended.num_left} processes outlived it"], where)
    life.finish("after kills", ended)


def power(life: Life) -> None:
    """The power goes at random instants and at random system calls: what is not flushed is gone."""
    for _ in range(life.draw.randint(2, _MOST_FAULTS)):
        with life.workshop.opened_disks() as disks:
            fault: AtCall | AtTime
            if life.draw.random() < 0.7 and children.is_shim_loaded():
                fault = AtCall(nth=_nth(life), action=children.POWER_CUT)
            else:

                def cut(child: int, disks: list[int] = disks) -> None:
                    children.cut_power(disks)
                    os.kill(child, signal.SIGKILL)

                fault = AtTime(seconds=_seconds(life), act=cut)
            ended = life.launch(fault, disks=disks)
        if not ended.is_disturbed:
            break
        life.totals.count(life.kind, "cut")
        life.workshop.power_on()
    life.finish("after power cuts", ended)


def failures(life: Life) -> None:
    """System calls on OUT and the SSDs fail, once or from then on, or write a part only."""
    for _ in range(life.draw.randint(2, _MOST_FAULTS)):
        classes = life.draw.choice(
            (children.WRITES, children.SYNCS, children.NAMES, children.ROOM, children.READS)
        )
        is_short = classes == children.WRITES and life.draw.random() < 0.3
        number = life.draw.choice((errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS))
        number = errno.EIO if classes in (children.SYNCS, children.READS) else number
        fault = AtCall(
            nth=int(2 ** life.draw.uniform(0, 8.5)),
            classes=classes,
            action=children.SHORT if is_short else children.FAIL,
            number=number,
            is_lasting=life.draw.random() < 0.5,
            is_uring_refused=True,
        )
        ended = life.launch(fault)
        if not ended.is_disturbed:
            if ended.code == judge.DONE:
                break
            continue
        name = "short writes" if is_short else errno.errorcode[number]
        life.totals.count(life.kind, name)
        where = f"{name} in {ended.where}{', lasting' if fault.is_lasting else ''}"
        life.tell(judge.of_ending(ended), where)
        if ended.code == judge.DONE:
            break
    life.finish("after failures of system calls", ended)


def full(life: Life) -> None:
    """Drives without room, from the start or from some instant on; a limit of file sizes."""
    filler = life.run.folder / "filler"
    for _ in range(life.draw.randint(1, 5)):
        if life.workshop.why_no_disks or life.draw.random() < 0.4:
            most_bytes = int(2 ** life.draw.uniform(15, 23))  # more than what it says
            ended = life.launch(most_file_bytes=most_bytes)
            where = f"files of {most_bytes} bytes at most"
        else:
            disk = life.draw.choice((life.run.out, life.run.ssd[0])).parent
            filler = disk / "filler"
            left_bytes = int(2 ** life.draw.uniform(10, 24))

            def fill(_: int, filler: pathlib.Path = filler, left_bytes: int = left_bytes) -> None:
                free_bytes = shutil.disk_usage(filler.parent).free
                with open(filler, "wb") as file:
                    os.posix_fallocate(file.fileno(), 0, max(1, free_bytes - left_bytes))

            ended = life.launch(AtTime(seconds=_seconds(life) * 0.8, act=fill))
            where = f"{disk.name} has {left_bytes} bytes left"
            filler.unlink(missing_ok=True)
        if not ended.is_disturbed:
            break
        life.totals.count(life.kind, "refused" if ended.code == judge.REFUSED else "endured")
        life.tell(judge.of_ending(ended), where)
        if ended.code == judge.DONE:
            break
    life.finish("after full drives", ended)


def gone(life: Life) -> None:
    """A folder, or a whole filesystem, is taken away at some instant, and comes back afterwards."""
    for _ in range(life.draw.randint(1, 5)):
        taken = life.draw.choice((life.run.out, *life.run.ssd, life.run.given))
        away = taken.with_name(f"{taken.name}.away")
        is_mount = not life.workshop.why_no_disks and taken.parent in life.workshop.disks
        is_mount = is_mount and life.draw.random() < 0.5

        def take(
            _: int,
            taken: pathlib.Path = taken,
            away: pathlib.Path = away,
            is_mount: bool = is_mount,
        ) -> None:
            if is_mount:
                subprocess.run(["umount", "--lazy", str(taken.parent)], check=True)
            elif taken.exists():
                taken.rename(away)

        ended = life.launch(AtTime(seconds=_seconds(life), act=take))
        if is_mount and ended.is_disturbed:
            _forget(life, taken.parent)
            life.workshop.mount(taken.parent)
        elif away.exists():
            shutil.rmtree(taken, ignore_errors=True)  # what was made in its place
            away.rename(taken)
        if not ended.is_disturbed:
            break
        life.totals.count(life.kind, "refused" if ended.code == judge.REFUSED else "endured")
        where = f"{'the mount of ' if is_mount else ''}{taken.name} taken away"
        life.tell(judge.of_ending(ended), where)
    life.finish("after folders were gone", ended)


def _forget(life: Life, disk: pathlib.Path) -> None:
    """Remove what was written under the mount point while nothing was mounted there."""
    assert not os.path.ismount(disk), life.number
    for path in disk.iterdir():
        shutil.rmtree(path)


KINDS: dict[str, Callable[[Life], None]] = {
    "kills": kills,
    "power": power,
    "failures": failures,
    "full": full,
    "gone": gone,
}
