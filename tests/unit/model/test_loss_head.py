"""Heads whose loss needs no whole logits, as the operators of a shape show them."""

from dataclasses import replace

import msgspec
import pytest

from lohan.errors import ConfigError
from lohan.hardware import machine_from
from lohan.model.loss_head import UNIT, LossHead, in_chunks, loss_head, pieces
from lohan.model.names import shape_of
from lohan.model.shape import ModelShape
from lohan.paper import policy_named
from lohan.plan.plan import loss_words
from lohan.plan.policies import make_plan
from lohan.plan.policies.gpu_floor import GpuFloor
from lohan.plan.workload import Workload
from lohan.units import GIB

SEQUENCE = 65_536
LONG = Workload(batch=1, sequence=SEQUENCE, clips_gradients=True, should_chunk_loss=True)


@pytest.mark.parametrize("total", [0, 1, UNIT, 2 * UNIT - 1, 1000, 128_256])
@pytest.mark.parametrize("num_pieces", [1, 2, 7, 1024])
def test_pieces_are_whole_units_and_cover_everything(total: int, num_pieces: int) -> None:
    found = list(pieces(total, num_pieces))
    assert [row for one in found for row in range(one.start, one.stop)] == list(range(total))
    assert len(found) <= num_pieces
    assert all((one.stop - one.start) % UNIT == 0 for one in found[:-1])
    assert len(found) == 1 or all(one.stop - one.start >= UNIT for one in found)


def test_a_plain_language_model_has_such_a_head() -> None:
    found = loss_head(shape_of("llama-3.1-8b"))
    assert isinstance(found, LossHead)
    assert found.module == "lm_head"
    assert found.linear.output_bytes.at(1, SEQUENCE) == 2 * SEQUENCE * 128_256


def changed(called: str, /, **fields: object) -> ModelShape:
    """A shape with one operator of its head changed."""
    shape = shape_of("llama-3.1-8b")
    head = shape.blocks[-1]
    operators = tuple(
        replace(one, **fields) if one.name.rpartition("/")[2] == called else one  # type: ignore[arg-type]
        for one in head.operators
    )
    return replace(shape, kinds=(*shape.kinds[:-1], replace(head, operators=operators)))


def test_other_heads_are_told_apart() -> None:
    assert "not one cross entropy" in str(loss_head(shape_of("flux-12b")))
    softcapped = changed("_to_copy", name="tanh")
    assert "made by tanh" in str(loss_head(softcapped))
    shape = shape_of("llama-3.1-8b")
    largest = shape.blocks[-1].operators[-2].output_bytes
    assert "not in fp32" in str(loss_head(changed("_log_softmax", output_bytes=_half(largest))))
    linear = next(one for one in shape.blocks[-1].operators if one.name == "lm_head/mm")
    read = changed("constant_pad_nd", inputs=(linear.index,))
    assert "read by constant_pad_nd too" in str(loss_head(read))


def _half(growth: object) -> object:
    values = msgspec.to_builtins(growth)
    return type(growth)(
        **{name: value / 2 for name, value in zip(growth.__struct_fields__, values, strict=True)}  # type: ignore[attr-defined]
    )


def test_a_head_in_chunks_needs_a_part_of_the_memory_and_computes_logits_three_times() -> None:
    shape = shape_of("llama-3.1-8b")
    whole, cut = shape.blocks[-1], in_chunks(shape, SEQUENCE, 8).blocks[-1]
    logits = SEQUENCE * 128_256
    assert cut.saved_bytes.at(1, SEQUENCE) < whole.saved_bytes.at(1, SEQUENCE) / 4
    more = cut.backward_flops.at(1, SEQUENCE) - whole.backward_flops.at(1, SEQUENCE)
    assert more == pytest.approx(2 * 2 * logits * 4096)
    assert cut.forward_flops == whole.forward_flops
    assert in_chunks(shape, SEQUENCE, 1) is shape


def test_a_long_sequence_fits_with_the_loss_in_chunks() -> None:
    machine, shape = machine_from("desktop-4090"), shape_of("llama-3.1-8b")
    whole = make_plan("lohan+", machine, shape, replace(LONG, should_chunk_loss=False))
    plan = make_plan("lohan+", machine, shape, LONG)
    assert not whole.ledger.fits
    assert plan.ledger.fits
    # As few as make the head need no more than a block does.
    assert plan.loss_chunks == 8
    assert plan.shape is shape
    fewer = in_chunks(shape, SEQUENCE, plan.loss_chunks // 2)
    least = GpuFloor.of(plan.computed_shape, 1, 1, SEQUENCE).working_bytes
    assert least < 17 * GIB < GpuFloor.of(fewer, 1, 1, SEQUENCE).working_bytes
    assert "in 8 chunks" in loss_words(plan)


def test_what_needs_no_chunks_or_cannot_have_them_is_told() -> None:
    machine = machine_from("desktop-4090")
    small = Workload(batch=1, sequence=64, should_chunk_loss=True)
    words = loss_words(make_plan("lohan+", machine, shape_of("llama-3.1-8b"), small))
    assert "as a whole" in words
    flux = make_plan("lohan+", machine, shape_of("flux-12b"), replace(small, sequence=4096))
    assert "not one cross entropy" in loss_words(flux)
    with pytest.raises(ConfigError, match="in chunks by"):
        make_plan(policy_named("zero-infinity"), machine, shape_of("llama-3.1-8b"), LONG)
