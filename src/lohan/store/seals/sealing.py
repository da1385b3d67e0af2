"""The steps of a seal: resident parts to SSD, the books to a manifest, manifests to the drives.

Owns the numbering of seals and the last manifest. The order of the steps, and what a failed one
means, is in `states`. Used by `states` and `opening`.
"""

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from lohan.durable_files import sync_directory
from lohan.errors import CheckpointError, ConfigError, RankLost
from lohan.ssd import Buffer, RunDirectories
from lohan.ssd.engines.storage_errors import storage_errors
from lohan.store.files.state_file import Home, StateFile, home_of
from lohan.store.format.layout import ByteRange
from lohan.store.format.residents import Residents
from lohan.store.format.slots import BlockSlots, BlockState, SlotCount
from lohan.store.seals.manifest import (
    Manifest,
    prepare_copies,
    remove_manifests,
    replace_manifests,
    sealed_homes,
)
from lohan.vocabulary import BlockId

Agree = Callable[[Callable[[], Manifest]], Manifest]
"""Gets what prepares a seal, and returns once every rank has done so and it is on record."""


def due_residents(
    residents: Residents, slots: Mapping[BlockId, BlockSlots]
) -> Iterator[tuple[Home, Buffer]]:
    """Resident parts that have changed since the last seal, each with where the next writes it."""
    for block, part, buffer in residents.all():
        books = slots[block]
        is_due = not part.is_frozen or books.sealed_slot is None
        if books.state is BlockState.AHEAD and is_due:
            yield home_of(block, part, books.current_slot), buffer


def write_residents(
    file: StateFile, residents: Residents, slots: Mapping[BlockId, BlockSlots]
) -> None:
    """Write resident parts that have changed since the last seal to their working slots. Blocks.

    Raises:
        StorageError: a write failed; all are over.
    """
    writes = []
    errors = []
    try:
        for home, buffer in due_residents(residents, slots):
            where = ByteRange(offset_bytes=0, nbytes=buffer.nbytes)
            writes.append((home, file.start_write(home, where, address=buffer.address)))
    finally:
        for home, ticket in writes:
            errors.append(file.settle(ticket, file.describe(home)))
    for error in errors:
        if error is not None:
            raise error


def load_residents(
    file: StateFile, residents: Residents, slots: Mapping[BlockId, BlockSlots]
) -> None:
    """Read the sealed values of resident parts, and verify them. May block: yes.

    Raises:
        Corrupt, StorageError: naming block and part.
    """
    for block, part, buffer in residents.all():
        home = home_of(block, part, slots[block].current_slot)
        where = ByteRange(offset_bytes=0, nbytes=buffer.nbytes)
        ticket = file.start_read(home, where, address=buffer.address, should_verify=True)
        error = file.settle(ticket, file.describe(home))
        if error is not None:
            raise error


def verify_homes(file: StateFile, residents: Residents, wanted: Iterable[Home]) -> None:
    """Compare extents with their checksums. May block: yes.

    Raises:
        Corrupt: naming block, part, file and offset.
    """
    with residents.scratch() as scratch:
        for home in wanted:
            file.verify(home, address=scratch.address, nbytes=scratch.nbytes)


def verifiable_homes(
    file: StateFile,
    residents: Residents,
    slots: Mapping[BlockId, BlockSlots],
    last: Manifest | None,
) -> tuple[Home, ...]:
    """Extents of the last seal; without one that is kept apart, whole ones of current values."""
    if last is not None and last.slot_count is SlotCount.TWO:
        return last.sealed_homes()
    current = tuple(books.current_slot for books in slots.values())
    return tuple(
        home
        for home in sealed_homes(file.layout, current)
        if _is_whole_on_ssd(file, residents, slots, home)
    )


def _is_whole_on_ssd(
    file: StateFile, residents: Residents, slots: Mapping[BlockId, BlockSlots], home: Home
) -> bool:
    block, _, part = home
    state = slots[block].state
    is_ahead_on_ssd = state is BlockState.AHEAD and residents.find(block, part) is None
    return (state is BlockState.SEALED or is_ahead_on_ssd) and (file.checksums_of(home) is not None)


