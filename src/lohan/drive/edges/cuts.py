"""Cutting the graph where tensors enter and leave a block, and joining the gradients again.

Note "Order of sums". Plain autograd runs the backward operators of one graph in the reverse of
the order in which their forward operators ran, and adds the gradients of a tensor with several
readers one by one in that order. A cut graph adds them in the same order if each part starts
from the sum of the parts after it, instead of adding whole parts: ((a + b) + c) + d, not
(a + b) + (c + d). So an unfinished sum is handed to the next part as a root of its backward: the
engine puts roots into the sums first. This holds for tensors and for tied parameters alike.

Owns the two cut operators and the unfinished sums of a micro-batch. Called by `block_run` (blocks)
and `outside_run` (everything else).
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from lohan.errors import ConfigError

Edge = tuple[Node, int]
"""Where a tensor's gradient is summed: the operator that made it and which of its outputs."""


def edge_of(tensor: torch.Tensor) -> Edge:
    """The edge of a tensor that requires a gradient."""
    edge = get_gradient_edge(tensor)
    return edge.node, edge.output_nr


def as_gradient_edge(edge: Edge) -> GradientEdge:
    """The form in which torch.autograd takes an edge."""
    return GradientEdge(*edge)


def leaf_of(node: Node) -> torch.Tensor | None:
    """The leaf tensor whose gradient a node collects, if it is such a node."""
    leaf = getattr(node, "variable", None)
    return leaf if isinstance(leaf, torch.Tensor) else None


# The cut operators declare a gradient by depending on this; nothing ever flows into it.
def _anchor() -> torch.Tensor:
    return torch.zeros((), requires_grad=True, device="cpu")


class _Enter(torch.autograd.Function):
    """Start of a block's graph: keeps the gradient that arrives, unchanged in bits and strides."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, value: torch.Tensor, deliver: Callable[[Any], None]
    ) -> torch.Tensor:
        ctx.deliver = deliver
        # Where nothing arrives, nothing goes on: zeros would be a gradient for what is in front.
        ctx.set_materialize_grads(False)
        return value.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if gradients[0] is not None:
            ctx.deliver(gradients[0])
        return None, None, None


class _Exit(torch.autograd.Function):
    """End of the graph of what follows a block; holds no tensor, so the value may leave."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return value.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise AssertionError("gradients are taken before they reach a cut")


def enter(value: torch.Tensor, deliver: Callable[[torch.Tensor], None]) -> torch.Tensor:
    """`value` as the start of a new graph; its whole gradient goes to `deliver`."""
    entered: torch.Tensor = _Enter.apply(_anchor(), value, deliver)  # type: ignore[no-untyped-call]
    return entered


def leave(value: torch.Tensor) -> torch.Tensor:
    """`value` as a tensor that requires a gradient, cut off from how it was made."""
    left: torch.Tensor = _Exit.apply(_anchor(), value)  # type: ignore[no-untyped-call]
    return left


def is_enter(node: Node) -> bool:
    """Whether a node is the cut in front of a block."""
    return isinstance(node, _Enter._backward_cls)


def is_exit(node: Node) -> bool:
    """Whether a node is the cut behind a block."""
    return isinstance(node, _Exit._backward_cls)


def refuse_kept(_: torch.Tensor) -> None:
    """A gradient has come to the forward of a block, which is over: its backward comes later, or is
    another run."""
    raise ConfigError(
        "a tensor with a gradient that a block made and did not return is used outside of it",
        why="the block is run again for its backward, and only what it returned leads there; an "
        "attribute or a hook has carried this one out (an auxiliary loss?)",
        remedy="return it from the block, or detach it",
    )


def refuse_foreign_leaves(roots: Sequence[Node], own: Collection[torch.Tensor], what: str) -> None:
    """Only arguments and own parameters may feed the graph of a block."""
    to_visit = list(roots)
    visited = set(to_visit)
    while to_visit:
        node = to_visit.pop()
        leaf = leaf_of(node)
        if is_exit(node) or (leaf is not None and leaf not in own):
            shape = f" of shape {tuple(leaf.shape)}" if leaf is not None else ""
            raise ConfigError(
                f"{what} uses a tensor{shape} with a gradient that is neither an argument nor a "
                "parameter of its own",
                why="its gradient would be lost or counted at the wrong time",
                remedy="pass the tensor to the block as an argument",
            )
        if not is_enter(node):
            for following, _ in node.next_functions:
                if following is not None and following not in visited:
                    visited.add(following)
                    to_visit.append(following)


class PendingGradients:
    """Sums of gradients of one micro-batch that parts still to run will add to or consume."""

    def __init__(self) -> None:
        self._of_edges: dict[Edge, torch.Tensor] = {}
        self._of_parameters: dict[torch.nn.Parameter, torch.Tensor] = {}

    def __len__(self) -> int:
        return len(self._of_edges) + len(self._of_parameters)

    @property
    def has_parameters(self) -> bool:
        """Whether there are sums of parameters."""
        return bool(self._of_parameters)

    def put(self, edge: Edge, gradient: torch.Tensor) -> None:
        """Leave the sum so far for an earlier part."""
        leaf = leaf_of(edge[0])
        if isinstance(leaf, torch.nn.Parameter):
            self.put_parameter(leaf, gradient)
            return
        assert edge not in self._of_edges, "the sum so far was not taken as a root"
        self._of_edges[edge] = gradient

    def take(self, edge: Edge) -> torch.Tensor | None:
        """The sum so far, which the taker continues."""
        leaf = leaf_of(edge[0])
        if isinstance(leaf, torch.nn.Parameter):
            return self._of_parameters.pop(leaf, None)
        return self._of_edges.pop(edge, None)

    def take_where(self, is_wanted: Callable[[Node], bool]) -> list[tuple[Edge, torch.Tensor]]:
        """All sums at nodes that are wanted."""
        edges = [edge for edge in self._of_edges if is_wanted(edge[0])]
        return [(edge, self._of_edges.pop(edge)) for edge in edges]

    def put_parameter(self, parameter: torch.nn.Parameter, gradient: torch.Tensor) -> None:
        """The same for a parameter that an earlier segment uses too."""
        assert parameter not in self._of_parameters, "the sum so far was not taken as a root"
        self._of_parameters[parameter] = gradient

    def take_all(self, parameters: Sequence[torch.nn.Parameter]) -> list[torch.Tensor | None]:
        """The sum so far of each of the parameters, None for those that have none."""
        if not self._of_parameters:
            return [None] * len(parameters)
        return [self._of_parameters.pop(parameter, None) for parameter in parameters]
