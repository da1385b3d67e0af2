"""The judge: AdamW, the split of masters and the sum of squares in a few obvious torch lines.

Slow on purpose, one torch operation per rounding. The native kernels must give the same bits;
when they differ, this file is right. Called by tests and by `lohan.verify`.
"""

import torch

from lohan.optimizer.settings import StepScalars

CANONICAL_NAN = torch.tensor(0x7FC00000, dtype=torch.int32).view(torch.float32)
_SIGN_BIT = -(2**31)


def canonical(values: torch.Tensor) -> torch.Tensor:
    """Make every NaN the one with bits 0x7FC00000."""
    return torch.where(values.isnan(), CANONICAL_NAN, values)


def widened(values: torch.Tensor) -> torch.Tensor:
    """Return fp32 values of bf16, fp16 or fp32 ones; exact."""
    return values.to(torch.float32)


def rounded(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round fp32 to bf16 or fp16, nearest even, with the canonical NaN of the narrow format."""
    nan_bits = 0x7FC0 if dtype is torch.bfloat16 else 0x7E00
    nan = torch.tensor(nan_bits, dtype=torch.int16).view(dtype)
    return torch.where(values.isnan(), nan, values.to(dtype))


def adamw_elements(
    g: torch.Tensor, p: torch.Tensor, m: torch.Tensor, v: torch.Tensor, scalars: StepScalars
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return p, m and v after a step; all fp32, each operation rounds once."""
    beta1, one_minus_beta1, beta2, one_minus_beta2, eps, grad_scale = (
        torch.tensor(scalar, dtype=torch.float32) for scalar in scalars.elementwise
    )
    next_p, next_m, next_v = p.clone(), m.clone(), v.clone()
    for begin, end, *rates in scalars.ranges:
        step_size, decay = (torch.tensor(rate, dtype=torch.float32) for rate in rates)
        part = slice(begin, end)
        scaled = g[part] * grad_scale
        next_m[part] = beta1 * m[part] + one_minus_beta1 * scaled
        next_v[part] = beta2 * v[part] + (one_minus_beta2 * scaled) * scaled
        direction = next_m[part] / (correct_sqrt(next_v[part]) + eps)
        next_p[part] = p[part] - (step_size * direction + decay * p[part])
        for result in (next_p, next_m, next_v):
            result[part] = canonical(result[part])
    return next_p, next_m, next_v


def correct_sqrt(values: torch.Tensor) -> torch.Tensor:
    """Square root, correctly rounded: twice the digits are enough to round again without error."""
    return values.to(torch.float64).sqrt().to(torch.float32)


def split(p32: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return P16 (bf16), LO16 (int16) and the tie (bool) of fp32 masters."""
    bits = p32.view(torch.int32)
    low = bits.to(torch.int16)
    high = (bits >> 16).to(torch.int16)
    hidden_nan = p32.isnan() & ((high & 0x7F) == 0)
    cut = torch.where(hidden_nan, high | 0x40, high).view(torch.bfloat16)
    p16 = torch.where(p32.isnan(), cut, p32.to(torch.bfloat16))
    was_rounded_down = (low == -0x8000) & ((high & 1) == 0)
    return p16, low, torch.where(p32.isnan(), hidden_nan, was_rounded_down)


def join(p16: torch.Tensor, lo16: torch.Tensor, tie: torch.Tensor) -> torch.Tensor:
    """Return the fp32 masters of a split."""
    high = p16.view(torch.int16).to(torch.int64)
    low = lo16.to(torch.int64)
    bits = (high << 16) + low + (tie.to(torch.int64) << 16)
    uncut = torch.where(tie, high & ~0x40, high)
    bits = torch.where(p16.isnan(), (uncut << 16) + (low & 0xFFFF), bits)
    return bits.to(torch.int32).view(torch.float32)


def with_tie(v: torch.Tensor, tie: torch.Tensor) -> torch.Tensor:
    """Put the tie into the sign bit of the second moment."""
    bits = v.view(torch.int32) & ~_SIGN_BIT
    return torch.where(tie, bits | _SIGN_BIT, bits).view(torch.float32)


def tie_of(v32: torch.Tensor) -> torch.Tensor:
    """Return the sign bit of V32."""
    return v32.view(torch.int32) < 0


def adamw_split(
    grad: torch.Tensor,
    p16: torch.Tensor,
    lo16: torch.Tensor,
    m32: torch.Tensor,
    v32: torch.Tensor,
    scalars: StepScalars,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return P16, LO16, M32 and V32 after a step; elements outside all ranges are unchanged."""
    p32 = join(p16, lo16, tie_of(v32))
    v = with_tie(v32, torch.zeros_like(v32, dtype=torch.bool))
    next_p, next_m, next_v = adamw_elements(widened(grad), p32, m32, v, scalars)
    next_p16, next_lo16, tie = split(next_p)
    results = [p16.clone(), lo16.clone(), m32.clone(), v32.clone()]
    for begin, end, *_ in scalars.ranges:
        part = slice(begin, end)
        stepped = (next_p16, next_lo16, next_m, with_tie(next_v, tie))
        for result, value in zip(results, stepped, strict=True):
            result[part] = value[part]
    return results[0], results[1], results[2], results[3]


def leaf_sums_of_squares(grad: torch.Tensor, *, leaf_elements: int) -> torch.Tensor:
    """Return one fp64 sum of squares per leaf: 16 lanes in order, then halves: 8, 4, 2, 1."""
    num_lanes = 16
    num_leaves = -(-grad.numel() // leaf_elements)
    padded = torch.zeros(num_leaves * leaf_elements, dtype=torch.float64)
    padded[: grad.numel()] = grad.to(torch.float64)
    rows = (padded * padded).view(num_leaves, leaf_elements // num_lanes, num_lanes)
    lanes = torch.zeros(num_leaves, num_lanes, dtype=torch.float64)
    for row in range(rows.shape[1]):
        lanes = lanes + rows[:, row]
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    return lanes[:, 0]


def tree_sum(values: list[float]) -> float:
    """Add a list as a tree: the largest power of two below its length, plus the rest."""
    if len(values) <= 1:
        return values[0] if values else 0.0
    left = 1 << ((len(values) - 1).bit_length() - 1)
    return tree_sum(values[:left]) + tree_sum(values[left:])
