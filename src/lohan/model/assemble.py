"""Turn the runs of a model at several points into its `ModelShape`.

Owns the merging: the same blocks at every point, each quantity as a growth, kinds numbered,
parameters counted where they are first used, ties listed. Runs nothing itself. Imports torch.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from lohan.errors import ConfigError
from lohan.model.growth_fit import Point, fit, points_for
from lohan.model.shape import INPUT, BlockShape, Growth, ModelShape, OperatorShape
from lohan.model.tracing.trace_model import MakeInputs, Stretch, TraceableModel
from lohan.model.tracing.trace_ops import Call


def trace_shape(
    model: nn.Module,
    make_inputs: MakeInputs,
    *,
    name: str,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | None = None,
    longest_sequence: int | None = None,
    is_sequence_fixed: bool = False,
    should_assume_flash: bool = False,
    nominal_parameters: float | None = None,
) -> ModelShape:
    """Trace a module at several batches and sequence lengths and return its shape.

    Args:
        model: on any device; only its structure is used.
        make_inputs: keyword arguments of `forward` for a batch and a sequence length, made under a
            fake tensor mode. The sequence length is 0 where `is_sequence_fixed`.
        name: what the shape is called.
        dtype: of compute weights and activations.
        device: whose operators to trace; the CPU's unless told.
        longest_sequence: what the model can take, or None for no limit.
        is_sequence_fixed: only the batch varies.
        should_assume_flash: take attention for fused even where this device would not (dropout).
        nominal_parameters: the figure in the model's name.

    Raises:
        ConfigError: if it has no blocks, cannot be traced, or does not grow in a known way.
    """
    points = points_for(longest_sequence, is_sequence_fixed=is_sequence_fixed)
    traceable = TraceableModel(
        model,
        dtype=dtype,
        device=device or torch.device("cpu"),
        should_assume_flash=should_assume_flash,
    )
    runs = [traceable.run(make_inputs, point) for point in points]
    return _merge(
        model,
        points,
        runs,
        name=name,
        dtype_bytes=dtype.itemsize,
        is_sequence_fixed=is_sequence_fixed,
        nominal_parameters=nominal_parameters,
    )


def shape_at(
    traceable: TraceableModel, run: list[Stretch], point: Point, *, name: str
) -> ModelShape:
    """The shape of a run at one batch and sequence length only.

    Exact there, and in proportion to the batch elsewhere: for a run whose sizes are known, whatever
    the model makes of them.
    """
    return _merge(
        traceable.model,
        [point],
        [run],
        name=name,
        dtype_bytes=traceable.dtype.itemsize,
        is_sequence_fixed=False,
        nominal_parameters=None,
    )


def _merge(
    model: nn.Module,
    points: list[Point],
    runs: list[list[Stretch]],
    *,
    name: str,
    dtype_bytes: int,
    is_sequence_fixed: bool,
    nominal_parameters: float | None,
) -> ModelShape:
    counts = {len(run) for run in runs}
    if len(counts) != 1:
        raise _changes_with_size("the number of blocks that run", sorted(counts))
    owners, tied = _owners(model, runs[0])
    kinds: list[BlockShape] = []
    kind_of: dict[tuple[int, _Owned], int] = {}
    sequence_of_kinds: list[int] = []
    names: Counter[str] = Counter()
    lists = {s.label for s in runs[0] if s.block is not None}
    for position, stretch in enumerate(runs[0]):
        key = (id(stretch.segment), owners[position])
        if key not in kind_of:
            kind_of[key] = len(kinds)
            stem = "block" if stretch.block is not None and len(lists) == 1 else stretch.label
            names[stem] += 1
            kinds.append(
                _block(
                    stem if names[stem] == 1 else f"{stem}-{names[stem]}",
                    owners[position],
                    points,
                    [run[position] for run in runs],
                )
            )
        sequence_of_kinds.append(kind_of[key])
    return ModelShape(
        name=name,
        dtype_bytes=dtype_bytes,
        kinds=tuple(kinds),
        sequence_of_kinds=tuple(sequence_of_kinds),
        tied=tied,
        tokens_per_sample=_tokens(runs[0]) if is_sequence_fixed else None,
        nominal_parameters=nominal_parameters,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Owned:
    """Parameters of a block: its own, the frozen ones of them, the largest it trains."""

    num_parameters: int
    num_frozen: int
    largest: int


def _owners(
    model: nn.Module, stretches: list[Stretch]
) -> tuple[list[_Owned], tuple[tuple[int, int, int], ...]]:
    """Return per block its parameters, and the ties between blocks."""
    parameters = {id(parameter): parameter for parameter in model.parameters()}
    owner_of: dict[int, int] = {}
    ties: Counter[tuple[int, int]] = Counter()
    sizes = []
    for position, stretch in enumerate(stretches):
        owned = [parameters[i] for i in stretch.parameters if i not in owner_of]
        for identity in stretch.parameters:
            owner = owner_of.setdefault(identity, position)
            if owner != position:
                ties[owner, position] += parameters[identity].numel()
        used = [parameters[identity] for identity in stretch.parameters]
        sizes.append(
            _Owned(
                num_parameters=sum(p.numel() for p in owned),
                num_frozen=sum(p.numel() for p in owned if not p.requires_grad),
                largest=max((p.numel() for p in used if p.requires_grad), default=0),
            )
        )
    return sizes, tuple((owner, other, count) for (owner, other), count in sorted(ties.items()))


def _block(
    name: str,
    owned: _Owned,
    points: list[Point],
    stretches: list[Stretch],
) -> BlockShape:
    calls = [stretch.segment.calls for stretch in stretches]
    plans = {tuple((call.ordinal, call.name) for call in of_point) for of_point in calls}
    if len(plans) != 1:
        raise _changes_with_size(f"the list of operators of {name!r}", [len(c) for c in calls])
    return BlockShape(
        name=name,
        num_parameters=owned.num_parameters,
        num_frozen_parameters=owned.num_frozen,
        operators=tuple(
            _operator(name, points, same_call) for same_call in zip(*calls, strict=True)
        ),
        input_bytes=_fit(f"the input of {name!r}", points, [s.input_bytes for s in stretches]),
        output_bytes=_fit(f"the output of {name!r}", points, [s.output_bytes for s in stretches]),
        is_lookup=not any(stretch.segment.saves_parameters for stretch in stretches),
        is_rest=stretches[0].block is None,
        side_bytes=_fit(f"masks from {name!r}", points, [s.side_bytes for s in stretches]),
        largest_parameter=owned.largest,
    )


def _operator(block: str, points: list[Point], calls: Sequence[Call]) -> OperatorShape:
    first = calls[0]
    what = f"{first.name!r} in {block!r}"
    inputs = sorted(call.ordinal for call in first.reads)
    output = _fit(f"the output of {what}", points, [sum(c.output_bytes.values()) for c in calls])
    saved = _fit(
        f"what autograd keeps of {what}",
        points,
        [sum(c.output_bytes[key] for key in c.saved_keys) for c in calls],
    )
    return OperatorShape(
        index=first.ordinal,
        name=first.name,
        inputs=tuple([INPUT, *inputs] if first.reads_outside else inputs),
        output_bytes=output,
        forward_flops=_fit(f"FLOPs of {what}", points, [c.forward_flops for c in calls]),
        backward_flops=_fit(f"backward of {what}", points, [c.backward_flops for c in calls]),
        touched_bytes=_fit(f"bytes touched by {what}", points, [c.touched_bytes for c in calls]),
        is_saved=bool(first.saved_keys),
        partly_saved_bytes=saved if first.saved_keys and saved != output else None,
    )


def _fit(what: str, points: list[Point], values: list[int]) -> Growth:
    growth = fit(points, values)
    if growth is None:
        at_points = ", ".join(
            f"{value} at batch {batch} and length {sequence}"
            for (batch, sequence), value in zip(points, values, strict=True)
        )
        raise ConfigError(
            f"{what} does not grow in a known way: {at_points}",
            why="a fixed part plus, per sequence, a polynomial of degree two in its length was "
            "expected",
            remedy="check the model's forward for sizes rounded up or chosen by size",
        )
    return growth


def _changes_with_size(what: str, seen: list[int]) -> ConfigError:
    return ConfigError(
        f"{what} changes with the batch or the sequence length (seen: {seen})",
        why="one traced block must stand for every size",
        remedy="check the model's forward for branches on tensor sizes",
    )


def _tokens(stretches: list[Stretch]) -> int | None:
    """Return the tokens per sample of the longest blocks (a text encoder may be beside them)."""
    lengths = [s.num_tokens for s in stretches if s.block is not None and s.num_tokens]
    return max(lengths, default=None)
