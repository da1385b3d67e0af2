"""Blocks that a forward leaves out (layer drop, a tower without pictures), and mappings that blocks
hand to each other: against plain PyTorch, to the bit."""

from collections import UserDict
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lohan.drive.activations.store import BlockChoices
from lohan.errors import ConfigError
from lohan.verify import Case, SmallCopy, Verification, verify_copy
from lohan.verify.plain_loop import losses_and_gradients
from lohan.verify.small_copy import DTYPE
from support.driven_toys import EVERYTHING, assert_as_plain, check_kept, drive_kept
from support.driving_hooks import assert_same_gradients, same_bits, twin
from support.toy_models import WIDTH, Toy, ToyBlock, toy_batches

PATTERNS = [kept for kept in product((True, False), repeat=3) if not all(kept)]


class LeavesOut(Toy):
    """Runs the blocks that a batch names, with code before and after each."""

    def __init__(self) -> None:
        super().__init__(lambda _: ToyBlock())

    def forward(self, x: torch.Tensor, kept: tuple[bool, ...]) -> tuple[torch.Tensor]:
        x = self.enter(x)
        for block, is_kept in zip(self.blocks, kept, strict=True):
            x = x * 1.5
            if is_kept:
                x = block(x)
            x = torch.sin(x)
        return (self.leave(x).square().mean(),)


def batches_with(*patterns: tuple[bool, ...]) -> list[dict[str, Any]]:
    return [
        {**batch, "kept": kept}
        for batch, kept in zip(toy_batches(len(patterns)), patterns, strict=True)
    ]


@pytest.mark.parametrize("choices", [EVERYTHING, BlockChoices()], ids=["stored", "recomputed"])
@pytest.mark.parametrize("kept", PATTERNS)
def test_blocks_may_be_left_out(kept: tuple[bool, ...], choices: BlockChoices) -> None:
    """By one of three micro-batches, and by all."""
    everything = (True, True, True)
    for patterns in ((everything, kept, everything), (kept, kept, kept)):
        assert_as_plain(
            LeavesOut(), choices, batches=lambda patterns=patterns: batches_with(*patterns)
        )


class Shares(ToyBlock):
    """Reads what an earlier block left under its name, or leaves it."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.name, self.leaves_it = ("even", "odd")[index % 2], index < 2

    def forward(self, x: torch.Tensor, *, shared: Any) -> torch.Tensor:
        x = super().forward(x)
        if self.leaves_it:
            shared[self.name] = (torch.cos(x), x.detach() * 2)
            return x
        first, second = shared[self.name]
        return x + first * second


class SharingToy(Toy):
    def __init__(self, kind: type[Any]) -> None:
        super().__init__(Shares, depth=4)
        self.kind = kind

    def body(self, x: torch.Tensor) -> torch.Tensor:
        shared = self.kind()
        for block in self.blocks:
            x = block(x, shared=shared)
        return x + shared["odd"][0]


@pytest.mark.parametrize("kind", [dict, UserDict])
def test_mappings_that_blocks_share(kind: type[Any]) -> None:
    check_kept(SharingToy(kind))


class Counts(ToyBlock):
    """Replaces a value in a mapping it is given."""

    def forward(self, x: torch.Tensor, *, state: dict[str, Any]) -> torch.Tensor:
        state["count"] += 1
        return super().forward(x) * state["count"]


class CountingToy(Toy):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        state = {"count": 0}
        for block in self.blocks:
            x = block(x, state=state)
        return x * state["count"]


def test_numbers_in_mappings_that_blocks_share() -> None:
    check_kept(CountingToy(lambda _: Counts()))


class Removes(Shares):
    def forward(self, x: torch.Tensor, *, shared: Any) -> torch.Tensor:
        out = super().forward(x, shared=shared)
        shared.pop(self.name)
        return out


def test_a_block_that_removes_what_it_was_given_is_refused() -> None:
    model = SharingToy(dict)
    model.blocks[2] = Removes(2)
    with pytest.raises(ConfigError, match="removes entries of its argument shared"):
        check_kept(model)


class GradientAtTheInput(Toy):
    """Wants the gradient of what its first block is given, as speech models do."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        x = torch.cat((x, x[:, :2]), 1)
        self.inputs = [*getattr(self, "inputs", []), x.requires_grad_()]
        return (self.leave(self.body(x)).square().mean(),)


def test_a_block_may_be_given_a_leaf() -> None:
    model = GradientAtTheInput(lambda _: ToyBlock())
    plain = twin(model)
    step, hooks, _ = drive_kept(model)
    for _ in range(2):
        _, expected = losses_and_gradients(plain, toy_batches(1))
        hooks.gradients.clear()
        step(toy_batches(1))
        assert_same_gradients(hooks.gradients, expected)
    assert [x.grad for x in model.inputs if x.grad is None] == []
    assert all(same_bits(x.grad, y.grad) for x, y in zip(model.inputs, plain.inputs, strict=True))


class TwoTowers(nn.Module):
    """Blocks for a picture, in front of the others; batches without one do not use them."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Linear(4, WIDTH)
        self.tower = nn.ModuleList(ToyBlock() for _ in range(2))
        self.join = nn.Linear(WIDTH, WIDTH)
        self.embed = nn.Embedding(9, WIDTH)
        self.blocks = nn.ModuleList(ToyBlock() for _ in range(2))
        self.leave = nn.Linear(WIDTH, 2)

    def forward(
        self, input_ids: torch.Tensor, picture: torch.Tensor | None = None
    ) -> tuple[torch.Tensor]:
        x = self.embed(input_ids)
        if picture is not None:
            if int((input_ids == 8).sum()) != picture.shape[0]:
                raise ValueError("tokens for pictures are missing")
            seen = self.patch(picture)
            for block in self.tower:
                seen = block(seen)
            x = x.masked_scatter((input_ids == 8)[..., None], self.join(seen))
        for block in self.blocks:
            x = block(x)
        return (self.leave(x).square().mean(),)


def batch_with(seed: int, *, has_picture: bool) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 8, (3, 5), generator=generator)
    if not has_picture:
        return {"input_ids": ids}
    ids[:, 1] = 8
    return {"input_ids": ids, "picture": torch.randn(3, 4, generator=generator, dtype=DTYPE)}


def verified(tmp_path: Path, with_pictures: Callable[[int], bool]) -> Verification:
    copy = SmallCopy(
        name="two towers",
        architecture="TwoTowers",
        changes=(),
        num_parameters=1000,
        make=TwoTowers,
        make_batch=lambda seed: batch_with(seed, has_picture=with_pictures(seed)),
        loss_fn=None,
    )
    case = Case(activations="as planned", num_micro_batches=2, max_grad_norm=1.0)
    return verify_copy(copy, ssd=[tmp_path], device="cpu", num_steps=4, cases=[case])


@pytest.mark.parametrize(
    "with_pictures",
    [lambda seed: seed % 3 == 0, lambda seed: False],
    ids=["some with pictures", "none with pictures"],
)
def test_a_tower_that_a_batch_does_not_use(
    with_pictures: Callable[[int], bool], tmp_path: Path
) -> None:
    """No gradient and no update for it, as in the plain loop."""
    (case,) = verified(tmp_path, with_pictures).cases
    assert case.difference is None


def test_a_tower_that_was_not_planned_for_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"called block tower\.0, which the example"):
        verified(tmp_path, lambda seed: seed > 3)
