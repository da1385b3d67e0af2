"""The loss of a language model without its logits: products, softmax and gradients in pieces.

Owns the arithmetic (`chunked_cross_entropy`) and what stands in for the logits while a model
computes its loss (`loss_in_chunks`). How many pieces is the plan's decision, which heads have such
a loss is seen by `model.loss_head`. Used by `segmented_model`.

Note "Equal bits". Rows of logits, of their softmax and of gradients for what enters the head are
each computed from one row, so pieces of rows have the bits of the whole. A gradient of the weight
is a sum over all rows: for it the pieces are of the vocabulary, each over all rows in one product,
so that it is added up as in the whole. That costs the logits twice more. A library may still
choose another kernel for a smaller product, which adds up in another order. On the processor tests
show that it does not for pieces of `loss_head.UNIT` and more; of GPUs nothing is known.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional
from torch.utils._pytree import tree_map

from lohan.errors import ConfigError
from lohan.model.loss_head import LossHead, pieces

_ATEN = torch.ops.aten


class _LogProbabilities(torch.autograd.Function):
    """The logarithm of each row's probability of its target."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        num_chunks: int,
    ) -> torch.Tensor:
        found, largest, log_sums = (
            hidden.new_empty(len(hidden), 1, dtype=torch.float32) for _ in range(3)
        )
        for rows in pieces(len(hidden), num_chunks):
            logits = functional.linear(hidden[rows], weight, bias).float()
            torch.amax(logits, 1, keepdim=True, out=largest[rows])
            logs = torch.log_softmax(logits, 1)
            # Of the largest logit the softmax is one over the sum: as the kernel has added it up.
            torch.amax(logs, 1, keepdim=True, out=log_sums[rows]).neg_()
            torch.gather(logs, 1, targets[rows, None], out=found[rows])
            del logits, logs
        ctx.save_for_backward(hidden, weight, bias, targets, largest, log_sums)
        ctx.num_chunks = num_chunks
        return found.squeeze(1)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        hidden, weight, bias, targets, largest, log_sums = ctx.saved_tensors
        (gradient,) = gradients
        gradient = gradient[:, None]
        of_hidden = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            of_hidden = torch.empty_like(hidden)
            for rows in pieces(len(hidden), ctx.num_chunks):
                logs = torch.log_softmax(functional.linear(hidden[rows], weight, bias).float(), 1)
                of_logits = torch.zeros_like(logs).scatter_(1, targets[rows, None], gradient[rows])
                of_logits = _ATEN._log_softmax_backward_data(of_logits, logs, 1, logs.dtype)
                del logs
                torch.mm(of_logits.to(weight.dtype), weight, out=of_hidden[rows])
                del of_logits
        if ctx.needs_input_grad[1]:
            of_weight = torch.empty_like(weight)
            of_bias = None if bias is None else torch.empty_like(bias)
            for columns in pieces(len(weight), ctx.num_chunks):
                part = functional.linear(
                    hidden, weight[columns], None if bias is None else bias[columns]
                )
                num = part.shape[1]
                # One column more holds the gradients of targets that are not among these: the
                # kernel adds up a row's gradients.
                logs = part.new_zeros(len(hidden), num + 1, dtype=torch.float32)
                torch.sub(part, largest, out=logs[:, :num]).sub_(log_sums)
                del part
                places = targets - columns.start
                places = torch.where((places < 0) | (places >= num), num, places)[:, None]
                of_logits = torch.zeros_like(logs).scatter_(1, places, gradient)
                of_logits = _ATEN._log_softmax_backward_data(of_logits, logs, 1, logs.dtype)
                del logs
                of_logits = of_logits[:, :num].to(weight.dtype)
                torch.mm(of_logits.t(), hidden, out=of_weight[columns])
                if of_bias is not None:
                    torch.sum(of_logits, 0, out=of_bias[columns])
                del of_logits
        return of_hidden, of_weight, of_bias, None, None


def chunked_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    num_chunks: int,
    *,
    reduction: str = "mean",
    ignore_index: int = -100,
) -> torch.Tensor:
    """`cross_entropy(linear(hidden, weight, bias).float(), targets)`, with rows in a dimension."""
    counts = targets != ignore_index
    logs = _LogProbabilities.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, torch.where(counts, targets, 0), num_chunks
    )
    # Rows with the one logarithm that the loss picks: added up as those with all of them are.
    return functional.nll_loss(logs[:, None], torch.where(counts, 0, -100), reduction=reduction)


