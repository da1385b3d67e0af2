"""What a drive may be written with in its life: who says so, and what of it is used up.

Owns the three sources of a life (stated, worked out from the drive's own wear counter, assumed),
their words, and the reading of a drive's counters. Drives do not say what they are rated for: what
was written so far and the share of the life it used up tell. Needs no torch and no rights: where
counters cannot be read, the answer is that nothing is known.
"""

import json
import re
import shutil
import subprocess
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum

from lohan.errors import ConfigError

WRITES_PER_CAPACITY = 600
"""What drives endure, as a multiple of what they hold: usual for consumer drives. Not measured."""
_LEAST_USED_SHARE = 0.05
"""Counters are whole percents: below this, what follows from them may be off by a fifth."""
_DATA_UNIT_BYTES = 512_000
"""NVMe counts what was written in thousands of 512 bytes."""
_TIMEOUT_SECONDS = 5.0
_PARTITION = re.compile(r"^(/dev/nvme\d+n\d+)p\d+$")


class LifeSource(StrEnum):
    """Who says what a drive endures."""

    STATED = "stated"
    WEAR_COUNTER = "wear counter"
    ASSUMED = "assumed"


@dataclass(frozen=True, slots=True, kw_only=True)
class DriveWear:
    """What a drive counts itself."""

    written_bytes: int
    """In its whole life, by everything."""
    used_share: float
    """Of its life, in the drive's own judgement; above 1 for one that outlives it."""

    @property
    def life_bytes(self) -> int | None:
        """What may be written in all if the rest wears like the past; None: too early to tell."""
        if self.used_share < _LEAST_USED_SHARE or not self.written_bytes:
            return None
        return round(self.written_bytes / self.used_share)


def life_of(capacity_bytes: int, wear: DriveWear | None) -> tuple[int, LifeSource]:
    """What a drive endures as far as it can be known, and from where."""
    if wear is not None and wear.life_bytes is not None:
        return wear.life_bytes, LifeSource.WEAR_COUNTER
    return max(1, capacity_bytes * WRITES_PER_CAPACITY), LifeSource.ASSUMED


def one_per_drive(lives_bytes: Sequence[int], num_drives: int) -> Sequence[int]:
    """Lives that were stated, one for each drive: one figure alone is meant for all.

    Raises:
        ConfigError: there are more, and not one per drive.
    """
    if len(lives_bytes) not in (1, num_drives):
        raise ConfigError(
            f"{len(lives_bytes)} rated lives are given for {num_drives} drive(s)",
            why="each is of one drive",
            remedy="give one for all, or one per SSD directory in their order "
            "(offload.ssd_rated_tbw)",
        )
    return lives_bytes if len(lives_bytes) == num_drives else [lives_bytes[0]] * num_drives


def life_in_words(sources: Collection[LifeSource], used_share: float | None) -> str:
    """The life of all drives of a machine, as the end of `2% of ...`."""
    if LifeSource.ASSUMED in sources:
        words = "the drives' assumed life"
    elif LifeSource.WEAR_COUNTER in sources:
        words = "the drives' life (from the drive's own wear counter)"
    else:
        words = "the drives' rated life"
    return words if used_share is None else f"{words}, {used_share:.0%} of which is used already"


def wear_in(text: str) -> DriveWear | None:
    """The wear in what `smartctl --json -a` prints of an NVMe drive; None where it is not there."""
    try:
        log = json.loads(text)["nvme_smart_health_information_log"]
        percent, units = log["percentage_used"], log["data_units_written"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None  # no permission, another kind of drive, or not its output at all
    if not all(type(one) is int and one >= 0 for one in (percent, units)):
        return None
    return DriveWear(written_bytes=units * _DATA_UNIT_BYTES, used_share=percent / 100)


def read_wear(device: str, ask: Callable[[str], str] | None = None) -> DriveWear | None:
    """Ask a drive for its wear; None where it does not answer this user. May block: seconds.

    Args:
        device: as mounted, such as `/dev/nvme0n1p2`.
        ask: gives the text for the device of a drive; smartctl's if not given.
    """
    partition = _PARTITION.match(device)
    if partition is not None:
        device = partition[1]
    return wear_in((ask or _ask_smartctl)(device)) if device.startswith("/dev/") else None


def _ask_smartctl(device: str) -> str:
    program = shutil.which("smartctl")
    if program is None:
        return ""
    try:
        # Its exit code is no judge: bits of it tell of old errors in the drive's log.
        done = subprocess.run(
            [program, "--json", "-a", device],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout
