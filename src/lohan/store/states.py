"""The states of all blocks, in RAM and on SSD, sealed as one from time to time.

Owns the state file, the resident parts and the books of every block's slots, and with them the
promise that what was sealed is never overwritten. Knows tensors and blocks, no schedule: when to
read, update and seal is the caller's. Called by `lanes` and by checkpoints.
"""

import ctypes
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from types import TracebackType
from typing import Any

import torch

from lohan.errors import StorageError
from lohan.ssd import Buffer, Priority, StripedTicket
from lohan.store.files.state_file import Home, StateFile, home_of
from lohan.store.files.tickets import (
    RamBuffer,
    StoreCounters,
    StoreTicket,
    checked_memory,
    dtype_of,
    wait_for,
)
from lohan.store.format.layout import ByteRange, Part
from lohan.store.format.residents import Residents
from lohan.store.format.slots import BlockSlots, BlockState, SlotCount
from lohan.store.initial import Moments, fill_states, verify_fill
from lohan.store.masters import read_masters, read_moments
from lohan.store.seals.manifest import Manifest
from lohan.store.seals.sealing import (
    Agree,
    SealBook,
    WholeStoreTurn,
    due_residents,
    verifiable_homes,
    verify_homes,
)
from lohan.vocabulary import BlockId


class StateStore:
    """Parts of blocks by position. Made by `create_states` and `open_states`; close it.

    All methods: run on any thread. `finish_update`, `fill`, `seal`, `verify`, `close`, reading
    masters and waiting for tickets may block. See the note "slots of a block" for what may follow
    what.
    """

    def __init__(
        self,
        *,
        file: StateFile,
        residents: Residents,
        slots: Mapping[BlockId, BlockSlots],
        slot_count: SlotCount,
        seals: SealBook,
        should_verify_reads: bool,
    ) -> None:
        self.layout = file.layout
        self.slot_count = slot_count
        self._file = file
        self._residents = residents
        self._slots = dict(slots)
        self._seals = seals
        self._should_verify_reads = should_verify_reads
        self._lock = threading.Lock()
        self._writes: dict[BlockId, list[StoreTicket]] = {block: [] for block in self._slots}
        self._turn = WholeStoreTurn()

    @property
    def sealed(self) -> Manifest | None:
        """The last seal: its step, its metadata."""
        return self._seals.last

    @property
    def counters(self) -> StoreCounters:
        """SSD traffic so far."""
        return self._file.tally.counters

    @property
    def due_bytes(self) -> int:
        """What a seal would write now: parts in RAM that have changed."""
        with self._lock:
            due = due_residents(self._residents, self._slots)
            return sum(buffer.nbytes for _, buffer in due)

    @property
    def ram_peak_bytes(self) -> int:
        """Most RAM ever leased."""
        return self._residents.peak_bytes

    @property
    def paths(self) -> tuple[str, ...]:
        """The file of each drive."""
        return self._file.file.paths

    @property
    def resident_regions(self) -> tuple[tuple[int, int], ...]:
        """Address and bytes of every resident part: what to pin."""
        return tuple((buffer.address, buffer.nbytes) for _, _, buffer in self._residents.all())

    def state_of(self, block: BlockId) -> BlockState:
        """See the note "slots of a block"."""
        with self._lock:
            return self._books_of(block).state

    def is_resident(self, block: BlockId, part: Part) -> bool:
        """Whether a part lives in RAM."""
        return self._residents.find(block, part) is not None

    def resident_buffer(self, block: BlockId, part: Part) -> Buffer | None:
        """The store's own memory of a part that lives in RAM, to be read and updated in place."""
        return self._residents.find(block, part)

    def dtype_of(self, part: Part) -> torch.dtype:
        """Of the elements of a part."""
        return dtype_of(part, self.layout.compute_format)

    def start_read(
        self,
        block: BlockId,
        part: Part,
        begin: int,
        end: int,
        memory: RamBuffer | None = None,
        *,
        offset_bytes: int = 0,
        priority: Priority = Priority.PREFETCH,
    ) -> StoreTicket:
        """Read positions [begin, end) of a part, as they were before an update that is going on.

        A resident part needs no memory: its ticket is done and shows the store's own, which an
        update changes in place (and then gives to `start_write`).

        May block: no. Owns until: the ticket was waited for, the memory's pages are the store's.

        Raises:
            ScheduleError: the range, the memory or the moment is wrong.
            CheckpointError: the block is torn.
        """
        where = self.layout.block(block).byte_range(part, begin, end)
        with self._lock:
            books = self._books_of(block)
            books.refuse_read(part, begin, end)
            home = home_of(block, part, books.current_slot)
        resident = self._residents.find(block, part)
        if resident is not None:
            return self._ticket(home, begin, end, resident, where.offset_bytes)
        memory = checked_memory(self._file.describe(home), memory, offset_bytes, where.nbytes)
        striped = self._file.start_read(
            home,
            where,
            address=memory.address + offset_bytes,
            priority=priority,
            should_verify=self._should_verify_reads,
            what=self._words(home, begin, end),
        )
        return self._ticket(home, begin, end, memory, offset_bytes, striped)

    def begin_update(self, block: BlockId) -> None:
        """Say that every part of a block is about to be written. May block: no.

        Raises:
            ScheduleError: the block is empty, frozen or being updated, or a seal is going on.
            CheckpointError: the block is torn, or a seal failed.
        """
        with self._lock:
            self._seals.refuse_if_failed()
            self._turn.refuse_update(block)
            self._books_of(block).begin_update()

    def start_write(
        self,
        block: BlockId,
        part: Part,
        begin: int,
        end: int,
        memory: RamBuffer,
        *,
        offset_bytes: int = 0,
        priority: Priority = Priority.WRITE_BACK,
    ) -> StoreTicket:
        """Write positions [begin, end) of a part to the block's working slot.

        For a resident part the ticket is done at once; memory that is the part's own is taken as
        it is, other memory is copied. Bytes behind the last position of a part are made zero.

        May block: no. Owns until: the ticket was waited for, the memory's pages are the store's
        and must not change.

        Raises:
            ScheduleError: no update is going on, or the range was written by it before.
        """
        where = self.layout.block(block).byte_range(part, begin, end)
        with self._lock:
            books = self._books_of(block)
            home = home_of(block, part, books.working_slot)
            checked_memory(self._file.describe(home), memory, offset_bytes, where.nbytes)
            books.enter_write(part, begin, end)
        try:
            ticket = self._start_entered_write(
                home, begin, end, where, memory, offset_bytes, priority
            )
        except BaseException as error:
            with self._lock:
                books.tear(f"a write of {part} could not be started ({type(error).__name__})")
            raise
        finally:
            with self._lock:
                books.end_start()
        return ticket

    def _start_entered_write(
        self,
        home: Home,
        begin: int,
        end: int,
        where: ByteRange,
        memory: RamBuffer,
        offset_bytes: int,
        priority: Priority,
    ) -> StoreTicket:
        block, _, part = home
        address = memory.address + offset_bytes
        used_bytes = (end - begin) * part.bytes_per_parameter
        ctypes.memset(address + used_bytes, 0, where.nbytes - used_bytes)
        resident = self._residents.find(block, part)
        if resident is not None:
            inside = resident.address + where.offset_bytes
            if inside != address:
                ctypes.memmove(inside, address, where.nbytes)
            return self._ticket(home, begin, end, resident, where.offset_bytes)
        what = self._words(home, begin, end)
        striped = self._file.start_write(home, where, address=address, priority=priority, what=what)
        ticket = self._ticket(
            home, begin, end, memory, offset_bytes, striped, partial(self._end_write, block)
        )
        with self._lock:
            self._writes[block].append(ticket)
        return ticket

    def _end_write(self, block: BlockId, ticket: StoreTicket, error: StorageError | None) -> None:
        """A write was waited for, for the first time or again."""
        with self._lock:
            if ticket in self._writes[block]:
                self._writes[block].remove(ticket)
                if error is not None:
                    self._books_of(block).tear(f"a write failed: {error.what}")

    def finish_update(self, block: BlockId) -> None:
        """Wait for the writes of an update: from now on reads give its values. May block: yes.

        Raises:
            StorageError: a write failed; the block is torn.
            ScheduleError: a range of a part was not written; the block is torn.
        """
        with self._lock:
            writes = tuple(self._writes[block])
        wait_for(writes)
        with self._lock:
            self._books_of(block).finish_update()

    def fill(
        self,
        tensors: Iterable[tuple[str, torch.Tensor]],
        *,
        moments: Moments | None = None,
        should_verify: bool = True,
    ) -> None:
        """Take in the first values: every tensor once, in any order, one in RAM at a time.

        fp32, bf16 and fp16 are taken; masters are exact, moments zero or as given by name. Not
        sealed by this. What was written is read back and compared, unless that is not wanted.

        Raises:
            ConfigError: a name is unknown, twice or missing, or a shape or type is wrong; the store
                is as empty as before and can be filled again.
            StorageError: a write failed, or Corrupt: a drive changed bytes; likewise.
        """
        with self._lock:
            for books in self._slots.values():
                books.refuse_fill()
        with self._residents.scratch() as scratch:
            fill_states(self._file, self._residents, tensors, scratch, moments)
            if should_verify:
                verify_fill(self._file, self._residents, scratch)
        with self._lock:
            for books in self._slots.values():
                books.finish_fill()

    def masters(self, *, are_frozen_wanted: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor's name and fp32 master (frozen ones widened), block by block, streaming."""
        with self._residents.scratch() as scratch:
            yield from read_masters(self, scratch, are_frozen_wanted=are_frozen_wanted)

    def moments(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """Name, first and second moment of every trainable tensor, streaming."""
        with self._residents.scratch() as scratch:
            yield from read_moments(self, scratch)

    def seal(
        self,
        *,
        step: int,
        metadata: Mapping[str, Any] | None = None,
        agree: Agree | None = None,
    ) -> Manifest:
        """Make the current state of all blocks the one a later `open_states` finds. Blocks.

        Parts in RAM are written, files flushed, and the manifest replaced in every directory. A
        process that ends at any instant of it leaves this seal or the one before, whole. Among
        ranks `agree` comes between preparing a seal and taking it.

        Raises:
            CheckpointError: a block is torn or empty, or an earlier seal failed.
            ScheduleError: an update is going on.
            ConfigError: the metadata is not plain JSON; can be tried again.
            OutOfSpace, StorageError: the seal before is still the one. If only writing the
                manifest failed it can be tried again, else the run has to be opened again.
            CopiesInDoubt: this seal or the one before; opening the run tells.
        """
        with self._turn.taken("a seal", should_bar_updates=True):
            with self._lock:
                self._seals.refuse_if_failed()
                for books in self._slots.values():
                    books.refuse_seal()
            return self._seals.seal(
                self._file,
                self._residents,
                self._slots,
                step=step,
                metadata=metadata or {},
                agree=agree,
            )

    def verify(self) -> None:
        """Compare every byte of the last seal with its checksum. May block: yes.

        With two slots updates may go on meanwhile. Without a seal, or with one slot, the bytes are
        those of the current values on SSD, and no update may begin.

        Raises:
            Corrupt: naming block, part, file and offset.
            ScheduleError: a seal is going on, or scratch memory is in use.
        """
        is_beside_updates = self.sealed is not None and self.slot_count is SlotCount.TWO
        with self._turn.taken("a verification", should_bar_updates=not is_beside_updates):
            with self._lock:
                wanted = verifiable_homes(self._file, self._residents, self._slots, self.sealed)
            verify_homes(self._file, self._residents, wanted)

    def close(self, *, should_delete: bool = False) -> None:
        """Finish what was started and let everything go; delete the run's states if asked.

        What was not sealed is lost. Twice is fine. May block: yes.
        """
        if should_delete:
            self._seals.remove()
        self._file.file.close(should_delete=should_delete)
        self._residents.close()

    def __enter__(self) -> "StateStore":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _books_of(self, block: BlockId) -> BlockSlots:
        self.layout.block(block)
        return self._slots[block]

    def _words(self, home: Home, begin: int, end: int) -> str:
        return f"positions [{begin}, {end}) of {self._file.describe(home)}"

    def _ticket(
        self,
        home: Home,
        begin: int,
        end: int,
        memory: RamBuffer,
        offset_bytes: int,
        striped: StripedTicket | None = None,
        ended: Callable[[StoreTicket, StorageError | None], None] | None = None,
    ) -> StoreTicket:
        return StoreTicket(
            memory=memory,
            offset_bytes=offset_bytes,
            num_elements=end - begin,
            dtype=self.dtype_of(home[2]),
            key=home[0],
            striped=striped,
            ended=ended,
        )
