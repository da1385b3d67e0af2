"""Swapped operator outputs: from a RAM buffer to SSD during forward, and back before backward.

Owns the SSD room, reserved once and used anew every step, and where each output lies. The buffers
are the caller's. Which outputs are swapped is the plan's choice. Nothing here survives the process.
Called by `lanes`.
"""

import errno
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lohan.errors import StorageError, bug
from lohan.ssd import (
    CHUNK_BYTES,
    DriveId,
    Extent,
    IoEngine,
    Priority,
    RunDirectories,
    StripedFile,
    StripedTicket,
    add_drives,
    whole_pages,
)
from lohan.ssd.stripe_files import file_name
from lohan.store.files.tickets import RamBuffer, StoreCounters, StoreTicket, Tally, checked_memory
from lohan.vocabulary import BlockId

ACTIVATIONS_NAME = "activations"


@dataclass(frozen=True, slots=True, order=True)
class SwapKey:
    """Which output: of which operator, in which block, micro-batch and step."""

    step: int
    micro_batch: int
    block: BlockId
    operator: int
    """Ordinal of the operator in the block's forward."""

    def __str__(self) -> str:
        return (
            f"output {self.operator} of block {self.block} (micro-batch {self.micro_batch}, step "
            f"{self.step})"
        )


class SwapFile:
    """Bytes by key. All methods: any thread; only `close` and waiting for tickets may block.

    Args:
        capacity_bytes: SSD room for all outputs that are swapped at one time, in whole pages.

    Raises:
        OutOfSpace, StorageError: there is no room; nothing is left behind.
    """

    def __init__(
        self,
        run: RunDirectories,
        *,
        engine: IoEngine,
        capacity_bytes: int,
        drives: Sequence[DriveId] | None = None,
        weights: Sequence[float] | None = None,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        drives = add_drives(engine, run.paths) if drives is None else drives
        _remove_leftover(run, engine, drives)
        self._file = StripedFile.create(
            run,
            name=ACTIVATIONS_NAME,
            engine=engine,
            capacity_bytes=capacity_bytes,
            weights=weights,
            drives=drives,
            chunk_bytes=chunk_bytes,
        )
        self._tally = Tally()
        self._lock = threading.Lock()
        self._extents: dict[SwapKey, tuple[Extent, int]] = {}

    @property
    def counters(self) -> StoreCounters:
        """SSD traffic so far."""
        return self._tally.counters

    def start_put(
        self,
        key: SwapKey,
        memory: RamBuffer,
        nbytes: int,
        *,
        offset_bytes: int = 0,
        priority: Priority = Priority.WRITE_BACK,
    ) -> StoreTicket:
        """Write an output to SSD. May block: no.

        Owns until: the ticket was waited for, the memory's pages are the store's.

        Raises:
            OutOfSpace: the reserved room is used up.
            ScheduleError: the key is in use, or the memory too small.
        """
        checked_memory(str(key), memory, offset_bytes, whole_pages(nbytes))
        with self._lock:
            if key in self._extents:
                raise bug(f"{key} was put twice")
            extent = self._file.allocate(nbytes)
            self._extents[key] = extent, nbytes
        try:
            striped = self._file.start_write(
                extent,
                address=memory.address + offset_bytes,
                nbytes=extent.nbytes,
                priority=priority,
                what=str(key),
            )
        except BaseException:
            self.drop(key)
            raise
        self._tally.add(written_bytes=extent.nbytes)
        return _ticket(key, memory, offset_bytes, nbytes, striped)

    def start_get(
        self,
        key: SwapKey,
        memory: RamBuffer,
        *,
        offset_bytes: int = 0,
        priority: Priority = Priority.PREFETCH,
    ) -> StoreTicket:
        """Read an output back, compared with its checksum. May block: no.

        The put must have been waited for. Owns until: the ticket was waited for, the memory's
        pages are the store's.
        """
        with self._lock:
            extent, nbytes = self._find(key)
        checked_memory(str(key), memory, offset_bytes, extent.nbytes)
        striped = self._file.start_read(
            extent,
            address=memory.address + offset_bytes,
            nbytes=extent.nbytes,
            priority=priority,
            should_verify=True,
            what=str(key),
        )
        self._tally.add(read_bytes=extent.nbytes, verified_bytes=extent.nbytes)
        return _ticket(key, memory, offset_bytes, nbytes, striped)

    def drop(self, key: SwapKey) -> None:
        """Forget an output; its requests must have been waited for. May block: no."""
        with self._lock:
            extent, _ = self._find(key)
            self._file.free(extent)
            del self._extents[key]

    def close(self) -> None:
        """Finish what was started and delete the file. Twice is fine."""
        self._file.close(should_delete=True)
        with self._lock:
            self._extents.clear()

    def _find(self, key: SwapKey) -> tuple[Extent, int]:
        if key not in self._extents:
            raise bug(f"{key} was asked for, but was never put, or was dropped")
        return self._extents[key]


def _ticket(
    key: SwapKey, memory: RamBuffer, offset_bytes: int, nbytes: int, striped: StripedTicket
) -> StoreTicket:
    return StoreTicket(
        memory=memory,
        offset_bytes=offset_bytes,
        num_elements=nbytes,
        dtype=torch.uint8,
        key=key,
        striped=striped,
    )


def _remove_leftover(run: RunDirectories, engine: IoEngine, drives: Sequence[DriveId]) -> None:
    """Remove what a killed process of the same run left."""
    # The directories are this run's and locked, so the leftover is ours and nobody uses it.
    for directory, drive in zip(run.paths, drives, strict=True):
        for number in range(len(run.paths)):
            path = os.path.join(directory, file_name(ACTIVATIONS_NAME, number))
            try:
                engine.remove_file(engine.open_file(path, drive=drive))
            except StorageError as error:
                if error.errno != errno.ENOENT:
                    raise
