"""Views, in-place operators and what autograd keeps, on blocks made to be awkward."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from lohan.errors import ConfigError
from lohan.model import INPUT, Growth
from support.hand_made import all_output_bytes
from support.small_modules import WIDTH, Model
from support.traced import traced_shape as shape_of

BYTES = 2 * WIDTH  # Of one token's hidden vector.


def traced(function, model_class=Model):
    """Return the operators of a block that computes `function(fc, x)`, by the end of their name."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(WIDTH, WIDTH, bias=False)
            self.inner = nn.Identity()

        def forward(self, x):
            return function(self.fc, x)

    block = shape_of(model_class([Block(), Block()])).kinds[1]
    return {operator.name.rpartition("/")[2]: operator for operator in block.operators}, block


def test_views_count_as_what_they_alias():
    found, _ = traced(
        lambda fc, x: fc(x).view(-1, 2, 4).transpose(1, 2).exp().transpose(1, 2).reshape(x.shape)
    )
    assert list(found) == ["mm", "exp"]
    assert found["exp"].inputs == (found["mm"].index,)
    assert found["exp"].index > found["mm"].index + 1


def test_an_unread_result_overwritten_in_place_is_one_operator():
    found, block = traced(lambda fc, x: fc(x).relu_())
    assert list(found) == ["mm+relu_"]
    relu = found["mm+relu_"]
    assert relu.is_saved
    assert relu.inputs == (INPUT,)
    assert relu.forward_flops == Growth(per_token=2 * WIDTH * WIDTH)
    assert relu.backward_flops == Growth(per_token=4 * WIDTH * WIDTH)
    assert all_output_bytes(block) == Growth(per_token=BYTES)


def test_a_result_that_was_read_before_it_is_overwritten_stays():
    def function(fc, x):
        y = fc(x)
        z = y.sin()
        return y.add_(z)

    found, _ = traced(function)
    assert list(found) == ["mm", "sin", "add_"]
    assert found["add_"].inputs == (found["mm"].index, found["sin"].index)
    assert found["add_"].output_bytes == found["mm"].output_bytes == Growth(per_token=BYTES)


def test_writing_into_a_part_of_a_tensor_rewrites_the_tensor():
    def function(fc, x):
        made = torch.zeros_like(x)
        made[..., :4] = fc(x)[..., :4]
        return made * 2

    found, _ = traced(function)
    assert list(found) == ["mm", "zeros_like+copy_", "mul"]
    assert found["zeros_like+copy_"].inputs == (found["mm"].index,)
    assert found["mul"].inputs == (found["zeros_like+copy_"].index,)


def test_the_blocks_input_overwritten_in_place_becomes_an_output():
    found, _ = traced(lambda fc, x: x.add_(fc(x.cos())))
    assert found["add_"].inputs == (INPUT, found["mm"].index)
    assert found["add_"].output_bytes == Growth(per_token=BYTES)


def test_a_shape_is_not_a_value():
    found, _ = traced(lambda fc, x: x + torch.ones_like(fc(x)))
    assert found["ones_like"].inputs == ()


def test_only_the_kept_one_of_several_outputs_is_saved():
    # Values are kept for nothing (their gradient needs the indices alone).
    found, _ = traced(lambda fc, x: fc(x).sort(dim=-1).values + x)
    sort = found["sort"]
    assert sort.is_saved
    assert sort.output_bytes == Growth(per_token=BYTES + 8 * WIDTH)
    assert sort.partly_saved_bytes == sort.saved_bytes == Growth(per_token=8 * WIDTH)


def test_expanded_memory_is_counted_as_it_is():
    found, _ = traced(lambda fc, x: fc(x).mean(-1, keepdim=True).expand_as(x).clone())
    assert found["mean"].output_bytes == Growth(per_token=2)
    assert found["clone"].output_bytes == Growth(per_token=BYTES)


def test_touched_bytes_are_what_is_read_and_written():
    found, _ = traced(lambda fc, x: fc(x).exp() + x)
    assert found["exp"].touched_bytes == Growth(per_token=2 * BYTES)
    assert found["add"].touched_bytes == Growth(per_token=3 * BYTES)
    assert found["mm"].touched_bytes == Growth(per_token=2 * BYTES, fixed=2 * WIDTH * WIDTH)


def test_a_lookup_touches_only_the_rows_it_returns():
    embedding = shape_of(Model([nn.Sequential(nn.Linear(8, 8)) for _ in range(2)])).kinds[0]
    assert embedding.operators[0].touched_bytes == Growth(per_token=8 + 2 * BYTES)


def test_backward_work_goes_to_the_operator_that_causes_it():
    found, block = traced(lambda fc, x: fc(x).exp() @ torch.ones(WIDTH, WIDTH, dtype=x.dtype))
    assert found["mm"].backward_flops.per_token in (2 * WIDTH * WIDTH, 4 * WIDTH * WIDTH)
    assert found["exp"].backward_flops == Growth()
    assert block.backward_flops == Growth(per_token=(4 + 2) * WIDTH * WIDTH)


def test_work_inside_an_autograd_function_is_counted():
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return x @ weight

        @staticmethod
        def backward(ctx, gradient):
            x, weight = ctx.saved_tensors
            return gradient @ weight.t(), x.flatten(0, 1).t() @ gradient.flatten(0, 1)

    found, block = traced(lambda fc, x: Twice.apply(x.exp(), fc.weight))
    assert found["exp"].is_saved
    assert block.backward_flops == Growth(per_token=4 * WIDTH * WIDTH)


def test_attention_with_dropout_is_traced_as_the_modules_device_runs_it():
    found, _ = traced(
        lambda fc, x: functional.scaled_dot_product_attention(*[fc(x)[:, None]] * 3, dropout_p=0.1)[
            :, 0
        ]
    )
    assert any(operator.output_bytes.per_token_pair for operator in found.values())


def test_questions_about_values_get_ordinary_answers():
    def function(fc, x):
        if (x == x).all() and not torch.isnan(x).any():
            return fc(x)
        raise AssertionError("an ordinary input would not come here")

    found, _ = traced(function)
    assert "mm" in found


def test_other_questions_about_values_are_refused():
    with pytest.raises(ConfigError, match=r"it stopped in block blocks\.0: Data") as raised:
        traced(lambda fc, x: fc(x) if x.sum() > 0 else x)
    assert "branches on the values" in raised.value.remedy
