"""What a seal leaves behind: the page that says which bytes are the state, and of which step.

Owns the manifest's content, its JSON form with its own checksum, writing copies of it so that a
reader finds the old one or the new one and nothing else, and finding the newest copy again. The
format is described in docs/on-disk-format.md. Used by `states`.
"""

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lohan.durable_files import sync_directory, write_new
from lohan.errors import CheckpointError, ConfigError, StorageError
from lohan.fields import convert
from lohan.ssd import Extent, StripeLayout
from lohan.ssd.checksums import ALGORITHM, checksum_memory
from lohan.ssd.engines.storage_errors import storage_errors
from lohan.ssd.layout import StripeFile, damaged_fields
from lohan.store.files.state_file import STATES_NAME, Home, checksum_pieces, home_of, homes
from lohan.store.format.layout import LayoutFile, StateLayout
from lohan.store.format.parts import Part
from lohan.store.format.slots import SlotCount
from lohan.vocabulary import BlockId

MANIFEST_NAME = "manifest.json"
TEMPORARY_NAME = "manifest.json.tmp"
COMMIT_NAME = "commit.json"
NAMES = (MANIFEST_NAME, TEMPORARY_NAME, COMMIT_NAME, f".{COMMIT_NAME}.tmp")
"""Of all files that a seal writes beside the states."""
FORMAT = "lohan-states"
FORMAT_VERSION = 1
_CHECKSUM_MARK = ', "checksum": '


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """One seal: the whole state of one step."""

    run_id: str
    store_key: str
    """Made at random with the store: two runs of the same name have different ones."""
    seal_number: int
    """Counted from 1; the highest one is the newest."""
    step: int
    metadata: Mapping[str, Any]
    """The caller's own, untouched."""
    directories: tuple[str, ...]
    """Run directories at the time of the seal, to name a missing one. They may move."""
    slot_count: SlotCount
    layout: StateLayout
    stripe: StripeLayout
    extents: Mapping[Home, Extent]
    slots: tuple[int, ...]
    """The sealed slot of each block."""
    checksums: Mapping[Home, tuple[int, ...]]
    """Of every sealed extent: one per piece of `checksum_pieces`."""

    def sealed_homes(self) -> tuple[Home, ...]:
        """The extents that hold the sealed state."""
        return sealed_homes(self.layout, self.slots)

    def to_text(self) -> str:
        """The JSON text of the file; its last field is the checksum of the rest."""
        blocks = []
        for number, block in enumerate(self.layout.blocks):
            parts: dict[str, Any] = {}
            for part in block.parts:
                slots = range(1 if part.is_frozen else self.slot_count)
                extents = [self.extents[BlockId(number), slot, part] for slot in slots]
                sealed = home_of(BlockId(number), part, self.slots[number])
                parts[part.value] = {
                    "extents": [[extent.offset_bytes, extent.nbytes] for extent in extents],
                    "checksums": list(self.checksums[sealed]),
                }
            blocks.append({"slot": self.slots[number], "parts": parts})
        fields = {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            "run_id": self.run_id,
            "store_key": self.store_key,
            "seal_number": self.seal_number,
            "step": self.step,
            "metadata": self.metadata,
            "directories": list(self.directories),
            "slot_count": int(self.slot_count),
            "file": {
                "name": STATES_NAME,
                "stripe": self.stripe.to_json(),
                "checksum_algorithm": ALGORITHM,
            },
            "layout": self.layout.to_json(),
            "blocks": blocks,
        }
        text = json.dumps(fields, allow_nan=False)
        return f"{text[:-1]}{_CHECKSUM_MARK}{_checksum(text)}}}\n"

    @classmethod
    def from_text(cls, text: str) -> "Manifest":
        """Read what `to_text` gave.

        Raises:
            NewerFormat: another version of the format.
            CheckpointError: it is damaged.
        """
        # Every version of the format ends with the checksum in this form, so that a damaged
        # version number is told from a newer one.
        head, mark, tail = text.rpartition(_CHECKSUM_MARK)
        try:
            if not mark or int(tail.removesuffix("}\n")) != _checksum(head + "}"):
                raise ValueError("its checksum is missing or does not match")
            fields = json.loads(head + "}")
            if fields["format"] != FORMAT:
                raise ValueError(f'"format" is {fields["format"]!r}, not {FORMAT!r}')
            if fields["version"] != FORMAT_VERSION:
                raise NewerFormat(
                    f"a manifest has version {fields['version']!r} of the format",
                    why=f"this lohan reads version {FORMAT_VERSION}",
                    remedy="use the lohan that wrote it",
                )
            return _from_fields(fields)
        except (KeyError, TypeError, ValueError, IndexError, RecursionError, ConfigError) as error:
            raise damaged_fields("manifest", error) from None


