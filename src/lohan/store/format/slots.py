"""Which slot of a block is sealed, which is read, which is written: the rules, and the books.

Owns the state machine of one block and the record of what an update has written so far. Pure: no
files, no locks (the store has one). Used by `states`.

Note "slots of a block". A block's trainable parts exist once per slot. With two slots:

    EMPTY     nothing was ever wholly written. A fill writes slot 0 and makes the block AHEAD.
    SEALED    the current slot is the one the manifest on disk points at. The other slot is the
              working slot; what it holds means nothing.
    UPDATING  an update writes the working slot. Reads still give the values from before it, and
              only of ranges it has not written yet.
    AHEAD     an update was wholly written: the working slot has become the current one. The
              manifest still points at the sealed slot.
    TORN      an update stopped half-way: the current values are a mix of two steps.

    fill:           EMPTY            -> AHEAD
    begin_update:   SEALED, AHEAD    -> UPDATING
    finish_update:  UPDATING         -> AHEAD     every part wholly written, every write good
    a write fails:  UPDATING         -> TORN      also: finish_update with a range missing
    seal:           AHEAD, SEALED    -> SEALED    the current slot becomes the sealed one

The sealed slot is never written. From SEALED an update reads the sealed slot and writes the other.
From AHEAD (several updates between two seals) the working slot is both read and written, in place,
range by range: each range is read before it is written, once per update. If that stops half-way the
working slot is a mix, and so are parts kept in RAM: the block is TORN, the store refuses to seal,
and the way back is to open the run again, which gives the last seal.

With one slot the working slot IS the sealed one. The first update after a seal destroys what was
sealed: a process that ends before the next seal leaves nothing to resume from.
"""

import bisect
from enum import IntEnum, StrEnum

from lohan.errors import CheckpointError, LohanError, bug
from lohan.store.format.layout import BlockLayout, Part


class SlotCount(IntEnum):
    """How many times a block's trainable parts exist on SSD."""

    ONE = 1
    """Half the space. A run that stops between two seals cannot be resumed: see "slots"."""
    TWO = 2
    """A run that stops at any instant resumes from its last seal."""


class BlockState(StrEnum):
    """See the note "slots of a block"."""

    EMPTY = "empty"
    SEALED = "sealed"
    UPDATING = "updating"
    AHEAD = "ahead"
    TORN = "torn"


