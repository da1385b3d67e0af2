"""Blocks that are captured, and those that must not be: awkward blocks against plain PyTorch.

The first of two steps runs the blocks' own code and tries their graphs, the second runs the graphs.

Weights come in a fresh buffer for every visit, and the buffers they left are filled with NaN.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lohan.drive.captured.trial import Trial
from lohan.errors import ConfigError
from lohan.verify.plain_loop import losses_and_gradients
from support.block_backwards import BlockBackwards
from support.driven_toys import check_kept, drive_kept
from support.driving_hooks import assert_same_gradients, same_bits, twin
from support.toy_models import WIDTH, Toy, ToyBlock, toy_batches

ONE_STEP = 3 * 3
"""Backwards of three blocks for three micro-batches."""


class HoldsAView(torch.autograd.Function):
    """Keeps memory of a weight where autograd does not see it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.weight = weight.detach()
        ctx.save_for_backward(x)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (x,) = ctx.saved_tensors
        return gradients[0] @ ctx.weight, gradients[0].t() @ x


class HoldsTheParameter(HoldsAView):
    """Keeps the parameter itself, which is wherever its memory is."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        out = HoldsAView.forward(ctx, x, weight)
        ctx.weight = weight
        return out


class SavesItsWeight(torch.autograd.Function):
    """Saves a view of a weight as autograd wants it, and is the last operator of its block."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight[1:].t())
        return x[:, 1:] @ weight[1:].t()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, part = ctx.saved_tensors
        to_x, to_weight = torch.zeros_like(x), torch.zeros(WIDTH, WIDTH - 1)
        to_x[:, 1:] = gradients[0] @ part.t()
        to_weight[1:] = gradients[0].t() @ x[:, 1:]
        return to_x, to_weight


class CustomBlock(ToyBlock):
    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.function = function
        self.mix = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function.apply(super().forward(x), self.mix)


def test_weights_kept_behind_autograds_back_are_read_where_they_are(counts: BlockBackwards) -> None:
    check_kept(Toy(lambda _: CustomBlock(HoldsAView)))
    check_kept(Toy(lambda _: CustomBlock(HoldsTheParameter)))
    assert (counts.num_captured, counts.num_again) == (2 * ONE_STEP, 2 * ONE_STEP)


class LastFunction(ToyBlock):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.randn(WIDTH, WIDTH - 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        out = SavesItsWeight.apply(x, self.mix)
        return torch.cat([x[:, :1], out], 1)


class EndsInAFunction(Toy):
    """What a block returns is the result of a Function, which keeps no graph alive by itself."""

    def body(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.cat([x[:, :1], block(x)], 1)
        return x


class OnlyFunction(LastFunction):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return SavesItsWeight.apply(ToyBlock.forward(self, x), self.mix)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Toy(lambda _: LastFunction()),
        lambda: EndsInAFunction(lambda _: OnlyFunction(), depth=3),
    ],
)
def test_views_of_weights_that_a_function_saves_come_back(
    make: Callable[[], nn.Module], counts: BlockBackwards
) -> None:
    check_kept(make())
    assert (counts.num_captured, counts.num_again) == (ONE_STEP, ONE_STEP)


class GradientInside(ToyBlock):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        slope = torch.func.grad(lambda y: torch.sin(y).sum())(x.detach())
        return super().forward(x) * slope


def test_blocks_with_gradients_of_their_own_are_captured(counts: BlockBackwards) -> None:
    check_kept(Toy(lambda _: GradientInside()))
    assert (counts.num_captured, counts.num_again) == (ONE_STEP, ONE_STEP)


