"""Shapes of modules that tests make, traced in their mode and with their device's operators."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lohan.model.assemble import trace_shape
from lohan.model.inputs import inputs_for
from lohan.model.shape import ModelShape


def traced_shape(
    model: nn.Module,
    *,
    inputs: Callable[..., dict[str, Any]] | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> ModelShape:
    """`inputs`: a function of (batch, sequence), or of (batch) alone."""
    devices = {parameter.device for parameter in model.parameters()} - {torch.device("meta")}
    if inputs is None:
        make_inputs, is_fixed = inputs_for(model, dtype)
    else:
        is_fixed = len(inspect.signature(inputs).parameters) == 1
        make_inputs = (lambda batch, _: inputs(batch)) if is_fixed else inputs
    return trace_shape(
        model,
        make_inputs,
        name=type(model).__name__,
        dtype=dtype,
        device=devices.pop() if len(devices) == 1 else None,
        longest_sequence=getattr(model, "longest_sequence", None),
        is_sequence_fixed=is_fixed,
    )
