"""Store and AdamW kernel together against the slow judge, bit for bit.

Chunk by chunk, some parts resident, the run opened again half-way.
"""

import contextlib
import pathlib

import pytest
import torch

from lohan.drive.weights.parameter_views import ParameterLayout
from lohan.optimizer import AdamWSettings, PlainState, SplitState, update_states
from lohan.optimizer.reference import adamw_elements
from lohan.optimizer.settings import prepare_step
from lohan.ssd import BufferPool, IoEngine
from lohan.store import (
    GRAIN,
    ComputeFormat,
    MasterFormat,
    Part,
    StateLayout,
    StateStore,
    TensorEntry,
)
from lohan.vocabulary import BlockId
from support.state_stores import STATE_FORMATS, created, make_directories, opened, random_tensors

SETTINGS = AdamWSettings(lr=1e-2, weight_decay=0.1)
BLOCKS = {
    "a": (TensorEntry(name="a.w", shape=(50, 61)), TensorEntry(name="a.b", shape=(50,))),
    "b": (TensorEntry(name="b.w", shape=(130, 61)),),
}
RESIDENT = {BlockId(0): [Part.M32], BlockId(1): [Part.P16, Part.V32]}


def gradient(name: str, shape: tuple[int, ...], step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + len(name) + shape[0])
    return torch.randn(shape, generator=generator).bfloat16()


def update_block(
    store: StateStore, gradients: torch.Tensor, block: BlockId, step: int, pool: BufferPool
) -> None:
    layout = store.layout.block(block)
    names = [part.lower() for part in layout.trainable_parts]
    store.begin_update(block)
    for begin, end in layout.chunks(GRAIN):
        with contextlib.ExitStack() as leases:
            buffers = [leases.enter_context(pool.allocate(4 * GRAIN)) for _ in range(4)]
            grad = gradients[begin:end]
            reads = [
                store.start_read(block, part, begin, end, buffer)
                for part, buffer in zip(layout.trainable_parts, buffers, strict=False)
            ]
            for read in reads:
                read.wait()
            arrays = {name: read.tensor() for name, read in zip(names, reads, strict=True)}
            if "lo16" in arrays:
                update_states(grad, SplitState(**arrays), settings=SETTINGS, step=step)
            else:
                update_states(grad, PlainState(**arrays), settings=SETTINGS, step=step)
            for part, read in zip(layout.trainable_parts, reads, strict=True):
                where = {"offset_bytes": read.offset_bytes}
                store.start_write(block, part, begin, end, read.memory, **where).wait()
    store.finish_update(block)


def gradients_of(store: StateStore, block: BlockId, step: int) -> torch.Tensor:
    layout = store.layout.block(block)
    flat = torch.zeros(layout.num_trainable, dtype=torch.bfloat16)
    for place in layout.places:
        values = gradient(place.entry.name, place.entry.shape, step)
        flat[place.begin : place.end] = values.view(-1)
    return flat


@pytest.mark.parametrize(("compute_format", "master_format"), STATE_FORMATS)
def test_offloaded_steps_are_those_of_the_judge(
    tmp_path: pathlib.Path, compute_format: ComputeFormat, master_format: MasterFormat
) -> None:
    layout = StateLayout.pack(BLOCKS, compute_format=compute_format, master_format=master_format)
    p = {name: value.clone() for name, value in random_tensors(layout).items()}
    m = {name: torch.zeros_like(value) for name, value in p.items()}
    v = {name: torch.zeros_like(value) for name, value in p.items()}
    directories = make_directories(tmp_path / "states", 2)
    pool = BufferPool("update")
    with contextlib.closing(IoEngine(is_uring=False)) as engine:
        stores = contextlib.ExitStack()
        store = stores.enter_context(created(directories, layout, engine, RESIDENT))
        store.fill(p.items())
        for step in range(1, 7):
            for block in (BlockId(1), BlockId(0)):
                update_block(store, gradients_of(store, block, step), block, step, pool)
            scalars = {
                name: prepare_step(SETTINGS, step=step, num_elements=value.numel())
                for name, value in p.items()
            }
            for name, value in p.items():
                grad = gradient(name, tuple(value.shape), step).float().view(-1)
                flats = (value.view(-1), m[name].view(-1), v[name].view(-1))
                after = adamw_elements(grad, *flats, scalars[name])
                for old, new in zip(flats, after, strict=True):
                    old.copy_(new)
            if step == 3:
                store.seal(step=step)
                stores.close()
                store = stores.enter_context(opened(directories, engine))
        for name, master in store.masters():
            assert torch.equal(master, p[name]), name
        for name, first, second in store.moments():
            assert torch.equal(first, m[name]), name
            assert torch.equal(second, v[name]), name
        stores.close()
    pool.close()


def test_weights_are_where_flat_compute_buffers_have_them() -> None:
    layout = StateLayout.pack(BLOCKS)
    for block in layout.blocks:
        parameters = {
            entry.name: torch.empty(entry.shape, dtype=torch.bfloat16, device="meta")
            for entry in block.tensors
        }
        packed = ParameterLayout.pack(parameters)
        assert packed.num_bytes == 2 * block.num_trainable
        assert [slot.offset_bytes for slot in packed.slots] == [2 * p.begin for p in block.places]
