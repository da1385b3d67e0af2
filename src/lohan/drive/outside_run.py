"""The model's code outside its blocks: run once under autograd, its graph kept until backward.

Owns two things that make this safe while weights come and go: tensors saved for backward that
are weights are remembered by place and looked up again (`weights_by_place`), and use of a weight
that is offloaded is refused (`PresenceMode`); and the backward of one stretch of that graph
(`rest_backward`), which stops where the stretch began. Called by `segmented_model`.
"""

from collections.abc import Callable, Container, Iterable
from typing import Any

import torch
from torch.autograd.graph import Node, saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from lohan.drive.edges.cuts import (
    Edge,
    PendingGradients,
    as_gradient_edge,
    is_exit,
    leaf_of,
)
from lohan.drive.weights.parameter_views import WeightPlace, Weights, may_be_absent
from lohan.errors import ConfigError, ScheduleError


def weights_by_place(weights: Weights) -> saved_tensors_hooks:
    """Within it, a graph keeps no weights alive and reads those in place when it runs backward."""

    def pack(tensor: torch.Tensor) -> torch.Tensor | WeightPlace:
        # Not the tensor itself: where it is an output, it and its operator would hold each other.
        return weights.place_of(tensor) or tensor.detach()

    def unpack(packed: torch.Tensor | WeightPlace) -> torch.Tensor:
        return packed.tensor() if isinstance(packed, WeightPlace) else packed

    return saved_tensors_hooks(pack, unpack)


class PresenceMode(TorchDispatchMode):
    """Refuses operators that read weights which are offloaded and will not come."""

    def __init__(
        self, weights: Weights, wait: Callable[[ScheduleError], None], where: Callable[[], str]
    ) -> None:
        """`wait`: for others to be in place, or raise this if none will be."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._weights, self._wait, self._where = weights, wait, where

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # A call's own arguments and lists of them: there is nothing deeper, and this is on the way
        # of every operator.
        found = [*args, *kwargs.values()] if kwargs else args
        for tensor in (
            tensor
            for one in found
            for tensor in (one if isinstance(one, list | tuple) else (one,))
            if isinstance(tensor, torch.Tensor)
        ):
            if may_be_absent(tensor):
                what = f"{func} {self._where()}"
                while (absence := self._weights.absence(tensor, what)) is not None:
                    self._wait(absence)
        return func(*args, **(kwargs or {}))


def rest_backward(
    roots: list[tuple[Edge, torch.Tensor]],
    *,
    pending: PendingGradients,
    start: int,
    hooked: Container[Edge],
    add_to_parameter: Callable[[torch.nn.Parameter, torch.Tensor], None],
) -> None:
    """Send gradients through one stretch of the rest, back to where it began.

    Args:
        roots: edges in the stretch with their gradients.
        pending: of the micro-batch; sums at the far ends are continued from it and put back.
        start: sequence number of the first operator of the stretch; earlier ones belong to
            stretches that will run later.
        hooked: edges whose tensors have hooks, for their whole sums.
        add_to_parameter: gets the micro-batch's sum for each parameter reached.
    """
    if not roots:
        return
    ends = _ends((edge for edge, _ in roots), start)
    if any(edge in hooked for edge in ends):
        raise ConfigError(
            "a tensor with a hook on its gradient enters a block, and is used again later",
            why="its gradient is summed up part by part, and the hook is for the whole",
            remedy="put the hook on a tensor made from it: `y = x.view_as(x)`, and go on with "
            "that one",
        )
    seeds = [(edge, so_far) for edge in ends if (so_far := pending.take(edge)) is not None]
    everything = [*roots, *seeds]
    gradients = torch.autograd.grad(
        [as_gradient_edge(edge) for edge, _ in everything],
        [as_gradient_edge(edge) for edge in ends],
        [gradient for _, gradient in everything],
        allow_unused=True,
    )
    for edge, gradient in zip(ends, gradients, strict=True):
        if gradient is None:
            continue
        leaf = leaf_of(edge[0])
        if leaf is None:
            pending.put(edge, gradient)
        elif isinstance(leaf, torch.nn.Parameter):
            add_to_parameter(leaf, gradient)
        else:
            add_to_leaf(leaf, gradient)


def add_to_leaf(leaf: torch.Tensor | None, gradient: torch.Tensor) -> None:
    """For a leaf of the caller's (part of the batch): as plain backward treats it."""
    assert leaf is not None
    leaf.grad = gradient if leaf.grad is None else leaf.grad + gradient


def _ends(roots: Iterable[Edge], start: int) -> list[Edge]:
    """Edges over which gradients leave the stretch: leaves, cuts behind blocks, earlier code."""
    ends: dict[Edge, None] = {}
    to_visit: list[Node] = []
    visited: set[Node] = set()

    def reach(edge: Edge) -> None:
        node = edge[0]
        if leaf_of(node) is not None or is_exit(node) or node._sequence_nr() < start:
            ends[edge] = None
        elif node not in visited:
            visited.add(node)
            to_visit.append(node)

    for root in roots:
        reach(root)
    while to_visit:
        for following, output_nr in to_visit.pop().next_functions:
            if following is not None:
                reach((following, output_nr))
    _refuse_ways_around(ends, start)
    return list(ends)


def _refuse_ways_around(ends: Iterable[Edge], start: int) -> None:
    """No end may be reached both inside the stretch and through earlier code.

    Autograd would then run the earlier code too, before its other gradients have arrived, and that
    code's own stretch would send them a second time.
    """
    reached = {node for node, _ in ends}
    earlier = [node for node in reached if leaf_of(node) is None and not is_exit(node)]
    visited = set(earlier)
    while earlier:
        node = earlier.pop()
        for following, _ in () if is_exit(node) else node.next_functions:
            if following is not None and following in reached:
                raise _way_around(leaf_of(following))
            if following is not None and following not in visited:
                visited.add(following)
                earlier.append(following)


def _way_around(leaf: torch.Tensor | None) -> ConfigError:
    if leaf is not None:
        return ConfigError(
            f"a parameter of shape {tuple(leaf.shape)} is used before and after the blocks, "
            "and a tensor computed from it before them is used after them directly",
            why="its gradient cannot be cut in two where the blocks are",
            remedy="untie the parameter, or pass the tensor through the blocks",
        )
    return ConfigError(
        "a tensor from before a block is used after it directly, and so is another one that was "
        "computed from it outside the blocks",
        why="its gradient would be summed up twice: once along each of the two",
        remedy="use only one of them after the blocks (compute the other one from it again there), "
        "or do what lies between them inside a block",
    )
