"""What an exported model will look like: which tensors in which files, before any is written.

Owns the way back from the model's names to the names its checkpoint uses, and the cut into shards.
Writes nothing. Called by `export_hf`.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from lohan.errors import ConfigError
from lohan.train.weights import meta_model
from lohan.train.weights.checkpoint_files import SINGLE_NAME
from lohan.train.weights.checkpoint_names import (
    NameGroup,
    NameMatch,
    default_names,
    match_names,
    to_stored,
)
from lohan.train.weights.source import ModelSource

FileTensor = tuple[str, torch.dtype, tuple[int, ...]]
"""Stored name, type and shape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportLayout:
    """All tensors of an export."""

    skeleton: nn.Module
    match: NameMatch
    aliases: Mapping[str, str]
    """For every name of a parameter the one it comes under."""
    groups: tuple[NameGroup, ...]
    """What is written, each group as a whole."""
    tensors: tuple[FileTensor, ...]

    @property
    def wanted(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes that have to come in."""
        known = self.skeleton.state_dict()
        return {
            self.aliases.get(name, name): tuple(known[name].shape)
            for group in self.groups
            for name in group.owned
        }

    def stored(
        self, group: NameGroup, owned: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """A group as it is written."""
        return to_stored(self.skeleton, group, self.match, owned)


def export_layout(source: ModelSource, dtype: torch.dtype) -> ExportLayout:
    """Lay out an export of a model under the names its source uses.

    Raises:
        ConfigError: a tensor has no elements, or the usual layout cannot be made.
    """
    skeleton = source.skeleton
    match, groups = source.match, source.groups
    if match is None:
        match, groups = _usual_layout(skeleton, source.aliases)
    kept: list[NameGroup] = []
    tensors: list[FileTensor] = []
    known = skeleton.state_dict()
    for group in groups:
        owned = {name: torch.empty_like(known[name], device="meta") for name in group.owned}
        for one, shapes in _written(skeleton, group, match, owned):
            kept.append(one)
            for name, shape in shapes.items():
                if math.prod(shape) == 0:
                    raise ConfigError(
                        f"the tensor {name} has the shape {list(shape)}",
                        why="a model with a tensor without elements is broken",
                        remedy="check the configuration of the model",
                    )
                tensors.append((name, _dtype(source, one, name, dtype), shape))
    return ExportLayout(
        skeleton=skeleton,
        match=match,
        aliases=source.aliases,
        groups=tuple(kept),
        tensors=tuple(tensors),
    )


def _dtype(source: ModelSource, group: NameGroup, name: str, dtype: torch.dtype) -> torch.dtype:
    """Parameters are written in the type asked for, buffers as they were stored."""
    if any(owned in source.aliases for owned in group.owned):
        return dtype
    if name in source.stored:
        return source.stored[name].dtype
    return source.skeleton.get_buffer(group.owned[0]).dtype


def _usual_layout(
    skeleton: nn.Module, aliases: Mapping[str, str]
) -> tuple[NameMatch, tuple[NameGroup, ...]]:
    ties: Mapping[str, str] = getattr(skeleton, "all_tied_weights_keys", None) or {}
    known = skeleton.state_dict()
    owned: dict[str, torch.Tensor] = {}
    for name in dict.fromkeys(aliases.values()):
        # Of tied names the one the others are tied to is saved.
        kept = ties.get(name, name)
        owned[kept] = torch.empty_like(known[kept], device="meta")
    for name, buffer in meta_model.persistent_buffers(skeleton).items():
        owned[name] = torch.empty_like(buffer, device="meta")
    stored = default_names(skeleton, owned)
    match = match_names(skeleton, stored)
    return match, match.groups


def _written(
    skeleton: nn.Module,
    group: NameGroup,
    match: NameMatch,
    owned: Mapping[str, torch.Tensor],
) -> Iterator[tuple[NameGroup, dict[str, tuple[int, ...]]]]:
    """The group with the shapes of its stored tensors; one by one if it cannot be converted back.

    A tensor under the model's own name is loaded as it is, so nothing is lost by that.
    """
    try:
        stored = to_stored(skeleton, group, match, owned)
    except ConfigError:
        for name, tensor in owned.items():
            yield NameGroup(stored=(name,), owned=(name,)), {name: tuple(tensor.shape)}
        return
    yield (
        dataclasses.replace(group, stored=tuple(stored)),
        {name: tuple(tensor.shape) for name, tensor in stored.items()},
    )


def cut_shards(
    tensors: Sequence[FileTensor], max_shard_bytes: int
) -> dict[str, tuple[FileTensor, ...]]:
    """Files and the tensors in them; a tensor larger than a shard has one for itself.

    Raises:
        ConfigError: the largest size is not above zero.
    """
    if max_shard_bytes <= 0:
        raise ConfigError(
            f"a shard of {max_shard_bytes} bytes holds nothing",
            why="every file holds at least one tensor",
            remedy="give a size such as 5GB",
        )
    shards: list[list[FileTensor]] = [[]]
    filled = 0
    for tensor in tensors:
        nbytes = math.prod(tensor[2]) * tensor[1].itemsize
        if shards[-1] and filled + nbytes > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += nbytes
    if len(shards) == 1:
        return {SINGLE_NAME: tuple(shards[0])}
    return {
        f"model-{number:05d}-of-{len(shards):05d}.safetensors": tuple(shard)
        for number, shard in enumerate(shards, start=1)
    }
