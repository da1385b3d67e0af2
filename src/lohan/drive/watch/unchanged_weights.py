"""A forward leaves weights alone: they are there only while they are needed.

Owns noticing a forward that does not, before its step has changed anything. Called by
`passes` around the forward of each segment.
"""

import contextlib
from collections.abc import Iterator, Mapping

import torch

from lohan.errors import ConfigError

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PIECE_ELEMENTS = 1 << 17


@contextlib.contextmanager
def weights_unchanged(
    weights: Mapping[str, torch.nn.Parameter], what: str, *, should_look_closely: bool
) -> Iterator[None]:
    """Only updates change weights: what a forward does to them leaves with them.

    Args:
        should_look_closely: read all values. Versions do not tell what was done to `.data`.

    Raises:
        ConfigError: some were changed.
    """
    before = [_look_of(parameter, should_look_closely) for parameter in weights.values()]
    yield
    for (name, parameter), then in zip(weights.items(), before, strict=True):
        if _look_of(parameter, should_look_closely) != then:
            raise ConfigError(
                f"{name} was changed in place by the forward of {what}",
                why="weights are there only while they are needed, and come again as their "
                "last update has left them",
                remedy="leave out what changes them (max_norm of an embedding, clamping), or "
                "compute with a changed copy: `weight = self.weight.clamp(-1, 1)`",
            )


def _look_of(parameter: torch.nn.Parameter, should_look_closely: bool) -> tuple[int, int, int]:
    total = _sum_of_bits(parameter.detach()) if should_look_closely else 0
    return parameter._version, parameter.data_ptr(), total


def _sum_of_bits(weight: torch.Tensor) -> int:
    """Bits, not numbers: a sum of NaNs tells nothing. Takes next to no memory: torch turns what is
    narrower than a word into words before it adds, four times the size of a weight."""
    if weight.itemsize not in _INTEGERS:
        return 0
    flat = weight.reshape(-1)
    per_word = 8 // weight.itemsize
    if flat.numel() % per_word == 0 and flat.storage_offset() % per_word == 0:
        return int(flat.view(torch.int64).sum())
    pieces = flat.view(_INTEGERS[weight.itemsize]).split(_PIECE_ELEMENTS)
    return sum(int(piece.sum()) for piece in pieces)