class NewerFormat(CheckpointError):
    """A manifest of another version of the format: not damaged, and not ours to judge."""


def sealed_homes(layout: StateLayout, slots: Sequence[int]) -> tuple[Home, ...]:
    """Extents that hold the state when block k is in `slots[k]`."""
    return tuple(
        home_of(BlockId(number), part, slots[number])
        for number, block in enumerate(layout.blocks)
        for part in block.parts
    )


def _checksum(text: str) -> int:
    content = np.frombuffer(text.encode(), dtype=np.uint8)
    return checksum_memory(content.ctypes.data, content.size)


@dataclass(frozen=True, slots=True, kw_only=True)
class _PartInFile:
    extents: tuple[tuple[int, int], ...]
    checksums: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _BlockInFile:
    slot: int
    parts: dict[Part, _PartInFile]


@dataclass(frozen=True, slots=True, kw_only=True)
class _StatesInFile:
    name: str
    stripe: StripeFile
    checksum_algorithm: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestFile:
    """A manifest as its file holds it, but for the version and the checksum."""

    format: str
    run_id: str
    store_key: str
    seal_number: int
    step: int
    metadata: dict[str, Any]
    directories: tuple[str, ...]
    slot_count: SlotCount
    file: _StatesInFile
    layout: LayoutFile
    blocks: tuple[_BlockInFile, ...]


def _from_fields(fields: Mapping[str, Any]) -> Manifest:
    layout = StateLayout.from_json(fields["layout"])
    stripe = StripeLayout.from_json(fields["file"]["stripe"])
    file = convert(fields, ManifestFile, where="manifest")
    if file.file.name != STATES_NAME or file.file.checksum_algorithm != ALGORITHM:
        raise ValueError(f"unknown file {fields['file']!r}")
    slots = tuple(block.slot for block in file.blocks)
    if len(slots) != len(layout.blocks) or not all(0 <= slot < file.slot_count for slot in slots):
        raise ValueError("blocks and layout differ")
    extents: dict[Home, Extent] = {}
    for home, nbytes in homes(layout, file.slot_count):
        block, slot, part = home
        offset_bytes, found_bytes = file.blocks[block].parts[part].extents[slot]
        if found_bytes != nbytes:
            raise ValueError(f"{part} of block {block} has {found_bytes} bytes, not {nbytes}")
        extents[home] = Extent(offset_bytes=offset_bytes, nbytes=nbytes)
    checksums: dict[Home, tuple[int, ...]] = {}
    for home in sealed_homes(layout, slots):
        block, _, part = home
        found = file.blocks[block].parts[part].checksums
        if len(found) != sum(1 for _ in checksum_pieces(extents[home], stripe.chunk_bytes)):
            raise ValueError(f"{part} of block {block} has {len(found)} checksums")
        checksums[home] = found
    return Manifest(
        run_id=file.run_id,
        store_key=file.store_key,
        seal_number=file.seal_number,
        step=file.step,
        metadata=file.metadata,
        directories=file.directories,
        slot_count=file.slot_count,
        layout=layout,
        stripe=stripe,
        extents=extents,
        slots=slots,
        checksums=checksums,
    )


class CopiesInDoubt(StorageError):
    """Some copies may be the new manifest, some the old one: which is sealed is not known."""


def prepare_copies(directories: Sequence[str], text: str) -> None:
    """Write a new manifest beside the old one in every directory, durably. May block: yes.

    Raises:
        OutOfSpace, StorageError: one could not be written; all are removed again.
    """
    written = []
    try:
        for directory in directories:
            path = os.path.join(directory, TEMPORARY_NAME)
            written.append(path)
            with storage_errors("a manifest could not be written", path):
                write_new(path, text.encode())
    except BaseException:
        for path in written:
            with contextlib.suppress(OSError):
                os.unlink(path)
        raise


def replace_manifests(directories: Sequence[str]) -> None:
    """Put what `prepare_copies` wrote in the place of the old manifests. May block: yes.

    A process that ends at any instant leaves the old manifest or the new one in every directory.

    Raises:
        CopiesInDoubt: a directory failed; others may have the new manifest already.
    """
    try:
        for directory in directories:
            path = os.path.join(directory, MANIFEST_NAME)
            with storage_errors("a manifest could not be replaced", path):
                os.replace(os.path.join(directory, TEMPORARY_NAME), path)
                sync_directory(directory)
    except StorageError as error:
        raise CopiesInDoubt(
            error.what,
            why=f"{error.why}; some directories may hold the new manifest and some the old one",
            remedy="mend the drive, then open the run again: the newest whole manifest is taken",
        ) from None


def remove_manifests(directories: Sequence[str]) -> None:
    """Delete the manifests of a run that is being deleted. Twice is fine."""
    for directory in directories:
        for name in NAMES:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(directory, name))