class Ranges:
    """Positions written so far, as ranges that do not touch."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []

    def overlaps(self, begin: int, end: int) -> bool:
        """Whether any position of [begin, end) is in it."""
        place = bisect.bisect_right(self._ranges, (begin, begin))
        is_hit_before = place > 0 and self._ranges[place - 1][1] > begin
        return is_hit_before or (place < len(self._ranges) and self._ranges[place][0] < end)

    def add(self, begin: int, end: int) -> None:
        """Enter a range that does not overlap; it joins its neighbours."""
        place = bisect.bisect_right(self._ranges, (begin, begin))
        if place < len(self._ranges) and self._ranges[place][0] == end:
            end = self._ranges.pop(place)[1]
        if place > 0 and self._ranges[place - 1][1] == begin:
            place -= 1
            begin = self._ranges.pop(place)[0]
        self._ranges.insert(place, (begin, end))

    def first_gap(self, length: int) -> tuple[int, int] | None:
        """The first positions of [0, length) that are missing."""
        position = 0
        for begin, end in self._ranges:
            if begin > position:
                break
            position = end
        else:
            begin = length
        return (position, min(begin, length)) if position < length else None


class BlockSlots:
    """The books of one block. The caller holds the store's lock."""

    def __init__(
        self, layout: BlockLayout, slot_count: SlotCount, *, sealed_slot: int | None = None
    ) -> None:
        self._layout = layout
        self._slot_count = slot_count
        self.state = BlockState.EMPTY if sealed_slot is None else BlockState.SEALED
        self.sealed_slot = sealed_slot
        self.current_slot = 0 if sealed_slot is None else sealed_slot
        self._written: dict[Part, Ranges] = {}
        self._reason = ""
        self._num_starting = 0

    @property
    def working_slot(self) -> int:
        """The slot an update writes."""
        if self.sealed_slot is None or self._slot_count is SlotCount.ONE:
            return 0
        return 1 - self.sealed_slot

    def refuse_fill(self) -> None:
        """Refuse to fill what has values."""
        if self.state is not BlockState.EMPTY:
            raise self._refusal("was filled", "a fill is the first thing that happens to a block")

    def finish_fill(self) -> None:
        """EMPTY -> AHEAD: the first values are there, in slot 0."""
        self.refuse_fill()
        self.state = BlockState.AHEAD

    def begin_update(self) -> None:
        """SEALED or AHEAD -> UPDATING."""
        self.refuse_torn()
        if self.state not in (BlockState.SEALED, BlockState.AHEAD):
            raise self._refusal("was to be updated", "an update follows a fill or another update")
        if not self._layout.trainable_parts:
            raise self._refusal("was to be updated", "all its parameters are frozen")
        self.state = BlockState.UPDATING
        self._written = {part: Ranges() for part in self._layout.trainable_parts}

    def refuse_read(self, part: Part, begin: int, end: int) -> None:
        """Refuse reading what has no value, or has the value of the next step already."""
        self.refuse_torn()
        if self.state is BlockState.EMPTY:
            raise self._refusal("was read", "nothing was written yet")
        is_updating = self.state is BlockState.UPDATING
        if is_updating and not part.is_frozen and self._written[part].overlaps(begin, end):
            raise self._refusal(
                f"was read at [{begin}, {end}) of {part}",
                "this range was written by the update that is going on",
            )

    def enter_write(self, part: Part, begin: int, end: int) -> None:
        """Enter a write of the update that is going on."""
        self.refuse_torn()
        if part.is_frozen:
            raise self._refusal(f"was written at {part}", "frozen parameters do not change")
        if self.state is not BlockState.UPDATING:
            raise self._refusal("was written", "writes belong between begin_update and its end")
        if self._written[part].overlaps(begin, end):
            raise self._refusal(
                f"was written twice at [{begin}, {end}) of {part}",
                "an update writes every range once",
            )
        self._written[part].add(begin, end)
        self._num_starting += 1

    def end_start(self) -> None:
        """Enter that a write entered before is in flight, or failed to get there."""
        self._num_starting -= 1

    def finish_update(self) -> None:
        """UPDATING -> AHEAD, or TORN if a range is missing."""
        self.refuse_torn()
        if self.state is not BlockState.UPDATING:
            raise self._refusal("ended an update", "none had begun")
        if self._num_starting:
            raise self._refusal("ended an update", "another thread is still starting a write of it")
        for part, ranges in self._written.items():
            gap = ranges.first_gap(self._layout.num_positions(part))
            if gap is not None:
                self.tear(f"its update ended without positions [{gap[0]}, {gap[1]}) of {part}")
                raise self._refusal(
                    f"ended an update without positions [{gap[0]}, {gap[1]}) of {part}",
                    "its values would be a mix of two steps",
                )
        self.state, self.current_slot = BlockState.AHEAD, self.working_slot
        self._written = {}

    def tear(self, reason: str) -> None:
        """Enter that the current values are a mix. The first reason is kept."""
        if self.state is not BlockState.TORN:
            self.state, self._reason = BlockState.TORN, reason

    def refuse_seal(self) -> None:
        """Refuse to seal what is not the whole state of one step.

        Raises:
            CheckpointError: the block is empty or torn.
            ScheduleError: an update is going on.
        """
        self.refuse_torn()
        if self.state is BlockState.EMPTY:
            raise CheckpointError(
                f"block {self._layout.name} was never filled",
                why="there is nothing to seal",
                remedy="fill the store from the model's weights first",
            )
        if self.state is BlockState.UPDATING:
            raise self._refusal("was to be sealed", "its update has not ended")

    def seal(self) -> None:
        """The manifest on disk points at the current slot from now on."""
        self.state, self.sealed_slot = BlockState.SEALED, self.current_slot

    def refuse_torn(self) -> None:
        """Refuse any use of a mix of two steps."""
        if self.state is BlockState.TORN:
            raise CheckpointError(
                f"block {self._layout.name} holds a mix of two steps: {self._reason}",
                why="an update stopped half-way, and what it had written cannot be taken back",
                remedy="close the run and open it again: it continues from its last seal",
            )

    def _refusal(self, event: str, why: str) -> LohanError:
        return bug(f"block {self._layout.name}, which is {self.state}, {event}: {why}")
