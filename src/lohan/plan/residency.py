"""Which states live in RAM: a static choice by traffic saved per byte, never a cache.

A byte of P16 in RAM saves two reads and a write per step; a byte of anything else one read and one
write; a byte of frozen P16 two reads. So P16 that is trained comes first, then activations, then
frozen P16, then the other states; within a kind the blocks are spread evenly, so that the drives
have the same to do all along a pass.
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


def fill_ram(
    spare_bytes: int, *, num_parameters: int, num_trained: int, swapped_bytes: int
) -> Residency:
    """Share spare RAM out by traffic saved per byte."""
    weights = min(spare_bytes, _WEIGHTS_BYTES * num_trained)
    activations = min(spare_bytes - weights, swapped_bytes)
    frozen_bytes = _WEIGHTS_BYTES * (num_parameters - num_trained)
    weights += min(spare_bytes - weights - activations, frozen_bytes)
    states = min(spare_bytes - weights - activations, _OTHER_STATES_BYTES * num_trained)
    return Residency(weights_bytes=weights, activation_bytes=activations, states_bytes=states)


def choose_residents(
    filled: Residency,
    num_parameters: Sequence[int],
    num_trained: Sequence[int],
    *,
    weights_first: bool = True,
) -> list[frozenset[TensorKind]]:
    """Resident kinds per block, whole blocks at a time; the second kind gets what is left."""
    if weights_first:
        weights, left = _spread(num_parameters, _WEIGHTS_BYTES, filled.weights_bytes)
        states, _ = _spread(num_trained, _OTHER_STATES_BYTES, filled.states_bytes + left)
    else:
        states, left = _spread(num_trained, _OTHER_STATES_BYTES, filled.states_bytes)
        weights, _ = _spread(num_parameters, _WEIGHTS_BYTES, filled.weights_bytes + left)
    return _kinds(len(num_parameters), weights, states)


def largest_residents(
    spare_bytes: int, num_parameters: Sequence[int], num_trained: Sequence[int]
) -> list[frozenset[TensorKind]]:
    """Resident kinds per block with the largest blocks first, each with all its states.

    For models of a few blocks of very different sizes, where an even spread leaves RAM empty.
    """
    states, left = set(), spare_bytes
    for number in sorted(range(len(num_trained)), key=lambda one: -num_trained[one]):
        nbytes = _OTHER_STATES_BYTES * num_trained[number] + _WEIGHTS_BYTES * num_parameters[number]
        if num_trained[number] and nbytes <= left:
            states.add(number)
            left -= nbytes
    others = [0 if number in states else count for number, count in enumerate(num_parameters)]
    weights, _ = _spread(others, _WEIGHTS_BYTES, left)
    return _kinds(len(num_parameters), weights | states, states)


def _kinds(num_blocks: int, weights: set[int], states: set[int]) -> list[frozenset[TensorKind]]:
    chosen = []
    for number in range(num_blocks):
        kinds = {TensorKind.P16} if number in weights else set()
        if number in states:
            kinds |= {TensorKind.P32, TensorKind.OS32}
        chosen.append(frozenset(kinds))
    return chosen


def _spread(counts: Sequence[int], bytes_each: int, budget_bytes: int) -> tuple[set[int], int]:
    """Blocks that fit a budget, evenly spread, and what is left of it.

    The first block comes first: nothing can hide its update from the next forward pass.
    """
    chosen: set[int] = set()
    left = budget_bytes
    share = budget_bytes / max(1, bytes_each * sum(counts))
    due = float(counts[0])
    for number, count in enumerate(counts):
        due += share * count
        if count and due >= count and count * bytes_each <= left:
            chosen.add(number)
            due -= count
            left -= count * bytes_each
    for number, count in enumerate(counts):
        if count and number not in chosen and count * bytes_each <= left:
            chosen.add(number)
            left -= count * bytes_each
    return chosen, left
