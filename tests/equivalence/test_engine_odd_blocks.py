"""Blocks that touch more than their result: as in memory to the bit, or refused with a reason."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lohan.errors import ConfigError
from support.toy_models import WIDTH, Toy, ToyBlock
from support.toy_runs import (
    attach_toy,
    make_toy,
    toy_optimizer,
    toy_steps,
)


class SideBlock(ToyBlock):
    """Reads a tensor without a gradient that autograd need not keep."""

    def forward(self, x: torch.Tensor, side: torch.Tensor | None = None) -> torch.Tensor:
        y = super().forward(x)
        return y if side is None else torch.tanh(y + side)


class SideChangesLater(Toy):
    """Changes an input of its first block when the second has run, which plain autograd allows."""

    def body(self, x: torch.Tensor) -> torch.Tensor:
        side = torch.ones(WIDTH, dtype=x.dtype)
        x = self.blocks[1](self.blocks[0](x, side))
        side.sub_(1.0)
        return self.blocks[2](x, side)


class CollectingBlock(ToyBlock):
    """Adds to a list it is given."""

    def forward(self, x: torch.Tensor, collected: list[torch.Tensor]) -> torch.Tensor:
        y = super().forward(x)
        collected.append(y.square().mean())
        return y


class Collecting(Toy):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        collected: list[torch.Tensor] = []
        x = self.enter(x)
        for block in self.blocks:
            x = block(x, collected)
        return (self.leave(x).square().mean() + sum(collected),)


class CountingBlock(ToyBlock):
    """Replaces a value in a mapping it is given."""

    def forward(self, x: torch.Tensor, *, state: dict[str, Any]) -> torch.Tensor:
        state["count"] += 1
        return super().forward(x) * state["count"]


class Counting(Toy):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        state = {"count": 0}
        for block in self.blocks:
            x = block(x, state=state)
        return x


REFUSED = {
    "side input changed later": (SideChangesLater, SideBlock, "entered block blocks.0 was changed"),
    "list filled by blocks": (Collecting, CollectingBlock, "blocks.0 changed a list or mapping"),
    "mapping changed by blocks": (Counting, CountingBlock, "blocks.0 changed a list or mapping"),
}


@pytest.mark.parametrize("device", ["cpu", "emulated"])
@pytest.mark.parametrize("name", REFUSED)
def test_a_block_that_changes_its_inputs_is_refused(name: str, device: str, tmp_path: Path) -> None:
    kind, block, words = REFUSED[name]
    model = make_toy(lambda: kind(lambda _: block()))
    with (
        attach_toy(model, toy_optimizer(model), tmp_path, device=device) as engine,
        pytest.raises(ConfigError, match=words),
    ):
        engine.step(toy_steps(1, 1)[0])