_TENSOR = torch.Tensor
_ROWS_TOGETHER = {_TENSOR.view, _TENSOR.reshape, _TENSOR.flatten, torch.flatten}
_AS_THEY_ARE = {_TENSOR.float, _TENSOR.contiguous}
_ASKED = {
    *(
        getattr(_TENSOR, name).__get__
        for name in ("shape", "dtype", "device", "ndim", "requires_grad")
    ),
    *(_TENSOR.size, _TENSOR.dim, _TENSOR.numel, _TENSOR.is_floating_point, torch.is_floating_point),
}


class _AbsentLogits(torch.Tensor):
    """Has the shape of logits, and what they would be computed from. Asked for contents it computes
    them all in an evaluation, and refuses in a step."""

    head: torch.nn.Linear
    hidden: torch.Tensor
    num_chunks: int
    is_training: bool

    @staticmethod
    def of(
        head: torch.nn.Linear, hidden: torch.Tensor, num_chunks: int, like: Any
    ) -> "_AbsentLogits":
        """`like`: a tensor that has their shape and type."""
        made: _AbsentLogits = torch.Tensor._make_wrapper_subclass(
            _AbsentLogits, like.shape, dtype=like.dtype, device=hidden.device
        )
        made.head, made.hidden, made.num_chunks = head, hidden, num_chunks
        made.is_training = torch.is_grad_enabled()
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in _ASKED:
                return func(*args, **kwargs)
            own = args[0] if args and isinstance(args[0], cls) else kwargs.get("input")
            if isinstance(own, cls):
                found = own._without_contents(func, args, kwargs)
                if found is not None:
                    return found
            return cls.__torch_dispatch__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        whole = functools.partial(_whole, getattr(func, "__name__", str(func)))
        return func(*tree_map(whole, args), **tree_map(whole, kwargs or {}))

    def _without_contents(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        if func is functional.cross_entropy:
            return self._loss(*args[1:], **{n: v for n, v in kwargs.items() if n != "input"})
        if func is _TENSOR.to:
            # To where it would be: of the rest only another type needs no contents.
            args = (self, *(one for one in args[1:] if one not in (self.device, str(self.device))))
            if kwargs or any(not isinstance(one, torch.dtype) for one in args[1:]):
                return None
            args = args if len(args) > 1 else (*args, self.dtype)
        elif func not in _ROWS_TOGETHER | _AS_THEY_ARE:
            return None
        like = func(torch.empty(self.shape, dtype=self.dtype, device="meta"), *args[1:], **kwargs)
        is_whole = like.dtype is torch.float32 or like.dtype is self.dtype
        if not is_whole or like.shape[-1:] != self.shape[-1:]:
            return None
        return _AbsentLogits.of(self.head, self.hidden, self.num_chunks, like)

    def _loss(
        self,
        target: torch.Tensor,
        weight: torch.Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> torch.Tensor | None:
        is_plain = (
            weight is None and size_average is None and reduce is None and not label_smoothing
        )
        if not is_plain or self.dtype is not torch.float32 or self.dim() != 2 or target.dim() != 1:
            return None
        return chunked_cross_entropy(
            self.hidden.reshape(-1, self.hidden.shape[-1]),
            self.head.weight,
            self.head.bias,
            target,
            self.num_chunks,
            reduction=reduction,
            ignore_index=ignore_index,
        )


def _whole(reader: str, leaf: Any) -> Any:
    """Logits after all, where there is room for them: no gradients are in an evaluation."""
    if not isinstance(leaf, _AbsentLogits):
        return leaf
    if leaf.is_training:
        raise ConfigError(
            f"the logits are read by {reader}",
            why="the step was planned with its loss in chunks, so that they never exist as a whole",
            remedy="give this loss to attach as loss_fn=, with an example batch, or leave "
            "chunked_loss out",
        )
    logits = functional.linear(leaf.hidden, leaf.head.weight, leaf.head.bias)
    return logits.to(leaf.dtype).reshape(leaf.shape)


def linear_head(model: torch.nn.Module, found: LossHead) -> torch.nn.Linear | str:
    """The module of a head, or why it cannot be left out."""
    head = model.get_submodule(found.module)
    if type(head) is not torch.nn.Linear or "forward" in vars(head):
        return f"{found.module} is a {type(head).__name__} with code of its own"
    if head._forward_hooks or head._forward_pre_hooks or head._backward_hooks:
        return f"{found.module} has hooks"
    return head


@contextlib.contextmanager
def loss_in_chunks(head: torch.nn.Linear, num_chunks: int) -> Iterator[None]:
    """Within it a model's cross entropy of what this head gives is computed in so many chunks."""

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        like = torch.empty(
            (*hidden.shape[:-1], head.out_features), dtype=hidden.dtype, device="meta"
        )
        return _AbsentLogits.of(head, hidden, num_chunks, like)

    head.forward = forward  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        del head.forward
