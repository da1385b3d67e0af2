"""Where tortured runs live: a tiny model and rows, the folders of one run, disks that lose power.

Owns the words of the commands, the undisturbed runs that judge, copies of runs to begin from, and
the private mounts. Every life of a variant is at the same paths, because a run names its places.
"""

import contextlib
import ctypes
import dataclasses
import os
import pathlib
import shutil
import signal
import subprocess
from collections.abc import Iterator

from torturing import children
from torturing.children import AtCall, AtTime, Ended
from torturing.plans import read_plans, write_plans

NUM_STEPS = 6
VARIANTS: dict[str, dict[str, str]] = {
    # All states stay in RAM; seals write them.
    "plain": {},
    # Two drives, whole copies of the states, the oldest ones removed.
    "copies": {"offload.archive_steps": "2", "save_total_limit": "1"},
    # States too large for RAM move in every step; the best model is kept; rows are evaluated.
    "moved": {
        "ram": "7600KiB",
        "eval_strategy": "steps",
        "eval_steps": "2",
        "save_steps": "2",
        "load_best_model_at_end": "true",
    },
}
_DISK_BYTES = 192 << 20
_CLONE_NEWNS = 0x00020000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """One run: its folders and the words it is started with."""

    variant: str
    folder: pathlib.Path
    out: pathlib.Path
    ssd: tuple[pathlib.Path, ...]
    given: pathlib.Path
    """With model and rows."""

    def words(self, **changes: str) -> list[str]:
        """Of `lohan train`."""
        kind = "large" if self.variant == "moved" else "small"
        pairs = {
            "model": str(self.given / kind),
            "data": str(self.given / "rows.jsonl"),
            "out": str(self.out),
            "device": "cpu",
            "machine": str(self.given / f"machine{len(self.ssd)}.json"),
            "max_steps": str(NUM_STEPS),
            "per_device_train_batch_size": "1",
            "gradient_accumulation_steps": "2",
            "learning_rate": "1e-3",
            "save_steps": "1",
            "pad_to_multiple_of": "16",
            **VARIANTS[self.variant],
            **changes,
        }
        if self.variant == "moved":
            pairs["eval_data"] = str(self.given / "eval.jsonl")
        named = [word for key, value in pairs.items() for word in (f"--{key}", value)]
        drives = [word for folder in self.ssd for word in ("--ssd", str(folder))]
        return ["train", *named, *drives]

    @property
    def is_recorded(self) -> bool:
        """Whether there is a run to resume."""
        return (self.out / "_lohan" / "run.json").exists()

    def next_words(self) -> list[str]:
        """What a user types to go on, or to begin."""
        return [*self.words(), *(["--resume"] if self.is_recorded else [])]

    @property
    def watched(self) -> tuple[pathlib.Path, ...]:
        """Folders whose system calls are disturbed."""
        return (self.out, *self.ssd)

    def clear(self) -> None:
        """Remove all of it, and make the SSD directories."""
        for folder in (self.out, *self.ssd):
            shutil.rmtree(folder, ignore_errors=True)
        for left in self.out.parent.glob(f".{self.out.name}.*"):
            shutil.rmtree(left, ignore_errors=True)
        for folder in self.ssd:
            folder.mkdir(parents=True)
        for disk in filter(os.path.ismount, {folder.parent for folder in (self.out, *self.ssd)}):
            # What is removed and made before a life stays so after a power cut.
            descriptor = os.open(disk, os.O_RDONLY)
            ctypes.CDLL(None).syncfs(descriptor)
            os.close(descriptor)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Undisturbed:
    """What a run ends with that nothing happened to."""

    weights: bytes
    losses: dict[int, float]
    files: frozenset[str]
    num_calls: int
    seconds: float


