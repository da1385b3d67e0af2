"""A graph run beside a block's own code, to be compared to the bit before it may stand for it.

Owns the comparison, by fingerprints: no tensor is kept, so a trial takes no more memory than the
run itself. Called by `block_run` in the first backward of a block called in a new way.

Note "Sums in any order". Some kernels of GPUs add up as threads come (the backward of attention
does), and have other bits in every run. So a graph runs twice on an accelerator: what differs from
itself is compared by shape, strides and type alone, and everything else by its bits.
"""

import contextlib
from collections.abc import Hashable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from lohan.drive.captured.graphs import Graph
from lohan.drive.captured.record import Arrived
from lohan.drive.edges.cuts import Edge
from lohan.drive.surroundings.randomness import Generators, RandomState

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FACTOR, _NEXT = 0x9E3779B97F4A7C1, 0x100000001B3
_NUM_PIECES, _LEAST_ELEMENTS = 64, 128
"""A fingerprint takes memory for one piece of a tensor, in words."""
_NOTHING: frozenset[int] = frozenset()
Fingerprint = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, int]


class Trial:
    """A graph run beside the block's own code, to be compared to the bit."""

    def __init__(self, graph: Graph, edges: Sequence[Edge]) -> None:
        self.graph, self._edges = graph, edges
        self._made: dict[int, Fingerprint] = {}
        """By place among the gradients; outputs are counted down from -1."""
        self._found: dict[int, Fingerprint] = {}
        """The same of the block's own code."""
        self.unsteady: set[int] = set()
        """See note "Sums in any order"."""
        self.pattern: Hashable = None
        """Which gradients arrived."""
        self._trained: list[torch.nn.Parameter] = []

    def run(
        self,
        given: list[torch.Tensor],
        starts: Arrived,
        parameters: Sequence[torch.nn.Parameter],
        generators: Generators,
        random_state: RandomState | None,
    ) -> None:
        """Forward and backward with nothing stored; keeps no tensor. The generators are moved."""
        self._trained = [parameter for parameter in parameters if parameter.requires_grad]
        self.pattern = starts.pattern
        self._made = self._run(given, starts, generators, random_state)
        if any(tensor.device.type != "cpu" for tensor in given):
            again = self._run(given, starts, generators, random_state)
            self.unsteady = {place for place, one in again.items() if one != self._made[place]}

    def _run(
        self,
        given: list[torch.Tensor],
        starts: Arrived,
        generators: Generators,
        random_state: RandomState | None,
    ) -> dict[int, Fingerprint]:
        found: dict[int, Fingerprint] = {}
        backward = self.graph.backward(self.pattern, _NOTHING)
        assert backward is not None
        states: dict[int, RandomState] = {}
        if random_state is not None:
            generators.set_state(random_state)

        def take(place: int, gradient: torch.Tensor) -> None:
            found[place] = fingerprint(gradient)

        with torch._C._AutoDispatchBelowAutograd():
            made = self.graph.forward(_NOTHING)[1](
                given, _nothing_stored, lambda place: states.__setitem__(place, generators.state())
            )
            found.update((~number, fingerprint(tensor)) for number, tensor in enumerate(made))
            del made
            backward(
                [*given, *starts.present()],
                _nothing_stored,
                lambda place: generators.set_state(states[place]),
                lambda: None,
                take,
            )
        return found

    def note_outputs(self, leaves: Sequence[Any]) -> None:
        """What the block's own code made."""
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self._found = {~number: fingerprint(tensor) for number, tensor in enumerate(tensors)}

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Look at the gradients of parameters as they arrive."""
        first = len(self._edges)

        def look(place: int, gradient: torch.Tensor) -> None:
            self._found[place] = fingerprint(gradient)

        handles = [
            parameter.register_hook(partial(look, first + number))
            for number, parameter in enumerate(self._trained)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def difference(self, delivered: Mapping[Edge, torch.Tensor]) -> str | None:
        """What differs; None if nothing does."""
        for place, edge in enumerate(self._edges):
            if edge in delivered:
                self._found[place] = fingerprint(delivered[edge])
        for place in sorted({*self._made, *self._found}):
            made, found = self._made.get(place), self._found.get(place)
            is_same = made == found
            if place in self.unsteady and made is not None and found is not None:
                is_same = made[:-1] == found[:-1]
            if not is_same:
                return "output" if place < 0 else "gradient"
        return None


def _nothing_stored(*_: Any) -> Any:
    raise AssertionError("nothing is stored")


def fingerprint(tensor: torch.Tensor) -> Fingerprint:
    """Equal for equal tensors: shape, strides, type and every bit at its place."""
    tensor = tensor.detach()
    steps = [s for s, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]
    shape, dtype = tuple(tensor.shape), tensor.dtype
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    # In the order of memory, which takes no copy; strides tell what that is.
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    flat = tensor.resolve_neg().permute(order).reshape(-1).view(_INTEGERS[tensor.itemsize])
    piece_elements = max(_LEAST_ELEMENTS, flat.numel() // _NUM_PIECES)
    places = torch.arange(1, 2 * piece_elements, 2, device=tensor.device).mul_(_FACTOR)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for piece in flat.split(piece_elements):
        number = piece.to(torch.int64).mul_(places[: piece.numel()]).sum()
        total = total * _NEXT + number
    return shape, tuple(steps), dtype, int(total)
