"""Driving a model in tests: hooks that keep weights away while not in use; equality of bits."""

import copy
from collections.abc import Sequence
from typing import Any

import torch

from lohan.drive import (
    Phase,
    Segment,
    SegmentedModel,
    SegmentGradients,
    SegmentMap,
)
from lohan.drive.weights.parameter_views import ParameterSet
from lohan.vocabulary import BlockId


def needed_by(segment: Segment) -> tuple[BlockId, ...]:
    """Segments whose parameters must be in place while this one runs."""
    owners = {owner for _, owner in segment.borrowed}
    return (*sorted(owners), segment.id) if segment.parameters else tuple(sorted(owners))


def gather(own: ParameterSet, flat: torch.Tensor) -> None:
    """Copy the present values of parameters into a buffer."""
    for slot in own.layout.slots:
        slot.view(flat).copy_(own.parameters[slot.name].detach())


def gradients_by_name(gradients: SegmentGradients) -> dict[str, torch.Tensor]:
    """Of the first group, without the missing ones."""
    return {
        slot.name: slot.view(gradients.flat[0])
        for slot in gradients.layout.slots
        if slot.name not in gradients.missing
    }


class ComeAndGo:
    """Hooks that bring weights for each visit in a fresh buffer and poison it afterwards."""

    def __init__(
        self,
        segments: SegmentMap,
        sets: dict[BlockId, ParameterSet],
        home: dict[BlockId, torch.Tensor] | None = None,
    ) -> None:
        """`home`: weights to bring, where the model has none of its own."""
        self.segments, self.sets = segments, sets
        self.home = dict(home or {})
        self.visits: list[tuple[str, Phase]] = []
        self.gradients: dict[str, torch.Tensor] = {}
        self.missing: set[str] = set()
        self._bound: dict[BlockId, torch.Tensor] = {}
        for segment, own in sets.items():
            if home is None:
                self.home[segment] = torch.zeros(own.layout.num_bytes, dtype=torch.uint8)
                gather(own, self.home[segment])
            own.release(torch.device("cpu"))

    def before(self, segment: BlockId, phase: Phase) -> None:
        assert not self._bound
        self.visits.append((self.segments[segment].name, phase))
        for needed in needed_by(self.segments[segment]):
            self._bound[needed] = self.home[needed].clone()
            self.sets[needed].bind(self._bound[needed])

    def recomputed(self, segment: BlockId) -> None:
        """Nothing leaves between a block's re-run and its backward."""

    def after(self, segment: BlockId, phase: Phase, gradients: SegmentGradients | None) -> None:
        for needed, flat in self._bound.items():
            self.sets[needed].release()
            flat.fill_(255)  # NaN in every floating-point type
        self._bound.clear()
        if gradients is not None:
            self.gradients.update(gradients_by_name(gradients))
            self.missing |= gradients.missing

    def gradient_buffer(self, segment: BlockId, num_bytes: int) -> torch.Tensor:
        return torch.full((num_bytes,), 255, dtype=torch.uint8)

    def abandon(self) -> None:
        """After a failed step: no segment is being visited any more."""
        for needed in self._bound:
            self.sets[needed].release()
        self._bound.clear()
        self.gradients.clear()


class StayInPlace(ComeAndGo):
    """Hooks that leave all weights in place."""

    def __init__(self, segments: SegmentMap, sets: dict[BlockId, ParameterSet]) -> None:
        super().__init__(segments, sets)
        for segment, own in sets.items():
            own.bind(self.home[segment])

    def before(self, segment: BlockId, phase: Phase) -> None:
        self.visits.append((self.segments[segment].name, phase))


def step_with_known_draws(
    driven: SegmentedModel, batches: Sequence[Any], **arguments: Any
) -> list[torch.Tensor]:
    """The draws of each shape are learned first, as an engine does it."""
    loss_fn = arguments.get("loss_fn")
    for batch in driven.unknown_batches(batches, loss_fn):
        driven.learn_draws(batch, loss_fn)
    for batch in driven.unknown_batches(batches, loss_fn):  # now it is known whether it draws
        driven.learn_draws(batch, loss_fn)
    return driven.step(batches, **arguments)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal in every bit: tells 0.0 from -0.0 and takes equal NaNs for equal."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(
        one.detach().contiguous().reshape(-1).view(torch.uint8),
        other.detach().contiguous().reshape(-1).view(torch.uint8),
    )


def assert_same_gradients(ours: dict[str, torch.Tensor], plain: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == plain.keys()
    different = [name for name in plain if not same_bits(ours[name], plain[name])]
    assert not different, f"gradients differ: {different}"


def twin(model: torch.nn.Module) -> torch.nn.Module:
    """A copy that is trained plainly."""
    return copy.deepcopy(model)