class Workshop:
    """The folder of all this, and what is made once."""

    def __init__(self, root: pathlib.Path) -> None:
        self.root = root
        self.given = root / "given"
        self.scratch = root / "scratch"
        self.disks = (root / "disk0", root / "disk1")
        self.undisturbed: dict[str, Undisturbed] = {}
        self.why_no_disks = "not tried"
        for folder in (self.given, self.scratch, *self.disks, root / "kept"):
            folder.mkdir(parents=True, exist_ok=True)

    def make_given(self) -> None:
        """Models, rows and machines, made in a child: torch starts threads."""
        done = children.run([], scratch=self.scratch, program=self._make_given)
        assert done.code == 0, done.output

    def _make_given(self) -> None:
        from support import tiny_chat
        from support.small_machines import small_machine

        large = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 12}
        for name, changes in (("small", {}), ("large", large)):
            tiny_chat.save_model(self.given / name, attention_dropout=0.1, **changes)
        tiny_chat.write_jsonl(self.given / "rows.jsonl", tiny_chat.conversations(8))
        tiny_chat.write_jsonl(self.given / "eval.jsonl", tiny_chat.conversations(2, seed=1))
        for count in (1, 2):
            (self.given / f"machine{count}.json").write_text(small_machine(count).to_json())

    def run_of(self, variant: str, *, are_on_disks: bool = False, is_split: bool = False) -> Run:
        """The run of a variant; on the disks that lose power if asked for, split over both."""
        folder = self.root / variant
        num_ssds = 2 if variant == "copies" else 1
        names = [f"ssd{number}" for number in range(num_ssds)]
        first, second = (
            (folder, folder) if not are_on_disks else (self.disks[0], self.disks[is_split])
        )
        return Run(
            variant=variant,
            folder=folder,
            out=first / "out",
            ssd=tuple(second / name for name in names),
            given=self.given,
        )

    def keep(self, run: Run, name: str) -> None:
        """Put a copy of a run away."""
        shutil.rmtree(self.root / "kept" / name, ignore_errors=True)
        for folder in (run.out, *run.ssd):
            shutil.copytree(folder, self.root / "kept" / name / folder.name, symlinks=True)

    def bring(self, run: Run, name: str) -> None:
        """Have that copy where the run was."""
        run.clear()
        for folder in (run.out, *run.ssd):
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(self.root / "kept" / name / folder.name, folder, symlinks=True)

    def stopped(self, variant: str, steps: int) -> str:
        """The name of a kept run of a variant, sealed after some steps; made if need be."""
        name = f"{variant}-{steps}"
        if not (self.root / "kept" / name).exists():
            run = self.run_of(variant)
            run.clear()
            done = stop_after(run, self.scratch, steps)
            assert done.code == 143, done.output
            self.keep(run, name)
        return name

    # ---- disks that lose power ----

    def make_disks(self) -> bool:
        """Mount two filesystems of our own in mounts of our own; False if that is not permitted."""
        if os.geteuid() != 0:
            self.why_no_disks = "this needs root"
            return False
        if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNS) != 0:
            self.why_no_disks = f"no private mounts ({os.strerror(ctypes.get_errno())})"
            return False
        words = [["mount", "--make-rprivate", "/"]]
        for disk in self.disks:
            image = disk.with_suffix(".img")
            with open(image, "wb") as file:
                file.truncate(_DISK_BYTES)
            words.append(["mkfs.ext4", "-q", "-F", "-m", "0", str(image)])
            words.append(_mount_words(disk))
        for line in words:
            try:
                done = subprocess.run(line, capture_output=True, text=True, check=False)
            except FileNotFoundError:
                self.why_no_disks = f"there is no {line[0]}"
                return False
            if done.returncode:
                self.why_no_disks = f"{' '.join(line)}: {done.stderr.strip()}"
                return False
        self.why_no_disks = ""
        return True

    @contextlib.contextmanager
    def opened_disks(self) -> Iterator[list[int]]:
        """Descriptors of both, for cutting their power; none where there are none."""
        disks = () if self.why_no_disks else self.disks
        found = [os.open(disk, os.O_RDONLY | os.O_DIRECTORY) for disk in disks]
        try:
            yield found
        finally:
            for descriptor in found:
                os.close(descriptor)

    def power_on(self) -> None:
        """Mount both again as after a power cut: journals are replayed, the rest is lost."""
        for disk in self.disks:
            subprocess.run(["umount", str(disk)], check=True)
            self.mount(disk)

    def mount(self, disk: pathlib.Path) -> None:
        """Mount one of them."""
        subprocess.run(_mount_words(disk), check=True)


def _mount_words(disk: pathlib.Path) -> list[str]:
    return ["mount", "-t", "ext4", "-o", "loop", str(disk.with_suffix(".img")), str(disk)]


def stop_after(run: Run, scratch: pathlib.Path, steps: int) -> Ended:
    """Run until SIGTERM, which comes when the checkpoint of a step has its name."""
    at = AtTime(
        seconds=0.0,
        act=lambda child: os.kill(child, signal.SIGTERM),
        condition=(run.out / f"checkpoint-{steps}").exists,
    )
    return children.run(run.words(), scratch=scratch, fault=at)


def undisturbed_run(workshop: Workshop, variant: str) -> tuple[Run, Ended]:
    """Run a variant without any fault, its system calls counted."""
    run = workshop.run_of(variant)
    run.clear()
    plans = workshop.scratch / "plans"

    def program() -> None:
        from lohan.cli import main

        try:
            main()
        finally:
            write_plans(plans)

    done = children.run(
        run.words(),
        scratch=workshop.scratch,
        watched=run.watched,
        fault=AtCall(nth=0, action=children.COUNT),
        program=program,
    )
    assert done.code == 0, done.output
    read_plans(plans)
    return run, done
