"""FLOPs of one operator call, 2 per multiply-add: torch's own formulas, attention's, experts'.

Owns the formulas torch lacks. A causal mask does not halve attention (torch's convention and the
paper's). Imports torch; called by the recorder for forward and backward calls alike.
Letters: b batch, n heads, q and k the query and key lengths, d and e the key and value widths.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

_ATEN = torch.ops.aten


def _attention_forward(args: Sequence[Any]) -> int:
    b, n, q, d = args[0].shape
    k, e = args[2].shape[2:]
    return int(2 * b * n * q * k * (d + e))


def _attention_backward(args: Sequence[Any]) -> int:
    # Scores are made again (d), then the gradients of v (e), of the weights (e), of q and k (2d).
    b, n, q, d = args[1].shape
    k, e = args[3].shape[2:]
    return int(2 * b * n * q * k * (3 * d + 2 * e))


def _grouped_product(args: Sequence[Any]) -> int:
    # Rows are shared out among experts, or (for weights' gradients) columns and rows are.
    rows, inner = args[0].shape[-2:]
    groups = args[0].shape[0] if args[0].dim() == args[1].dim() == 3 else 1
    return int(2 * groups * rows * inner * args[1].shape[-1])


# Older torch refuses fewer key heads than query heads; none knows the CPU's kernel or experts.
_FORMULAS: dict[Any, Callable[[Sequence[Any]], int]] = {
    getattr(_ATEN, name): formula
    for stem in (
        "flash_attention_for_cpu",
        "flash_attention",
        "efficient_attention",
        "cudnn_attention",
    )
    for name, formula in (
        (f"_scaled_dot_product_{stem}", _attention_forward),
        (f"_scaled_dot_product_{stem}_backward", _attention_backward),
    )
    if hasattr(_ATEN, name)
}
if hasattr(_ATEN, "_grouped_mm"):
    _FORMULAS[_ATEN._grouped_mm] = _grouped_product


def flops_of(call: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> int:
    """Return the FLOPs of a dispatched call; 0 for operators without a formula (elementwise)."""
    packet = call._overloadpacket
    if packet in _FORMULAS:
        return _FORMULAS[packet](args)
    formula = flop_registry.get(packet)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=result))
