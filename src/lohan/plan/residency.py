"""Which states live in RAM: a static choice by traffic saved per byte, never a cache.

A byte of P16 in RAM saves two reads and a write per step; a byte of anything else one read and one
write. So P16 comes first, then activations, then the other states; within a kind the first blocks
come first, whose updates are last and whose weights the next step needs at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from lohan.vocabulary import TensorKind

_WEIGHTS_BYTES = 2
_OTHER_STATES_BYTES = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Residency:
    """How the RAM beyond the buffers is shared out."""

    weights_bytes: int
    activation_bytes: int
    states_bytes: int


def fill_ram(spare_bytes: int, *, num_parameters: int, swapped_bytes: int) -> Residency:
    """Share spare RAM out by traffic saved per byte."""
    weights = min(spare_bytes, _WEIGHTS_BYTES * num_parameters)
    activations = min(spare_bytes - weights, swapped_bytes)
    states = min(spare_bytes - weights - activations, _OTHER_STATES_BYTES * num_parameters)
    return Residency(weights_bytes=weights, activation_bytes=activations, states_bytes=states)


def choose_residents(
    filled: Residency,
    num_parameters: Sequence[int],
    tied: Sequence[tuple[int, int, int]] = (),
) -> list[frozenset[TensorKind]]:
    """Resident kinds per block, whole blocks at a time, first blocks first."""
    weights_left, states_left = filled.weights_bytes, filled.states_bytes
    chosen: list[set[TensorKind]] = []
    for count in num_parameters:
        kinds = set()
        if count * _WEIGHTS_BYTES <= weights_left:
            weights_left -= count * _WEIGHTS_BYTES
            kinds.add(TensorKind.P16)
        if count * _OTHER_STATES_BYTES <= states_left:
            states_left -= count * _OTHER_STATES_BYTES
            kinds |= {TensorKind.P32, TensorKind.OS32}
        chosen.append(kinds)
    for owner, other, _count in tied:
        # One tensor, one home: the block that shares it reads it where its owner keeps it.
        if TensorKind.P16 not in chosen[owner]:
            chosen[other].discard(TensorKind.P16)
    return [frozenset(kinds) for kinds in chosen]