class SealBook:
    """The seals of one run: the last one, and how the next one is made. One caller at a time."""

    def __init__(
        self,
        run: RunDirectories,
        *,
        slot_count: SlotCount,
        store_key: str,
        last: Manifest | None = None,
    ) -> None:
        self.last = last
        # Why nothing may be updated or sealed any more, if so.
        self._failure: str | None = None
        self._directories = run.paths
        self._run_id = run.run_id
        self._store_key = store_key
        self._slot_count = slot_count

    def refuse_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Refuse what cannot be written, before anything is.

        Raises:
            ConfigError: the metadata is not plain JSON.
        """
        try:
            is_same = json.loads(json.dumps(metadata, allow_nan=False)) == dict(metadata)
            problem = "" if is_same else "it would not be read back as it is"
        except (TypeError, ValueError, RecursionError) as error:
            problem = str(error)
        if problem:
            raise ConfigError(
                f"the metadata of a seal cannot be written as JSON ({problem})",
                why="a manifest is plain JSON: texts as keys, no tuples, no NaN",
                remedy="give texts, finite numbers, lists and mappings",
            )

    def refuse_if_failed(self) -> None:
        """Refuse to go on after a seal that may or may not have happened.

        Raises:
            CheckpointError: the run has to be opened again.
        """
        if self._failure is not None:
            raise CheckpointError(
                f"the states can neither be updated nor sealed any more: {self._failure}",
                why="what is on the drives may be this seal or the one before",
                remedy="close the run and open it again: it continues from its last whole seal",
            )

    def seal(
        self,
        file: StateFile,
        residents: Residents,
        slots: Mapping[BlockId, BlockSlots],
        *,
        step: int,
        metadata: Mapping[str, Any],
        agree: Agree | None = None,
    ) -> Manifest:
        """Carry out a seal; see `StateStore.seal`. May block: yes."""

        def prepare() -> Manifest:
            self.refuse_metadata(metadata)
            try:
                write_residents(file, residents, slots)
                file.flush()
                manifest = self._next_manifest(file, slots, step, metadata)
            except BaseException as error:
                # After a failed flush nobody knows which of the bytes written before it are there.
                self._failure = f"a seal failed: {error}"
                raise
            self.prepare(manifest.to_text())
            return manifest

        try:
            manifest = prepare() if agree is None else agree(prepare)
        except RankLost as error:
            # Whether all have prepared is not known here; the record of the first rank tells.
            self._failure = f"a seal was interrupted: {error}"
            raise
        try:
            replace_manifests(self._directories)
            self.last = manifest
            for books in slots.values():
                books.seal()
        except BaseException as error:
            # This seal may be the one on disk: neither slot of a block may be written any more.
            self._failure = f"a seal was interrupted: {error}"
            raise
        return manifest

    def _next_manifest(
        self,
        file: StateFile,
        slots: Mapping[BlockId, BlockSlots],
        step: int,
        metadata: Mapping[str, Any],
    ) -> Manifest:
        current = tuple(books.current_slot for books in slots.values())
        checksums = {}
        for home in sealed_homes(file.layout, current):
            found = file.checksums_of(home)
            if found is None:
                raise CheckpointError(
                    f"{file.describe(home)} has no checksum for all of its bytes",
                    why="it was not wholly written, so it cannot be sealed",
                    remedy="open the run again: it continues from its last seal; this is a "
                    "mistake in lohan",
                )
            checksums[home] = found
        return Manifest(
            run_id=self._run_id,
            store_key=self._store_key,
            seal_number=self.last.seal_number + 1 if self.last is not None else 1,
            step=step,
            metadata=dict(metadata),
            directories=self._directories,
            slot_count=self._slot_count,
            layout=file.layout,
            stripe=file.stripe,
            extents=file.extents,
            slots=current,
            checksums=checksums,
        )

    def prepare(self, text: str) -> None:
        """Write a manifest beside the old one, everywhere. May block: yes.

        Raises:
            OutOfSpace, StorageError: it could not be written; nothing has changed.
        """
        if self.last is None:
            # The names of the run directories themselves are as new as the first seal.
            for directory in self._directories:
                parent = os.path.dirname(directory)
                with (
                    storage_errors("an SSD directory could not be flushed", parent),
                    # A directory that may be written to but not listed cannot be flushed.
                    contextlib.suppress(PermissionError),
                ):
                    sync_directory(parent)
        prepare_copies(self._directories, text)

    def write_again(self) -> None:
        """Write the last manifest to every directory, where copies were missing or older."""
        assert self.last is not None
        self.prepare(self.last.to_text())
        replace_manifests(self._directories)

    def remove(self) -> None:
        """Delete the manifests: first of all, so that none points at states that are gone."""
        remove_manifests(self._directories)
