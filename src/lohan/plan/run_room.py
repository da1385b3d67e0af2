"""What a run takes of each filesystem it touches: states, swapped activations, model and archives.

Owns the sum, where two of these lie on one drive, and its words. What is there already, such as
the model the run starts from, is shown and not asked for again. Called by `lohan plan` and by runs
before their first byte.
"""

import os
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from lohan.plan.plan import Plan
from lohan.units import format_bytes_decimal
from lohan.vocabulary import Tier

STATES = "states"
"""The purpose that is written already when a run is resumed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DriveUse:
    """Bytes of one purpose in a folder."""

    path: str
    purpose: str
    nbytes: int
    is_there: bool = False
    """Whether they are written already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DriveSpace:
    """A filesystem as it is now."""

    device: int
    free_bytes: int
    """That this user may write."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DriveRoom:
    """What a run takes of one filesystem, and what is free there."""

    path: str
    """The first folder on it that the run uses."""
    free_bytes: int
    uses: tuple[DriveUse, ...]
    """Each purpose once."""

    @property
    def asked_bytes(self) -> int:
        """Still to be written."""
        return sum(use.nbytes for use in self.uses if not use.is_there)

    @property
    def share(self) -> float:
        """Of what is free, what is asked for."""
        return self.asked_bytes / max(1, self.free_bytes)

    def in_words(self) -> str:
        """The sum and its parts."""
        there = _listed([use for use in self.uses if use.is_there])
        return (
            f"{self.path}: {format_bytes_decimal(self.asked_bytes)} of "
            f"{format_bytes_decimal(self.free_bytes)} free"
            + _behind(" for ", _listed([use for use in self.uses if not use.is_there]))
            + _behind("; there already: ", there)
        )

    def to_fields(self) -> dict[str, object]:
        """Every number as plain values."""
        return {
            "path": self.path,
            "free_bytes": self.free_bytes,
            "asked_bytes": self.asked_bytes,
            "uses": [
                {"purpose": use.purpose, "bytes": use.nbytes, "is_there": use.is_there}
                for use in self.uses
            ],
        }


def parts_of(plan: Plan) -> dict[str, int]:
    """Bytes a run of a plan has on SSD, by purpose. States that live in RAM have their place there
    all the same, twice: seals are written to it. What is frozen has one."""
    parts = {line.purpose: line.nbytes for line in plan.ledger.lines_of(Tier.SSD)}
    if not plan.system.uses_residency:
        return parts
    others = {name: nbytes for name, nbytes in parts.items() if not name.startswith(STATES)}
    num_trained = plan.shape.num_trained_parameters
    states = 2 * plan.system.state.stored_bytes * num_trained
    frozen = plan.shape.dtype_bytes * (plan.shape.num_parameters - num_trained)
    return {STATES: states + frozen, **others}


def states_uses(
    parts: Mapping[str, int], directories: Sequence[str], *, is_resumed: bool = False
) -> list[DriveUse]:
    """What a run has on SSD, in equal parts on each of its directories."""
    return [
        DriveUse(
            path=directory,
            purpose=purpose,
            nbytes=-(-nbytes // len(directories)),
            is_there=is_resumed and purpose == STATES,
        )
        for directory in directories
        for purpose, nbytes in parts.items()
    ]


def drive_rooms(
    uses: Iterable[DriveUse], space_of: Callable[[str], DriveSpace] | None = None
) -> list[DriveRoom]:
    """Put uses that lie on one filesystem together, in the order they come."""
    found: dict[int, DriveRoom] = {}
    for use in uses:
        if use.nbytes <= 0:
            continue
        space = (space_of or space_at)(use.path)
        room = found.get(space.device)
        before = () if room is None else room.uses
        found[space.device] = DriveRoom(
            path=use.path if room is None else room.path,
            free_bytes=space.free_bytes,
            uses=_added(before, use),
        )
    return list(found.values())


def space_at(path: str) -> DriveSpace:
    """The filesystem a path is on, or will be on once it is made."""
    place = pathlib.Path(os.path.abspath(path))
    while not place.exists():
        place = place.parent
    found = os.statvfs(place)
    return DriveSpace(device=place.stat().st_dev, free_bytes=found.f_bavail * found.f_frsize)


def _added(uses: tuple[DriveUse, ...], more: DriveUse) -> tuple[DriveUse, ...]:
    """The same purpose in two folders of a filesystem is one."""
    key = (more.purpose, more.is_there)
    same = sum(use.nbytes for use in uses if (use.purpose, use.is_there) == key)
    if not same:
        return (*uses, more)
    whole = DriveUse(
        path=more.path, purpose=more.purpose, nbytes=same + more.nbytes, is_there=more.is_there
    )
    return tuple(whole if (use.purpose, use.is_there) == key else use for use in uses)


def _listed(uses: Sequence[DriveUse]) -> str:
    return ", ".join(f"{format_bytes_decimal(use.nbytes)} of {use.purpose}" for use in uses)


def _behind(lead: str, text: str) -> str:
    return f"{lead}{text}" if text else ""
