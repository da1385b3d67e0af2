"""State stores for tests: small layouts, an update anyone can check, and a judge made of bytes.

`MirrorStates` keeps every part as plain bytes and is updated by the same rule as the store;
whatever a store gives back is compared with it bit for bit.
"""

import contextlib
import pathlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from lohan.ssd import BufferPool, IoEngine, RunDirectories
from lohan.store import (
    GRAIN,
    MIN_SCRATCH_BYTES,
    ComputeFormat,
    MasterFormat,
    Part,
    StateLayout,
    StateStore,
    StoreTicket,
    TensorEntry,
    create_states,
    open_states,
)
from lohan.vocabulary import BlockId

CHUNK = 4 * 4096
RUN_ID = "tests"

PartBytes = dict[tuple[int, Part], npt.NDArray[np.uint8]]


STATE_FORMATS = (
    (ComputeFormat.BF16, MasterFormat.SPLIT),
    (ComputeFormat.BF16, MasterFormat.WHOLE),
    (ComputeFormat.FP16, MasterFormat.WHOLE),
)
"""Every pair that can be."""


def small_layout(
    compute_format: ComputeFormat = ComputeFormat.BF16, master_format: MasterFormat | None = None
) -> StateLayout:
    """Three blocks of unequal size; tensors that share pages; a frozen one; an all-frozen block."""
    return StateLayout.pack(
        {
            "embedding": (TensorEntry(name="embed", shape=(70, 33)),),
            "layers.0": (
                TensorEntry(name="0.norm", shape=(5,)),
                TensorEntry(name="0.weight", shape=(90, 61)),
                TensorEntry(name="0.adapter_of", shape=(40, 60), is_trainable=False),
                TensorEntry(name="0.bias", shape=()),
            ),
            "head": (TensorEntry(name="head", shape=(9, 9), is_trainable=False),),
        },
        compute_format=compute_format,
        master_format=master_format,
    )


def random_tensors(
    layout: StateLayout, seed: int = 0, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        place.entry.name: torch.randn(place.entry.shape, generator=generator).to(dtype)
        for block in layout.blocks
        for place in block.places
    }


def make_directories(root: pathlib.Path, count: int) -> list[pathlib.Path]:
    directories = [root / f"ssd{n}" for n in range(count)]
    for directory in directories:
        directory.mkdir(parents=True, exist_ok=True)
    return directories


@contextlib.contextmanager
def created(
    directories: Sequence[pathlib.Path],
    layout: StateLayout,
    engine: IoEngine,
    resident_parts: Mapping[BlockId, Sequence[Part]] | None = None,
    **settings: object,
) -> Iterator[StateStore]:
    run = RunDirectories.create(directories, RUN_ID)
    try:
        with create_states(
            run,
            layout,
            engine=engine,
            chunk_bytes=CHUNK,
            scratch_bytes=MIN_SCRATCH_BYTES,
            resident_parts=resident_parts,
            **settings,  # type: ignore[arg-type]
        ) as store:
            yield store
    finally:
        run.close()


@contextlib.contextmanager
def opened(
    directories: Sequence[pathlib.Path],
    engine: IoEngine,
    resident_parts: Mapping[BlockId, Sequence[Part]] | None = None,
    **settings: object,
) -> Iterator[StateStore]:
    run = RunDirectories.attach(directories, RUN_ID)
    try:
        with open_states(
            run,
            engine=engine,
            scratch_bytes=MIN_SCRATCH_BYTES,
            resident_parts=resident_parts,
            **settings,  # type: ignore[arg-type]
        ) as store:
            yield store
    finally:
        run.close()


def next_bytes(old: npt.NDArray[np.uint8], step: int, part: Part) -> npt.NDArray[np.uint8]:
    """The update of these tests: wrapping arithmetic on every byte, different per step and part."""
    salt = (17 * step + 31 * list(Part).index(part) + 1) % 256
    return old * np.uint8(3) + np.uint8(salt)


def update(store: StateStore, block: BlockId, step: int, num_positions: int = GRAIN) -> None:
    """Update a block chunk by chunk: read the parts, change them in place, write them."""
    layout = store.layout.block(block)
    pool = BufferPool("update")
    store.begin_update(block)
    try:
        for begin, end in layout.chunks(num_positions):
            tickets: list[StoreTicket] = []
            buffers = [pool.allocate(4 * num_positions) for _ in layout.trainable_parts]
            try:
                for part, buffer in zip(layout.trainable_parts, buffers, strict=True):
                    tickets.append(store.start_read(block, part, begin, end, buffer))
                for part, read in zip(layout.trainable_parts, tuple(tickets), strict=True):
                    read.wait()
                    values = read.tensor().view(torch.uint8).numpy()
                    values[:] = next_bytes(values, step, part)
                    tickets.append(
                        store.start_write(
                            block, part, begin, end, read.memory, offset_bytes=read.offset_bytes
                        )
                    )
                for ticket in tickets:
                    ticket.wait()
            finally:
                for ticket in tickets:
                    ticket.settle()
                for buffer in buffers:
                    pool.take_back(buffer)
        store.finish_update(block)
    finally:
        pool.close()


def update_all(store: StateStore, step: int, num_positions: int = GRAIN) -> None:
    for number in range(len(store.layout.blocks)):
        if store.layout.block(BlockId(number)).trainable_parts:
            update(store, BlockId(number), step, num_positions)


def contents(store: StateStore) -> PartBytes:
    """Every part of every block as it is read now."""
    found: PartBytes = {}
    pool = BufferPool("contents")
    for number, block in enumerate(store.layout.blocks):
        for part in block.parts:
            with pool.allocate(block.part_bytes(part)) as buffer:
                ticket = store.start_read(
                    BlockId(number), part, 0, block.num_positions(part), buffer
                )
                ticket.wait()
                found[number, part] = ticket.tensor().view(torch.uint8).numpy().copy()
    pool.close()
    return found


class MirrorStates:
    """The judge: all parts as plain bytes."""

    def __init__(self, first: PartBytes) -> None:
        self.parts = {key: value.copy() for key, value in first.items()}

    def update_all(self, step: int) -> None:
        for block in {block for block, _ in self.parts}:
            self.update(block, step)

    def update(self, wanted: int, step: int) -> None:
        for block, part in self.parts:
            if block == wanted and not part.is_frozen:
                self.parts[block, part] = next_bytes(self.parts[block, part], step, part)

    def copy(self) -> "MirrorStates":
        return MirrorStates(self.parts)

    def judge(self, found: PartBytes) -> None:
        assert found.keys() == self.parts.keys()
        for key, value in self.parts.items():
            assert np.array_equal(found[key], value), f"{key} differs"

    def is_equal(self, found: PartBytes) -> bool:
        return all(np.array_equal(found[key], value) for key, value in self.parts.items())
