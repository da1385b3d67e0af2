"""The graph of a block's forward, kept until its backward: nothing is run again.

Owns what makes that safe while the block's weights leave and come back elsewhere (`GraphWatch`,
around the forward), and the backward through such a graph (`KeptGraph`). Whether one may be kept is
up to the plan (`BlockChoices.graph_bytes`), and then to what the watch has seen. Called by
`block_run`, which runs the block again wherever no graph was kept.

Note "What a kept graph may hold". Tensors that autograd saves go through the watch: weights are
remembered by place and looked up in the buffer of the backward, everything else stays as it is and
is checked for changes in place, as autograd does without hooks. Other ways to hold a weight
(attributes of a Function's `ctx`, hooks of the block's own) do not go through it; they show as
one more user of the weights' memory after the forward.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge, saved_tensors_hooks

from lohan.drive.edges.cuts import Deliveries, Edge, PendingGradients, refuse_kept
from lohan.drive.weights.parameter_views import WeightPlace, Weights
from lohan.errors import ConfigError
from lohan.model.tracing.trace_ops import storage_key

_SLACK_BYTES = 4096
"""Beyond what the plan counts: small constants that the block's code makes."""


@dataclass(frozen=True, slots=True)
class _Saved:
    """A saved tensor that is no weight."""

    tensor: torch.Tensor
    version: int


class GraphWatch:
    """Watches one forward of a block: what its graph holds on to."""

    def __init__(
        self,
        name: str,
        *,
        weights: Weights,
        parameters: Sequence[torch.Tensor],
        outside: Iterable[torch.Tensor],
        graph_bytes: int,
    ) -> None:
        """
        Args:
            parameters: those in place for the block.
            outside: tensors that are there anyway.
            graph_bytes: how much the graph may hold of all else.
        """
        self._name, self._weights, self._parameters = name, weights, parameters
        self._seen = {storage_key(tensor) for tensor in outside if tensor.layout is torch.strided}
        self._num_users = self._count_users()
        self._num_bytes, self._most_bytes = 0, graph_bytes + _SLACK_BYTES

    def hooks(self) -> saved_tensors_hooks:
        """To be entered around the forward."""
        return saved_tensors_hooks(self._pack, partial(_unpack, self._name))

    def may_keep(self) -> bool:
        """Whether the graph holds no weight and no more than it may, now that the forward has
        ended."""
        return self._num_bytes <= self._most_bytes and not self.has_more_users()

    def has_more_users(self) -> bool:
        """Whether something holds a weight now that did not before."""
        return self._count_users() > self._num_users

    def _pack(self, tensor: torch.Tensor) -> WeightPlace | _Saved:
        place = self._weights.place_of(tensor)
        if place is not None:
            return place
        if tensor.layout is torch.strided:
            memory = tensor.untyped_storage()
            if memory._cdata not in self._seen:
                self._seen.add(memory._cdata)
                self._num_bytes += memory.nbytes()
        # A name of its own: an output and the operator that saves it would hold each other.
        return _Saved(tensor.detach(), tensor._version)

    def _count_users(self) -> int:
        storages = {storage_key(parameter) for parameter in self._parameters}
        return sum(torch._C._storage_Use_Count(storage) for storage in storages)


def refuses_hooks(error: RuntimeError) -> bool:
    """Whether an error of a watched forward is about the watch: `torch.func` allows no hooks."""
    return "support saved tensor hooks" in str(error)


def _unpack(name: str, packed: WeightPlace | _Saved) -> torch.Tensor:
    if isinstance(packed, WeightPlace):
        if not packed.own.has(packed.name):
            refuse_kept()
        return packed.tensor()
    if packed.tensor._version != packed.version:
        raise ConfigError(
            f"a tensor of shape {tuple(packed.tensor.shape)} that {name} keeps for its backward "
            "was changed in place",
            why="the backward of the operator that saved it would compute a wrong gradient",
            remedy="write `x = x + y` instead of `x += y`",
        )
    return packed.tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptGraph:
    """The graph of one block and micro-batch, by its ends; holds none of its tensors itself."""

    outputs: tuple[GradientEdge | None, ...]
    """Where the gradient of each output leaf goes in; None for those without one."""
    starts: tuple[tuple[Edge, GradientEdge], ...]
    """For each tensor that entered with a gradient: where that goes, and where it comes out."""
    deliveries: Deliveries

    def backward(
        self,
        arrived: Sequence[torch.Tensor | None],
        *,
        pending: PendingGradients,
        parameters: Sequence[torch.nn.Parameter],
        check: Callable[[list[Node]], None] | None,
        on_recomputed: Callable[[], None],
    ) -> None:
        """Send gradients through it, as `BlockRunner.backward` does; once.

        Roots come in the order of a re-run, so sums do too (note "Order of sums" in `cuts`).
        """
        roots = [
            (start, so_far)
            for edge, start in self.starts
            if (so_far := pending.take(edge)) is not None
        ]
        for output, gradient in zip(self.outputs, arrived, strict=True):
            if gradient is not None:
                assert output is not None
                roots.append((output, gradient))
        for parameter, so_far in pending.take_parameters(parameters):
            roots.append((get_gradient_edge(parameter), so_far))
        edges = [edge for edge, _ in roots]
        gradients = [gradient for _, gradient in roots]
        del roots, arrived
        if check is not None:
            check([edge.node for edge in edges])
        on_recomputed()
        self.deliveries.is_open = True
        torch.autograd.backward(edges, gradients)
        self.deliveries.is_open = False
        for outer, gradient in self.deliveries.gradients.items():
            pending.put(outer, gradient)
        self.deliveries.gradients.clear()
