"""Where two trainings differ first, if they do.

Owns what equal means: every bit; or within a tolerance where a model has no bits of its own to
compare with (note "Tolerance"). Runs nothing. Called by `compare`.

Note "Tolerance". On a GPU too every bit is compared, under deterministic algorithms, with the plain
run on the same GPU. Some operators have no deterministic form there: a model whose own second run
in memory has other bits is judged by size. Such differences are of the size of bf16 rounding. A
tensor is compared by how far training has moved it: the difference (as a norm) may be a small share
of that way. A lost, doubled or stale update differs by about the way itself.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from lohan.verify.plain_loop import TensorStates, Trained

TOLERANCE = 0.05
"""Share of the way a tensor moved, or of a loss; see note "Tolerance"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first thing that is not the same."""

    step: int
    """Counts from 1: during this step, or after its update."""
    what: str
    """Such as `master of model.layers.0.mlp.up_proj.weight`."""
    expected: float
    found: float
    """Of the first element that differs."""
    num_different: int = 1
    num_elements: int = 1
    num_more: int = 0
    """Further tensors that differ after the same step."""

    @property
    def words(self) -> str:
        """For people."""
        where = f"step {self.step}: {self.what} is {self.found!r} offloaded and "
        where += f"{self.expected!r} in memory"
        if self.num_elements > 1:
            where += f" ({self.num_different:,} of {self.num_elements:,} elements differ)"
        if self.num_more:
            where += f"; {self.num_more} more differ after this step"
        return where


def first_difference(
    expected: Trained, found: Trained, *, tolerance: float | None
) -> Difference | None:
    """The first difference by step, then by what comes first: losses, norm, tensors.

    Args:
        expected: with the states after every step.
        found: with the states after some.
        tolerance: None: every bit.
    """
    for number, one in enumerate(found.steps, start=1):
        judge = expected.steps[number - 1]
        for index, (right, left) in enumerate(zip(judge.losses, one.losses, strict=True)):
            if not _is_equal(right, left, tolerance):
                what = f"loss of micro-batch {index}"
                return Difference(step=number, what=what, expected=right, found=left)
        norms = judge.grad_norm, one.grad_norm
        if (norms[0] is None) != (norms[1] is None) or not _is_equal(
            norms[0] or 0.0, norms[1] or 0.0, tolerance
        ):
            return Difference(
                step=number,
                what="global norm of the gradients",
                expected=math.nan if norms[0] is None else norms[0],
                found=math.nan if norms[1] is None else norms[1],
            )
        if number in found.states:
            first = expected.states[0]
            differing = list(
                _differing(expected.states[number], found.states[number], first, number, tolerance)
            )
            if differing:
                return replace(differing[0], num_more=len(differing) - 1)
    return None


def _differing(
    expected: Mapping[str, TensorStates],
    found: Mapping[str, TensorStates],
    first: Mapping[str, TensorStates],
    step: int,
    tolerance: float | None,
) -> Iterator[Difference]:
    for name, states in expected.items():
        for part, label in (("master", "master"), ("first_moment", "m"), ("second_moment", "v")):
            what = f"{label} of {name}"
            if name not in found:
                yield Difference(step=step, what=what, expected=0.0, found=math.nan)
                continue
            right, left = getattr(states, part), getattr(found[name], part)
            if tolerance is not None and is_near(
                right, left, getattr(first[name], part), tolerance
            ):
                continue
            unequal = bits_of(right) != bits_of(left)
            if unequal.any():
                at = int(unequal.view(-1).nonzero()[0])
                yield Difference(
                    step=step,
                    what=what,
                    expected=float(right.view(-1)[at]),
                    found=float(left.view(-1)[at]),
                    num_different=int(unequal.sum()),
                    num_elements=unequal.numel(),
                )


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """fp32 values as whole numbers: -0.0 is not 0.0, and a NaN is equal to itself."""
    return tensor.contiguous().view(torch.int32)


def is_near(
    expected: torch.Tensor, found: torch.Tensor, first: torch.Tensor, tolerance: float
) -> bool:
    """Whether two tensors differ by a small share of the way from `first`; see "Tolerance"."""
    way = float((expected - first).norm())
    apart = float((found - expected).norm())
    return math.isfinite(apart) and apart <= tolerance * way


def _is_equal(expected: float, found: float, tolerance: float | None) -> bool:
    if tolerance is None:
        return expected == found or (math.isnan(expected) and math.isnan(found))
    return abs(expected - found) <= tolerance * abs(expected)
