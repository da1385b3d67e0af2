"""Small modules with one unusual trait each, for finding blocks and tracing."""

import torch
from torch import nn

WIDTH = 8


class Mix(nn.Module):
    """The plainest block: one projection added to its input."""

    def __init__(self, width: int = WIDTH, layer_idx: int = 0) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.fc = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.fc(x)


class Model(nn.Module):
    """An embedding, the blocks it is given, and a head."""

    def __init__(self, blocks: list[nn.Module], container: type = nn.ModuleList) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, WIDTH)
        self.blocks = nn.Sequential(*blocks) if container is nn.Sequential else container(blocks)
        self.head = nn.Linear(WIDTH, 16)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x).float().mean()


def mixes(count: int) -> list[nn.Module]:
    return [Mix(layer_idx=index) for index in range(count)]
