"""Awkward blocks against plain PyTorch, with all that backward reads stored, and nothing of it.

Weights come in a fresh buffer for every visit, and the buffers they left are filled with NaN.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lohan.drive.activations.store import BlockChoices
from lohan.errors import ConfigError
from support.block_backwards import count_backwards
from support.driven_toys import EVERYTHING, assert_as_plain
from support.toy_models import WIDTH, Toy, ToyBlock, toy_batches


@pytest.fixture(params=["stored", "again"])
def check(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Callable[[nn.Module], None]:
    """Compares two steps of three micro-batches with those of plain training."""
    counts = count_backwards(monkeypatch)
    choices = EVERYTHING if request.param == "stored" else BlockChoices()

    def run(
        model: nn.Module,
        *,
        is_captured: bool = True,
        batches: Callable[[], list[dict[str, Any]]] = toy_batches,
    ) -> None:
        assert_as_plain(model, choices, batches=batches)
        assert (counts.num_captured > 0) == is_captured

    return run


class ConjugateWeight(ToyBlock):
    """Views of weights whose signs are not in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(WIDTH // 2, 2))
        self.lean = nn.Parameter(torch.randn(WIDTH, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x) * torch.view_as_complex(self.lean).conj().imag
        pairs = torch.view_as_complex(y.view(len(x), -1, 2))
        turned = pairs * torch.view_as_complex(self.turn).conj()
        return torch.view_as_real(turned).reshape(x.shape)


def test_conjugate_and_negated_views_of_weights_stay_such(
    check: Callable[..., None],
) -> None:
    check(Toy(lambda _: ConjugateWeight()))


class ConjugateOutside(Toy):
    """The same in code outside the blocks, between which its weights leave."""

    def __init__(self) -> None:
        super().__init__(lambda _: ToyBlock())
        self.turn = nn.Parameter(torch.randn(WIDTH, 2))

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return super().body(x * torch.view_as_complex(self.turn).conj().imag)


def test_negated_views_of_weights_outside_the_blocks_stay_such(
    check: Callable[..., None],
) -> None:
    check(ConjugateOutside())


class ReadsItsScale(ToyBlock):
    """A part that is run again in backward reads an attribute, and so does a hook."""

    scale: torch.Tensor

    def part(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = checkpoint(self.part, x, use_reentrant=False)
        y.register_hook(lambda gradient: gradient * self.scale)
        return torch.tanh(y)


class WritesItsScale(ReadsItsScale):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.scale = x.detach().abs().mean()
        return super().forward(x)


class WritesScales(Toy):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            block.scale = x.detach().abs().mean()
            x = block(x)
        return x


class ReadsANumber(ToyBlock):
    scale = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale


class WritesNumbers(Toy):
    """A number that is another one for every micro-batch; the same three in every step."""

    def body(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            block.scale = round(float(x.detach().abs().mean()), 3)
            x = block(x)
        return x


class ReadsBetween(Toy):
    scale: torch.Tensor

    def part(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x) * self.scale

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        x = self.enter(x)
        self.scale = x.detach().abs().mean()
        x = checkpoint(self.part, x, use_reentrant=False)
        return (self.leave(self.body(x)).square().mean(),)


@pytest.mark.parametrize(
    ("make", "is_captured"),
    [
        (lambda: Toy(lambda _: WritesItsScale()), False),
        (lambda: WritesScales(lambda _: ReadsItsScale()), False),
        (lambda: WritesNumbers(lambda _: ReadsANumber()), True),
        (lambda: ReadsBetween(lambda _: ToyBlock()), True),
    ],
)
def test_backward_sees_the_attributes_of_its_own_micro_batch(
    make: Callable[[], nn.Module], is_captured: bool, check: Callable[..., None]
) -> None:
    check(make(), is_captured=is_captured)


class GivesNoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None


class Stops(ToyBlock):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(GivesNoGradient.apply(x))


def test_in_front_of_a_block_that_gives_no_gradient_there_is_none(
    check: Callable[..., None],
) -> None:
    """None, not zeros: weights would decay."""
    check(Toy(lambda index: Stops() if index == 1 else ToyBlock()))


class ReturnsWeights(ToyBlock):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        weight = self.down.weight
        return super().forward(x), weight, weight.t()[1:], weight.detach()[2:, ::2], weight[:0]


class ReadsReturnedWeights(Toy):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        later = torch.zeros(())
        for block in self.blocks:
            x, weight, part, constant, empty = block(x)
            x = x * weight.sum() + part[0].mean() + empty.sum()
            later = later + part.sum() * constant.mean()
        return x * later


def test_weights_that_a_block_returns_are_there_when_it_is_over(
    check: Callable[..., None],
) -> None:
    check(ReadsReturnedWeights(lambda _: ReturnsWeights()))


class CountsCalls(ToyBlock):
    """Computes with how often it was called."""

    num_calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        return super().forward(x) * self.num_calls


class CountsCallsWithoutHooks(CountsCalls):
    """The watched forward ends early, and is started again."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y + torch.func.grad(lambda one: torch.sin(one).sum())(x.detach())


@pytest.mark.parametrize("block", [CountsCalls, CountsCallsWithoutHooks])
def test_a_block_that_is_run_again_starts_with_the_attributes_it_had(
    block: type[CountsCalls], check: Callable[..., None]
) -> None:
    model = Toy(lambda _: block())
    check(model, is_captured=False)
    assert [one.num_calls for one in model.blocks] == [2 * 3] * 3


class NormedRows(ToyBlock):
    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Embedding(5, WIDTH, max_norm=0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.places(torch.arange(len(x)))


class NormedRowsOutside(Toy):
    def __init__(self) -> None:
        super().__init__(lambda _: ToyBlock())
        self.enter.places = nn.Embedding(5, WIDTH, max_norm=0.5)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return super().body(x + self.enter.places(torch.arange(len(x))))


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: Toy(lambda _: NormedRows()), r"blocks\.0\.places\.weight"),
        (NormedRowsOutside, r"enter\.places\.weight"),
    ],
)
def test_a_forward_that_changes_weights_is_refused(
    make: Callable[[], nn.Module], name: str, check: Callable[..., None]
) -> None:
    """In plain training the change stays; here the weights would come again without it."""
    with pytest.raises(ConfigError, match=f"{name} was changed in place by the forward"):
        check(make())


class HoldsItsWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.weight = weight
        ctx.save_for_backward(x)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (x,) = ctx.saved_tensors
        return gradients[0] @ ctx.weight.t(), x.t() @ gradients[0]


class TurnsItsWeightOnce(ToyBlock):
    """Every forward lets go of a view of a weight and holds another: as many users as before."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.turned: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.turned = [self.mix.t()]
        return HoldsItsWeight.apply(super().forward(x), self.turned[0])


def test_a_block_that_holds_a_weight_is_known_for_it_with_all_inputs(
    check: Callable[..., None],
) -> None:
    def unequal() -> list[dict[str, Any]]:
        return [toy_batches(1, rows=rows)[0] for rows in (3, 4, 5)]

    check(Toy(lambda _: TurnsItsWeightOnce()), is_captured=False, batches=unequal)
