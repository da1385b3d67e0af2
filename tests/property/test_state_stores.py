"""Random layouts, drives, residents and histories: a store gives what plain bytes give."""

import contextlib
import itertools
import pathlib
import tempfile

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lohan.ssd import IoEngine
from lohan.store import GRAIN, Part, StateLayout, TensorEntry
from lohan.store.format.layout import TENSOR_ALIGNMENT
from lohan.store.format.slots import Ranges
from lohan.vocabulary import BlockId
from support.state_stores import (
    STATE_FORMATS,
    MirrorStates,
    contents,
    created,
    make_directories,
    opened,
    random_tensors,
    update,
)

shapes = st.one_of(
    st.tuples(),
    st.tuples(st.integers(0, 5000)),
    st.tuples(st.integers(1, 70), st.integers(1, 70)),
)


@st.composite
def layouts(draw: st.DrawFn) -> StateLayout:
    names = itertools.count()
    blocks = draw(st.lists(st.lists(st.tuples(shapes, st.booleans()), max_size=4), max_size=4))
    compute_format, master_format = draw(st.sampled_from(STATE_FORMATS))
    return StateLayout.pack(
        {
            f"block {n}": tuple(
                TensorEntry(name=f"t{next(names)}", shape=shape, is_trainable=is_trainable)
                for shape, is_trainable in tensors
            )
            for n, tensors in enumerate(blocks)
        },
        compute_format=compute_format,
        master_format=master_format,
    )


@given(layouts(), st.integers(1, 4))
def test_tensors_never_overlap_and_chunks_cover_every_part_once(
    layout: StateLayout, grains: int
) -> None:
    for block in layout.blocks:
        for is_trainable in (True, False):
            places = [p for p in block.places if p.entry.is_trainable is is_trainable]
            length = block.num_trainable if is_trainable else block.num_frozen
            end = 0
            for place in places:
                assert place.begin % TENSOR_ALIGNMENT == 0
                assert end <= place.begin < end + TENSOR_ALIGNMENT
                end = place.end
            assert end <= length < end + TENSOR_ALIGNMENT
        ends = dict.fromkeys(block.trainable_parts, 0)
        for begin, end in block.chunks(grains * GRAIN):
            for part, where in block.chunk(begin, end).items():
                assert where.offset_bytes == ends[part] == begin * part.bytes_per_parameter
                assert where.nbytes % 4096 == 0
                ends[part] += where.nbytes
        assert ends == {part: block.part_bytes(part) for part in block.trainable_parts}
    assert StateLayout.from_json(layout.to_json()) == layout


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 5)), max_size=20))
def test_ranges_written_are_those_of_a_set(writes: list[tuple[int, int]]) -> None:
    ranges, judge = Ranges(), set()
    for begin, count in writes:
        positions = set(range(begin, begin + count))
        assert ranges.overlaps(begin, begin + count) == bool(judge & positions)
        if not judge & positions:
            ranges.add(begin, begin + count)
            judge |= positions
    for length in range(37):
        missing = [n for n in range(length) if n not in judge]
        gap = ranges.first_gap(length)
        assert (gap is None) == (not missing)
        if gap is not None:
            assert gap[0] == missing[0]
            assert judge.isdisjoint(range(gap[0], min(gap[1], length)))


@settings(max_examples=25, deadline=None)
@given(layouts(), st.integers(1, 3), st.data())
def test_any_history_gives_the_bytes_of_the_judge(
    layout: StateLayout, num_directories: int, data: st.DataObject
) -> None:
    def residents() -> dict[BlockId, list[Part]]:
        return {
            BlockId(n): data.draw(st.lists(st.sampled_from(block.parts), unique=True))
            for n, block in enumerate(layout.blocks)
            if block.parts
        }

    trainable = [n for n, block in enumerate(layout.blocks) if block.trainable_parts]
    tensors = random_tensors(layout)
    with tempfile.TemporaryDirectory() as root, contextlib.ExitStack() as stack:
        directories = make_directories(pathlib.Path(root), num_directories)
        engine = stack.enter_context(contextlib.closing(IoEngine(is_uring=False)))
        store = stack.enter_context(created(directories, layout, engine, residents()))
        store.fill(data.draw(st.permutations(sorted(tensors.items(), key=lambda item: item[0]))))
        for name, master in store.masters():
            _, place = layout.find(name)
            if place.entry.is_trainable:
                assert torch.equal(master, tensors[name])
        store.seal(step=0)
        mirror = MirrorStates(contents(store))
        sealed = mirror.copy()
        for step in range(1, data.draw(st.integers(1, 6)) + 1):
            match data.draw(st.sampled_from(["update", "update", "seal", "open", "verify"])):
                case "update":
                    for n in data.draw(st.lists(st.sampled_from(trainable or [-1]), unique=True)):
                        if n >= 0:
                            grains = data.draw(st.integers(1, 3))
                            update(store, BlockId(n), step, grains * GRAIN)
                            mirror.update(n, step)
                case "seal":
                    store.seal(step=step)
                    sealed = mirror.copy()
                case "open":
                    stack.close()
                    engine = stack.enter_context(contextlib.closing(IoEngine(is_uring=False)))
                    store = stack.enter_context(opened(directories, engine, residents()))
                    mirror = sealed.copy()
                case "verify":
                    store.verify()
            mirror.judge(contents(store))
