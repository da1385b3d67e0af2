"""Positions, parts and byte ranges of blocks, and their JSON form."""

import pytest

from lohan.errors import CheckpointError, ConfigError, ScheduleError
from lohan.store import GRAIN, ComputeFormat, MasterFormat, Part, StateLayout, TensorEntry
from lohan.store.format.layout import refuse_other_layout
from lohan.vocabulary import BlockId, TensorKind
from support.state_stores import STATE_FORMATS, small_layout


def entry(name: str, *shape: int, is_trainable: bool = True) -> TensorEntry:
    return TensorEntry(name=name, shape=shape, is_trainable=is_trainable)


def test_tensors_start_at_multiples_of_32_in_the_order_they_are_given() -> None:
    block = small_layout().blocks[1]
    begins = {place.entry.name: (place.begin, place.end) for place in block.places}
    assert begins == {
        "0.norm": (0, 5),
        "0.weight": (32, 32 + 5490),
        "0.adapter_of": (0, 2400),
        "0.bias": (5536, 5537),
    }
    assert (block.num_trainable, block.num_frozen) == (5568, 2400)


def test_a_parameter_takes_12_bytes_split_14_whole_and_2_if_frozen() -> None:
    for (compute_format, master_format), expected in zip(STATE_FORMATS, (12, 14, 14), strict=True):
        layout = StateLayout.pack(
            {"b": (entry("w", 4 * GRAIN),)},
            compute_format=compute_format,
            master_format=master_format,
        )
        assert layout.slot_bytes() == expected * 4 * GRAIN
    frozen = StateLayout.pack({"b": (entry("w", 4 * GRAIN, is_trainable=False),)})
    assert (frozen.slot_bytes(), frozen.frozen_bytes()) == (0, 2 * 4 * GRAIN)


def test_a_chunk_is_one_range_in_every_part() -> None:
    block = small_layout().blocks[1]
    ranges = block.chunk(GRAIN, 2 * GRAIN)
    assert {part: (r.offset_bytes, r.nbytes) for part, r in ranges.items()} == {
        Part.P16: (4096, 4096),
        Part.LO16: (4096, 4096),
        Part.M32: (8192, 8192),
        Part.V32: (8192, 8192),
    }
    assert list(block.chunks(2 * GRAIN)) == [(0, 4096), (4096, 5568)]
    assert block.byte_range(Part.M32, 4096, 5568).nbytes == 8192


@pytest.mark.parametrize("num_positions", [0, -GRAIN, 100, GRAIN + 1])
def test_chunks_are_multiples_of_a_page_of_every_part(num_positions: int) -> None:
    with pytest.raises(ConfigError, match="multiples of 2048"):
        list(small_layout().blocks[0].chunks(num_positions))


def test_parts_belong_to_the_kinds_of_the_plan() -> None:
    assert {part: part.kind for part in Part} == {
        Part.P16: TensorKind.P16,
        Part.FROZEN16: TensorKind.P16,
        Part.LO16: TensorKind.P32,
        Part.P32: TensorKind.P32,
        Part.M32: TensorKind.OS32,
        Part.V32: TensorKind.OS32,
    }


def test_a_name_has_one_home() -> None:
    with pytest.raises(ConfigError, match="list a tied parameter once"):
        StateLayout.pack({"a": (entry("w", 2),), "b": (entry("w", 2),)})


def test_impossible_tensors_are_refused() -> None:
    for name, shape in (("", (1,)), ("w", (-1,))):
        with pytest.raises(ConfigError, match="a name has at least one character"):
            TensorEntry(name=name, shape=shape)


def test_blocks_of_another_format_are_refused() -> None:
    with pytest.raises(ConfigError, match="share one format"):
        StateLayout(
            compute_format=ComputeFormat.BF16,
            master_format=MasterFormat.WHOLE,
            blocks=small_layout().blocks,
        )


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r'write "0\.weight"'):
        small_layout().find("0.weights")


def test_blocks_are_counted_from_0() -> None:
    for number in (-1, 3):
        with pytest.raises(ScheduleError, match="3 blocks, counted from 0"):
            small_layout().block(BlockId(number))


def test_fp16_masters_cannot_be_split() -> None:
    with pytest.raises(ConfigError, match="not the upper half of fp32"):
        small_layout(ComputeFormat.FP16, MasterFormat.SPLIT)


@pytest.mark.parametrize("formats", STATE_FORMATS)
def test_a_layout_survives_json(formats: tuple[ComputeFormat, MasterFormat]) -> None:
    layout = small_layout(*formats)
    assert StateLayout.from_json(layout.to_json()) == layout


@pytest.mark.parametrize("compute_format", ComputeFormat)
def test_a_layout_saved_before_masters_had_a_choice_is_read(compute_format: ComputeFormat) -> None:
    layout = small_layout(compute_format)
    fields = layout.to_json()
    del fields["master_format"]
    assert StateLayout.from_json(fields) == layout


def test_a_damaged_or_newer_layout_is_refused() -> None:
    fields = small_layout().to_json()
    with pytest.raises(CheckpointError, match="version 2"):
        StateLayout.from_json(fields | {"version": 2})
    for damage in (
        {"blocks": 3},
        {"compute_format": "fp8"},
        {"master_format": "torn"},
        {"blocks": [{"name": "a"}]},
    ):
        with pytest.raises(CheckpointError, match="state layout cannot be read"):
            StateLayout.from_json(fields | damage)


def test_states_of_another_model_are_refused_with_the_first_difference() -> None:
    saved = small_layout()
    refuse_other_layout(saved, small_layout())
    with pytest.raises(CheckpointError, match="saved for bf16, the model computes in fp16"):
        refuse_other_layout(saved, small_layout(ComputeFormat.FP16))
    whole = small_layout(ComputeFormat.BF16, MasterFormat.WHOLE)
    with pytest.raises(CheckpointError, match="saved with split masters, the policy keeps whole"):
        refuse_other_layout(saved, whole)
    fewer = StateLayout(
        compute_format=saved.compute_format,
        master_format=saved.master_format,
        blocks=saved.blocks[:2],
    )
    with pytest.raises(CheckpointError, match="3 blocks are saved, the model has 2"):
        refuse_other_layout(saved, fewer)
    other = StateLayout.pack({"embedding": (entry("embed", 70, 34),)})
    with pytest.raises(CheckpointError, match=r"70, 33.*70, 34"):
        refuse_other_layout(saved, other)
    renamed = StateLayout.pack({"tokens": (entry("embed", 70, 33),)})
    with pytest.raises(CheckpointError, match="block embedding is saved, the model has tokens"):
        refuse_other_layout(saved, renamed)


def test_a_block_without_tensors_has_no_parts() -> None:
    block = StateLayout.pack({"empty": (), "zero": (entry("z", 0, 4),)}).blocks
    assert block[0].parts == block[1].parts == ()
