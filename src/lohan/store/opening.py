"""Making a state store, and taking one over from its last seal.

Owns the order of checks and the undoing of what fails half-way. Called once per run, before
anything else is done with states.
"""

import secrets
import warnings
from collections.abc import Sequence

from lohan.errors import Corrupt
from lohan.ssd import CHUNK_BYTES, DriveId, IoEngine, RunDirectories, Stretch, StripedFile
from lohan.store.files.state_file import STATES_NAME, StateFile, checksum_pieces, homes
from lohan.store.format.layout import StateLayout, refuse_other_layout
from lohan.store.format.residents import SCRATCH_BYTES, ResidentParts, Residents
from lohan.store.format.slots import BlockSlots, SlotCount
from lohan.store.seals.manifest import Manifest, find_manifest
from lohan.store.seals.sealing import SealBook, load_residents, verify_homes
from lohan.store.states import StateStore
from lohan.vocabulary import BlockId


class StateStoreWarning(UserWarning):
    """Something about a store that a user should know and that is no error."""


def create_states(
    run: RunDirectories,
    layout: StateLayout,
    *,
    engine: IoEngine,
    drives: Sequence[DriveId] | None = None,
    weights: Sequence[float] | None = None,
    slot_count: SlotCount = SlotCount.TWO,
    resident_parts: ResidentParts | None = None,
    ram_budget_bytes: int | None = None,
    scratch_bytes: int = SCRATCH_BYTES,
    chunk_bytes: int = CHUNK_BYTES,
    should_verify_reads: bool = True,
) -> StateStore:
    """Reserve the space of a new run, all of it, and lease the RAM of resident parts.

    With `SlotCount.ONE` the first update after a seal overwrites what was sealed: a process that
    ends before the next seal (a crash, a power cut, Ctrl-C) leaves a mix of two steps, which is
    detected and cannot be resumed from. A warning says so.

    Args:
        drives: what `add_drives` gave for this run.
        weights: measured rates of the SSD directories, for their shares.
        ram_budget_bytes: what resident parts and scratch memory may take together.

    Raises:
        OutOfSpace, DoesNotFit: SSD or RAM is too small; nothing is left behind.
    """
    residents = Residents(
        layout,
        resident_parts or {},
        ram_budget_bytes=ram_budget_bytes,
        scratch_bytes=scratch_bytes,
    )
    try:
        wanted = list(homes(layout, slot_count))
        file = StripedFile.create(
            run,
            name=STATES_NAME,
            engine=engine,
            capacity_bytes=sum(nbytes for _, nbytes in wanted),
            weights=weights,
            drives=drives,
            chunk_bytes=chunk_bytes,
        )
        extents = {home: file.allocate(nbytes) for home, nbytes in wanted}
    except BaseException:
        residents.close()
        raise
    store = StateStore(
        file=StateFile(layout, file, extents),
        residents=residents,
        slots=_books(layout, slot_count, None),
        slot_count=slot_count,
        seals=SealBook(run, slot_count=slot_count, store_key=secrets.token_hex(16)),
        should_verify_reads=should_verify_reads,
    )
    if slot_count is SlotCount.ONE:
        try:
            warnings.warn(
                f"run {run.run_id} keeps its states in one slot: if it stops between two seals, "
                "for whatever reason, it cannot be resumed. Keep checkpoints elsewhere, or use two "
                "slots.",
                StateStoreWarning,
                stacklevel=2,
            )
        except BaseException:  # where warnings are errors
            store.close(should_delete=True)
            raise
    return store


def open_states(
    run: RunDirectories,
    *,
    engine: IoEngine,
    layout: StateLayout | None = None,
    drives: Sequence[DriveId] | None = None,
    resident_parts: ResidentParts | None = None,
    ram_budget_bytes: int | None = None,
    scratch_bytes: int = SCRATCH_BYTES,
    should_verify: bool = True,
    should_verify_reads: bool = True,
) -> StateStore:
    """Take over the last seal of a run, after comparing every byte of it with its checksum.

    Which parts are resident may differ from before. A copy of the manifest that is missing, damaged
    or older is written anew, and a warning names it.

    Args:
        layout: that of the model at hand, to be compared with the saved one.
        should_verify: False where the same process has just written or verified the seal.

    Raises:
        CheckpointError: there is no seal, or not of this run, model or format.
        Corrupt: bytes are not those that were sealed; block, part, file and offset are named.
        StorageError: a file is missing, too short, or cannot be read.
    """
    found = find_manifest(run.paths, run.run_id)
    manifest = found.manifest
    if layout is not None:
        refuse_other_layout(manifest.layout, layout)
    residents = Residents(
        manifest.layout,
        resident_parts or {},
        ram_budget_bytes=ram_budget_bytes,
        scratch_bytes=scratch_bytes,
    )
    striped = None
    try:
        striped = StripedFile.attach(
            run,
            name=STATES_NAME,
            layout=manifest.stripe,
            extents=tuple(manifest.extents.values()),
            checksums=_stretches(manifest),
            engine=engine,
            drives=drives,
        )
        file = StateFile(manifest.layout, striped, dict(manifest.extents))
        seals = SealBook(
            run, slot_count=manifest.slot_count, store_key=manifest.store_key, last=manifest
        )
        slots = _books(manifest.layout, manifest.slot_count, manifest)
        _take_over(file, residents, slots, manifest, should_verify=should_verify)
        if found.remarks:
            # Before any slot an older copy points at is written.
            seals.write_again()
            warnings.warn(
                f"run {run.run_id}: {'; '.join(found.remarks)}. Seal {manifest.seal_number} "
                f"(step {manifest.step}) was taken, every byte of it is verified, and the copies "
                "of its manifest are whole again.",
                StateStoreWarning,
                stacklevel=2,
            )
    except BaseException:
        if striped is not None:
            striped.close()
        residents.close()
        raise
    return StateStore(
        file=file,
        residents=residents,
        slots=slots,
        slot_count=manifest.slot_count,
        seals=seals,
        should_verify_reads=should_verify_reads,
    )


def _stretches(manifest: Manifest) -> list[Stretch]:
    """Checksums as the file keeps them: apart, each on one drive, so that damage is found there."""
    chunk_bytes = manifest.stripe.chunk_bytes
    return [
        Stretch(offset_bytes=piece.offset_bytes, nbytes=piece.nbytes, checksum=checksum)
        for home, found in manifest.checksums.items()
        for piece, checksum in zip(
            checksum_pieces(manifest.extents[home], chunk_bytes), found, strict=True
        )
    ]


def _take_over(
    file: StateFile,
    residents: Residents,
    slots: dict[BlockId, BlockSlots],
    manifest: Manifest,
    *,
    should_verify: bool,
) -> None:
    try:
        on_ssd = [
            (block, slot, part)
            for block, slot, part in manifest.sealed_homes()
            if residents.find(block, part) is None
        ]
        if should_verify:
            verify_homes(file, residents, on_ssd)
        load_residents(file, residents, slots)
    except Corrupt as error:
        if manifest.slot_count is SlotCount.ONE:
            raise error.retold(
                why="the run keeps one slot per block, so an update that was going on when it "
                "stopped has overwritten what was sealed (or a drive changed bytes)",
                remedy="start from a checkpoint elsewhere; use two slots to be able to resume",
            ) from None
        raise


def _books(
    layout: StateLayout, slot_count: SlotCount, manifest: Manifest | None
) -> dict[BlockId, BlockSlots]:
    return {
        BlockId(number): BlockSlots(
            block, slot_count, sealed_slot=manifest.slots[number] if manifest else None
        )
        for number, block in enumerate(layout.blocks)
    }
