"""Small modules that each do one thing that is hard to drive block by block."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH = 6


class ToyBlock(nn.Module):
    def __init__(self, hidden: int = 8) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, hidden)
        self.down = nn.Linear(hidden, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Toy(nn.Module):
    """A stack of blocks between two linear layers; `forward` gives the loss."""

    def __init__(self, make_block: Callable[[int], nn.Module], depth: int = 3) -> None:
        super().__init__()
        self.enter = nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList(make_block(index) for index in range(depth))
        self.leave = nn.Linear(WIDTH, 2)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (self.leave(self.body(self.enter(x))).square().mean(),)


def toy_batches(count: int = 3, rows: int = 5) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(3)
    return [{"x": torch.randn(rows, 4, generator=generator)} for _ in range(count)]


class TupleBlock(ToyBlock):
    """Takes and gives nested containers, hands one tensor through and another one on twice."""

    def forward(self, pair: tuple[torch.Tensor, torch.Tensor], *, extra: Any) -> Any:
        x, handed_through = pair
        y = super().forward(x) * extra["scale"] + handed_through.sin() * handed_through
        return {"pair": (y, handed_through), "twice": [y, None], "flag": 7}


class TupleToy(Toy):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        bias = torch.cos(x)
        for index, block in enumerate(self.blocks):
            out = block((x, bias), extra={"scale": x.sigmoid() * 0.5, "n": index})
            assert out["flag"] == 7
            x, bias = out["pair"][0] + 0.1 * out["twice"][0], out["pair"][1]
        return x + bias


class SharedBlocks(Toy):
    """All blocks use the same projection, and the head reads it too."""

    def __init__(self) -> None:
        super().__init__(lambda _: ToyBlock())
        for block in self.blocks:
            block.up.weight = self.blocks[0].up.weight

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        (loss,) = super().forward(x)
        return (loss + self.blocks[0].up.weight.square().sum() * 0.01,)


class SameBlock(Toy):
    """One block, run three times."""

    def __init__(self) -> None:
        super().__init__(lambda _: ToyBlock(), depth=1)
        self.blocks = nn.ModuleList([self.blocks[0]] * 3)


class AllStates(Toy):
    """The loss reads the output of every block, and the input of the first."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        x = self.enter(x)
        states = [x]
        for block in self.blocks:
            x = block(x)
            states.append(x)
        mixed = torch.stack(states).mean(0) * torch.sigmoid(states[0])
        return (self.leave(mixed).square().mean(),)


class WorkBetween(Toy):
    """Computes between blocks, with tensors of before."""

    def body(self, x: torch.Tensor) -> torch.Tensor:
        start = x
        for index, block in enumerate(self.blocks):
            x = block(x)
            if index == 1:
                x = torch.relu(x) * start + x.mean(-1, keepdim=True)
                x += 1.0
        return x


class WeightBetween(Toy):
    """Code behind a block uses weights of that block, too."""

    def body(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x) + block.down.bias + block.up.weight.sum()
        return x


class StatisticsBlock(ToyBlock):
    """Keeps running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("fixed", torch.linspace(0, 1, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return super().forward(self.norm(x) * self.count + self.fixed)


class InPlaceBlock(ToyBlock):
    """Changes its own intermediate results in place."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        gate = torch.sigmoid(h)
        h = h * 2
        square = h.detach() * 3
        h += gate
        h.relu_()
        return (x + self.down(h) + square.mean()).mul_(0.5)


class DropoutBlock(ToyBlock):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise = torch.rand_like(x)
        x = nn.functional.dropout(super().forward(x), 0.3, self.training)
        return x + noise * torch.randn(WIDTH)


class FreezableToy(Toy):
    """A frozen start and frozen parts of later blocks; one parameter is never used."""

    def __init__(self) -> None:
        super().__init__(lambda _: ToyBlock())
        self.unused = nn.Parameter(torch.ones(3))
        for parameter in (*self.enter.parameters(), *self.blocks[0].parameters()):
            parameter.requires_grad_(False)
        self.blocks[1].up.weight.requires_grad_(False)
        self.blocks[2].idle = nn.Linear(2, 2)


class NoGradPart(Toy):
    """Runs its first block without gradients."""

    def body(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = self.blocks[0](x)
        return self.blocks[2](self.blocks[1](x + y))


class Checkpointed(Toy):
    """Checkpoints its blocks by itself."""

    def body(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


class WeightArgument(Toy):
    """Passes a parameter, and a view of one, to every block."""

    class Block(ToyBlock):
        def forward(self, x: torch.Tensor, bias: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
            return super().forward(x + bias) * row.cos()

    def __init__(self) -> None:
        super().__init__(lambda _: WeightArgument.Block())
        self.table = nn.Parameter(torch.randn(3, WIDTH))
        self.bias = nn.Parameter(torch.randn(WIDTH))

    def body(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.bias.exp()
        row = self.table[1]
        for block in self.blocks:
            x = block(x, self.bias, row)
        return x


class ChunkedToy(Toy):
    """Blocks of unequal size and class."""

    def __init__(self) -> None:
        super().__init__(lambda index: ToyBlock(4 + 3 * index))
        self.blocks[1] = InPlaceBlock(5)


TOYS: dict[str, Callable[[], Toy]] = {
    "plain": lambda: Toy(lambda _: ToyBlock()),
    "nested arguments": lambda: TupleToy(lambda _: TupleBlock()),
    "shared parameters": SharedBlocks,
    "same block": SameBlock,
    "all states in the loss": lambda: AllStates(lambda _: ToyBlock()),
    "work between blocks": lambda: WorkBetween(lambda _: ToyBlock()),
    "weights between blocks": lambda: WeightBetween(lambda _: ToyBlock()),
    "running statistics": lambda: Toy(lambda _: StatisticsBlock()),
    "changes in place": lambda: Toy(lambda _: InPlaceBlock()),
    "random numbers": lambda: Toy(lambda _: DropoutBlock()),
    "frozen parameters": FreezableToy,
    "part without gradients": lambda: NoGradPart(lambda _: ToyBlock()),
    "checkpointing": lambda: Checkpointed(lambda _: ToyBlock()),
    "weights as arguments": WeightArgument,
    "unequal blocks": ChunkedToy,
}
