"""Cutting a recorded block in two: what forward hands over, and what backward runs again.

Owns the question of which calls each half needs, given the operators whose outputs are stored. It
knows neither tensors nor stores. Called by `captures` once per block, shape and plan.

Note "What may be stored". The content of a storage that backward reads is the final one. So a
storage can be stored once its last writer has run, if nothing reads an earlier content of it: a
call that is run again would find the final content there. One that is not stored is made again by
its maker and all its writers, in order. Views cost nothing and are made again from what they view.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch

from lohan.drive.captured.record import NotCapturable, Recording, Value

_AS_STRIDED = torch.ops.aten.as_strided.default


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """One tensor that forward hands over."""

    value: Value
    ordinal: int
    """Of the operator whose output it is."""
    after: int
    """The call after which its content is final."""
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Both halves of a block, as places in its list of calls."""

    forward: tuple[int, ...]
    again: tuple[int, ...]
    """Forward calls that backward runs again."""
    backward: tuple[int, ...]
    stored: tuple[Stored, ...]
    drawn: tuple[int, ...]
    """Random calls whose outputs are not all stored: before each the state of the generators is
    noted, to be set if it is run again."""


class Calls:
    """A recording, with what makes and writes what."""

    def __init__(self, recording: Recording) -> None:
        """
        Raises:
            NotCapturable: it changes what it was given, or what forward has made in backward.
        """
        self.recording = recording
        storages = recording.storages
        outside = [*range(recording.num_given), *recording.starts, *recording.constants]
        self._outside = {storages[value] for value in outside}
        self.maker: dict[Value, int] = {}
        self.owner: dict[int, Value] = {}
        self._writers: dict[int, list[int]] = {}
        self._not_stored: set[int] = set()
        content_read: dict[int, int] = {}
        """First call that reads numbers of a storage without writing to it."""
        for place, call in enumerate(recording.calls):
            for value in call.outputs:
                if value is not None:
                    self.maker[value] = place
                    if storages[value] in self._outside:
                        continue
                    if self.owner.setdefault(storages[value], value) != value and not call.is_view:
                        self._not_stored.add(storages[value])
            written = {storages[value] for value in call.writes}
            self._check_writes(place, written)
            if len(written) > 1:
                self._not_stored |= written
            for storage in written:
                self._writers.setdefault(storage, []).append(place)
                if content_read.get(storage, place) < place:
                    self._not_stored.add(storage)
            if call.operator is _AS_STRIDED:
                # It counts from the start of the memory, and a stored tensor comes back elsewhere.
                self._not_stored.add(storages[call.reads[0]])
            if not call.is_view:
                for value in call.reads:
                    if storages[value] not in written:
                        content_read.setdefault(storages[value], place)

    def _check_writes(self, place: int, written: set[int]) -> None:
        name = self.recording.calls[place].operator
        if written & self._outside:
            raise NotCapturable(f"{name} changes in place what the block was given or keeps")
        if place >= self.recording.num_forward:
            made = {s for s in written if self.maker[self.owner[s]] < self.recording.num_forward}
            if made:
                raise NotCapturable(f"{name} changes in backward what forward has made")

    def cut(self, stored: Collection[int], among: Collection[Value] | None = None) -> Cut:
        """Cut where the outputs of these operators (by ordinal) are handed over; `among`: only
        these, which a forward that is over has stored."""
        recording = self.recording
        chosen = {
            storage: found
            for storage, owner in self.owner.items()
            if storage not in self._not_stored
            and (among is None or owner in among)
            and self.maker[owner] < recording.num_forward
            and (found := self._ordinal(storage, stored)) is not None
        }
        gradients = [value for value in recording.gradients if value is not None]
        needed, used = self._required(gradients, chosen)
        outputs = [value for value in recording.outputs if isinstance(value, Value)]
        handed = [self.owner[storage] for storage in used]
        draws = [p for p, c in enumerate(recording.calls[: recording.num_forward]) if c.is_random]
        random = [value for place in draws for value in self._made_by(place)]
        forward, _ = self._required([*outputs, *handed, *random], ())
        again = sorted(place for place in needed if place < recording.num_forward)
        return Cut(
            forward=tuple(sorted(forward)),
            again=tuple(again),
            backward=tuple(sorted(needed - set(again))),
            stored=tuple(
                Stored(
                    value=self.owner[storage],
                    ordinal=chosen[storage],
                    after=self.final(self.owner[storage]),
                    num_bytes=recording.num_bytes[storage],
                )
                for storage in sorted(used)
            ),
            drawn=tuple(
                place
                for place in draws
                if any(recording.storages[value] not in chosen for value in self._made_by(place))
            ),
        )

    def final(self, value: Value) -> int:
        """The call after which a value has its final content; -1 if it was given."""
        writers = self._writers.get(self.recording.storages[value], ())
        return max(self.maker.get(value, -1), *writers, -1)

    def _ordinal(self, storage: int, stored: Collection[int]) -> int | None:
        places = [self.maker[self.owner[storage]], *self._writers.get(storage, ())]
        ordinals = [self.recording.calls[place].ordinal for place in reversed(places)]
        return next((one for one in ordinals if one is not None and one in stored), None)

    def _made_by(self, place: int) -> list[Value]:
        call = self.recording.calls[place]
        return [*(value for value in call.outputs if value is not None), *call.writes]

    def _required(
        self, values: Iterable[Value], at_hand: Collection[int]
    ) -> tuple[set[int], set[int]]:
        """Calls to run so that these values exist, and the storages at hand that this takes."""
        storages, calls = self.recording.storages, self.recording.calls
        to_visit, visited = list(values), set[Value]()
        needed, used = set[int](), set[int]()
        while to_visit:
            value = to_visit.pop()
            if value in visited or value not in self.maker:
                continue
            visited.add(value)
            storage = storages[value]
            places = {self.maker[value]}
            if storage in at_hand:
                used.add(storage)
                if value == self.owner[storage]:
                    continue
            else:
                places.update(self._writers.get(storage, ()))
            for place in places - needed:
                needed.add(place)
                to_visit.extend(calls[place].reads)
        return needed, used