class OwnHooks(ToyBlock):
    """Saves tensors its own way: weights as they are."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda one: one.detach(), lambda one: one):
            return super().forward(x)


def test_blocks_that_save_weights_their_own_way_are_captured(counts: BlockBackwards) -> None:
    check_kept(Toy(lambda _: OwnHooks()))
    assert (counts.num_captured, counts.num_again) == (ONE_STEP, ONE_STEP)


class CheckpointInside(ToyBlock):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class VectorizedBlock(ToyBlock):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.vmap(lambda row: torch.tanh(self.up.weight @ row))(x))


class PartsOfWeights(ToyBlock):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.up.weight.chunk(2)
        return x + torch.tanh(x @ first.t()) @ second.double().float()


class NormedWeight(ToyBlock):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.utils.parametrizations.weight_norm(self.up)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.cell(x)[0]


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2)
        self.norm, self.places = nn.LayerNorm(WIDTH), nn.Embedding(5, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.attention(x, x, x)[0]) + self.places(torch.arange(len(x)))


class LowPrecision(ToyBlock):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(x).float()


@pytest.mark.parametrize(
    "block",
    [
        CheckpointInside,
        VectorizedBlock,
        PartsOfWeights,
        NormedWeight,
        Recurrent,
        Attending,
        LowPrecision,
    ],
)
def test_blocks_of_many_kinds_find_their_weights_again(
    block: type[nn.Module], counts: BlockBackwards
) -> None:
    check_kept(Toy(lambda _: block()))
    assert (counts.num_captured, counts.num_again) == (ONE_STEP, ONE_STEP)


class ReturnsAWeight(ToyBlock):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return super().forward(x), self.down.bias * 2.0


class ReadsWhatBlocksReturn(Toy):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x, bias = block(x)
            x = x + bias
        return x


def test_gradients_that_come_only_through_a_second_output(counts: BlockBackwards) -> None:
    check_kept(ReadsWhatBlocksReturn(lambda _: ReturnsAWeight()))
    assert (counts.num_captured, counts.num_again) == (ONE_STEP, ONE_STEP)


class TanhLast(ToyBlock):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(super().forward(x))


class ChangesOutputs(Toy):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
            with torch.no_grad():
                x += 1.0
        return x


def test_an_output_that_is_stored_may_be_changed_in_place() -> None:
    """Plain training refuses it, for what is saved is the output itself; here it is a copy."""
    model = ChangesOutputs(lambda _: TanhLast())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        losses_and_gradients(twin(model), toy_batches(1))
    step, hooks, store = drive_kept(model)
    step(toy_batches(1))
    first = dict(hooks.gradients)
    hooks.gradients.clear()
    step(toy_batches(1))
    assert_same_gradients(hooks.gradients, first)
    assert len(store) == 0


class LeavesALoss(ToyBlock):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.aside = x.square().mean()
        return super().forward(x)


class CollectsLosses(Toy):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        (loss,) = super().forward(x)
        return (loss + sum(block.aside for block in self.blocks),)


def test_gradients_that_reach_a_block_from_outside_are_refused() -> None:
    step, _, store = drive_kept(CollectsLosses(lambda _: LeavesALoss()))
    with pytest.raises(ConfigError, match="that a block made and did not return"):
        step(toy_batches(2))
    assert len(store) == 0


class WithHooks(Toy):
    """Hooks inside blocks are code of the user's."""

    def __init__(self) -> None:
        super().__init__(lambda _: ToyBlock())
        for block in self.blocks:
            block.up.register_forward_hook(lambda _module, _args, output: output * 1.5)


def test_blocks_with_hooks_inside_run_their_own_code(counts: BlockBackwards) -> None:
    check_kept(WithHooks())
    assert counts.num_captured == 0


class FailsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise ValueError("no backward")


class FailingToy(Toy):
    fails = False

    def body(self, x: torch.Tensor) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            x = block(x)
            if self.fails and index == 1:
                x = FailsBackward.apply(x)
        return x


def test_a_captured_step_that_fails_leaves_nothing_behind() -> None:
    torch.manual_seed(2)
    model = FailingToy(lambda _: ToyBlock())
    plain = twin(model)
    step, hooks, store = drive_kept(model)
    step(toy_batches(3))
    model.fails = True
    with pytest.raises(ValueError, match="no backward"):
        step(toy_batches(3))
    assert len(store) == 0
    hooks.abandon()
    model.fails = False
    hooks.gradients.clear()
    losses = step(toy_batches(3))
    expected_losses, expected = losses_and_gradients(plain, toy_batches(3))
    assert all(map(same_bits, losses, expected_losses))
    assert_same_gradients(hooks.gradients, expected)


def test_a_shape_is_captured_when_it_is_met_again(
    counts: BlockBackwards, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but the first: batches of all lengths would else be captured for nothing. Each of the
    three blocks is compared with its own code at its first shape, one of them at later ones."""
    trials: list[Trial] = []
    run = Trial.run

    def counted(trial: Trial, *args: Any) -> None:
        trials.append(trial)
        run(trial, *args)

    monkeypatch.setattr(Trial, "run", counted)
    model = Toy(lambda _: ToyBlock())
    plain = twin(model)
    step, hooks, _ = drive_kept(model)
    num_captured, num_tried = [], []
    for rows in (3, 3, 4, 5, 4, 4, 3):
        batches = toy_batches(1, rows=rows)
        _, expected = losses_and_gradients(plain, batches)
        hooks.gradients.clear()
        counts.num_captured = 0
        trials.clear()
        step(batches)
        assert_same_gradients(hooks.gradients, expected)
        num_captured.append(counts.num_captured)
        num_tried.append(len(trials))
    assert num_captured == [0, 3, 0, 0, 0, 3, 3]
    assert num_tried == [3, 0, 0, 0, 1, 0, 0]


def test_a_graph_that_does_not_run_leaves_the_block_its_own_code(
    counts: BlockBackwards, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fake kernels and real ones may lay results out differently, and a view is then refused."""

    def fail(*_: Any) -> None:
        torch.rand(3)
        raise RuntimeError("view size is not compatible\nwith much more")

    monkeypatch.setattr(Trial, "run", fail)
    check_kept(Toy(lambda _: ToyBlock()))
    assert (counts.num_captured, counts.num_again) == (0, 2 * ONE_STEP)
