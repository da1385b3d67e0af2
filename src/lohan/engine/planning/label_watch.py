"""Whether a loss counts the label of a sequence's first token, found out by running it.

Owns following the values of `labels` through a run on fake tensors, which have none, to where a
cross entropy reads them. Whether a model shifts its labels is in its code alone: neither its name
nor its configuration says it. Used by `traced_model`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from lohan.model.tracing.trace_ops import overwritten_by, storage_key, tensors_in

IGNORED_LABEL = -100
_ATEN = torch.ops.aten
_CROSS_ENTROPIES = (_ATEN.nll_loss_forward, _ATEN.nll_loss2d_forward)


class LabelWatch(TorchDispatchMode):  # type: ignore[no-untyped-call, unused-ignore]
    """Computes with real values what is made from the labels alone, beside the fake tensors.

    Of the real labels only the first of each sequence count, so a loss that reads any does.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self.counts_first: bool | None = None
        """None as long as no cross entropy has read labels."""
        self._real: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by id; both stay alive

    @contextmanager
    def following(self, inputs: Mapping[str, Any]) -> Iterator[None]:
        """Follow the labels of these until the loss is there; then hold none of them any more."""
        self._begin(inputs["labels"])
        try:
            with self:
                yield
        finally:
            self._real.clear()

    def _begin(self, labels: torch.Tensor) -> None:
        with unset_fake_temporarily():
            real = torch.full(labels.shape, IGNORED_LABEL, dtype=labels.dtype, device="cpu")
            real[..., 0] = 0
        self._real[id(labels)] = (labels, real)

    def __exit__(self, *raised: Any) -> None:
        """What was followed is over with the loss: whoever traced it looks for what is kept."""
        self._real = {}
        super().__exit__(*raised)  # type: ignore[no-untyped-call, unused-ignore]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func._overloadpacket in _CROSS_ENTROPIES:
            self._note_loss(target=args[1], ignored=args[4])
        given = tensors_in((args, kwargs))
        if given and all(id(tensor) in self._real for tensor in given):
            self._compute(func, args, kwargs, result)
        else:
            self._forget(overwritten_by(func, args, kwargs))
        return result

    def _note_loss(self, *, target: torch.Tensor, ignored: int) -> None:
        if id(target) in self._real:
            with unset_fake_temporarily():
                counts = bool((self._real[id(target)][1] != ignored).any())
            self.counts_first = counts or bool(self.counts_first)

    def _compute(self, func: Callable[..., Any], args: Any, kwargs: Any, result: Any) -> None:
        with unset_fake_temporarily():
            real = func(*tree_map(self._as_real, args), **tree_map(self._as_real, kwargs))
        for fake, one in zip(tree_leaves(result), tree_leaves(real), strict=True):
            if isinstance(fake, torch.Tensor):
                self._real[id(fake)] = (fake, one)

    def _as_real(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.device):
            return torch.device("cpu")
        return self._real[id(leaf)][1] if isinstance(leaf, torch.Tensor) else leaf

    def _forget(self, written: Iterable[torch.Tensor]) -> None:
        """What something unknown is written into has no known values any more, nor its views."""
        for tensor in written:
            if id(tensor) in self._real:
                memory = storage_key(self._real[id(tensor)][1])
                self._real = {
                    key: pair for key, pair in self._real.items() if storage_key(pair[1]) != memory
                }
