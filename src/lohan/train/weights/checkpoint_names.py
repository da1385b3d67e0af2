"""From the names in weights files to the names in a model, and back.

Owns the match between both: transformers renames tensors and, for some models, joins or cuts them
when it loads a checkpoint, and undoes that when it saves. Both are done here with transformers' own
rules, on one group of tensors at a time. Knows names, shapes and values, no files.

Note "groups". Most groups are one stored tensor that is one of the model's. A group with a
conversion has several on one side, such as the experts of a layer, which are stored apart and are
one parameter of the model; its tensors have to be in memory together.
"""

import copy
import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lohan.errors import ConfigError
from lohan.train.weights.checkpoint_files import shown
from lohan.train.weights.meta_model import explained

_REMEDY = "check that files and configuration are of the same model, and that transformers knows it"


@dataclass(frozen=True, slots=True, kw_only=True)
class NameGroup:
    """Stored tensors and the model's tensors they are, always together."""

    stored: tuple[str, ...]
    """Names in the files."""
    owned: tuple[str, ...]
    """Names in the model."""
    conversion: Any = None
    """transformers' rule, or None where only the name differs."""
    patterns: tuple[str, ...] = ()
    """For each stored name the pattern of the rule it fits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NameMatch:
    """How the stored tensors and a model fit."""

    groups: tuple[NameGroup, ...]
    unexpected: tuple[str, ...]
    """Stored names the model has no use for, without those its code says to ignore."""
    conversions: tuple[Any, ...]
    """transformers' rules that were used."""

    @property
    def owned(self) -> frozenset[str]:
        """Names of the model that are provided."""
        return frozenset(name for group in self.groups for name in group.owned)


def match_names(model: nn.Module, stored: Mapping[str, torch.Tensor]) -> NameMatch:
    """Find which stored tensors are which of an untied model's.

    Args:
        model: on `meta`; parameters and persistent buffers of any values.
        stored: by name, tensors on `meta` of the stored shapes and types.

    Raises:
        ConfigError: a shape is not the model's, or a conversion does not fit.
    """
    loading = _rules()
    known = model.state_dict()
    prefix = getattr(model, "base_model_prefix", "") or ""
    rules = loading.conversion_rules(model)
    renamings = [rule for rule in rules if isinstance(rule, loading.WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, loading.WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    members: dict[str, list[tuple[str, str | None]]] = {}
    unexpected: list[str] = []
    # Sorted as transformers does: some rules decide by the first name they see.
    for name in sorted(stored, key=loading.dot_natural_key):
        renamed, pattern = loading.rename_source_key(name, renamings, converters, prefix, known)
        if renamed not in known and name in known:
            renamed, pattern = loading.rename_source_key(name, [], [], prefix, known)
        if renamed in known:
            members.setdefault(renamed, []).append((name, pattern))
        else:
            unexpected.append(name)
    groups = []
    for renamed, found in members.items():
        names = tuple(name for name, _ in found)
        pattern = found[0][1]
        if pattern is None and len(names) > 1:
            raise ConfigError(
                f"the tensors {shown(names)} are all stored for {renamed}",
                why="only one of them can be it",
                remedy=_REMEDY,
            )
        group = NameGroup(
            stored=names,
            owned=(renamed,),
            conversion=by_pattern[pattern] if pattern is not None else None,
            patterns=tuple(str(one) for _, one in found),
        )
        made = to_model(model, group, stored.__getitem__)
        _refuse_other_shapes(names, made, known)
        groups.append(dataclasses.replace(group, owned=tuple(made)))
    used = tuple(rule for rule in rules if rule.was_used())
    return NameMatch(
        groups=tuple(groups),
        unexpected=tuple(_without_ignored(model, unexpected)),
        conversions=used,
    )


def to_model(
    model: nn.Module, group: NameGroup, read: Callable[[str], torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The model's tensors of a group from the stored ones.

    Raises:
        ConfigError: the stored tensors do not fit together.
    """
    if group.conversion is None:
        return {group.owned[0]: read(group.stored[0])}
    with explained(f"the tensors {shown(group.stored)} do not make {group.owned[0]}", _REMEDY):
        rule = copy.deepcopy(group.conversion)
        for name, pattern in zip(group.stored, group.patterns, strict=True):
            # Read when the rule is carried out, which frees what it has used.
            rule.add_tensor(group.owned[0], name, pattern, _Later(read, name))
        made = rule.convert(group.owned[0], model=model, config=model.config)
        return {
            name: tensor[0] if isinstance(tensor, list) else tensor for name, tensor in made.items()
        }


@dataclass(frozen=True, slots=True)
class _Later:
    read: Callable[[str], torch.Tensor]
    name: str

    def __call__(self) -> torch.Tensor:
        return self.read(self.name)


def to_stored(
    model: nn.Module, group: NameGroup, match: NameMatch, owned: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The stored tensors of a group from the model's: the inverse of `to_model`.

    Raises:
        ConfigError: the rule has no inverse that gives the names it came from.
    """
    if group.conversion is None:
        return {group.stored[0]: owned[group.owned[0]]}
    with explained(
        f"{shown(group.owned)} cannot be written as it was stored",
        "report this, with the name of the model",
    ):
        from transformers.core_model_loading import revert_weight_conversion

        rules: Any = model
        rules._weight_conversions = list(match.conversions)
        made: dict[str, torch.Tensor] = revert_weight_conversion(rules, dict(owned))
        if set(made) != set(group.stored):
            raise ConfigError(
                f"{shown(group.owned)} cannot be written as it was stored",
                why=f"it was stored as {shown(group.stored)}, and would be {shown(made)}",
                remedy="report this, with the name of the model",
            )
    return made


def default_names(model: nn.Module, owned: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What `save_pretrained` would store for a model that was not loaded from files."""
    with explained(
        f"{type(model).__name__} cannot be written in its usual layout",
        "report this, with the name of the model",
    ):
        from transformers.core_model_loading import revert_weight_conversion

        rules: Any = model
        rules._weight_conversions = None
        made: dict[str, torch.Tensor] = revert_weight_conversion(rules, dict(owned))
    return made


def _refuse_other_shapes(
    names: Sequence[str], made: Mapping[str, torch.Tensor], known: Mapping[str, torch.Tensor]
) -> None:
    for name, tensor in made.items():
        if name not in known:
            raise ConfigError(
                f"the stored tensors {shown(names)} make {name}, which the model lacks",
                why="files and configuration are of different models",
                remedy=_REMEDY,
            )
        if tensor.shape != known[name].shape:
            raise ConfigError(
                f"the tensor {shown(names)} has the shape {list(tensor.shape)}, the model's {name} "
                f"has {list(known[name].shape)}",
                why="files and configuration are of different models",
                remedy=_REMEDY,
            )


def _without_ignored(model: nn.Module, names: Iterable[str]) -> list[str]:
    """Leave out what the model's code, or transformers for old checkpoints, says to ignore."""
    patterns = [
        str(one) for one in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    ]
    buffers = [name for name, _ in model.named_buffers()]
    if any(name.endswith("rotary_emb.inv_freq") for name in buffers):
        patterns.append(r"rotary_emb\.inv_freq")
    if any(name.endswith("position_ids") for name in buffers):
        patterns.append(r"(^|\.)position_ids$")
    return [name for name in names if not any(re.search(one, name) for one in patterns)]


class _Rules:
    """The functions of transformers this file is built on, all in one place."""

    def __init__(self) -> None:
        from transformers import conversion_mapping, core_model_loading

        self.WeightRenaming = core_model_loading.WeightRenaming
        self.WeightConverter = core_model_loading.WeightConverter
        self.dot_natural_key = core_model_loading.dot_natural_key
        self.rename_source_key = core_model_loading.rename_source_key
        self.conversion_rules = conversion_mapping.get_model_conversion_mapping


def _rules() -> Any:
    with explained(
        "this transformers renames stored tensors in a way lohan does not know",
        "install a version that constraints.txt names",
    ):
        return _Rules()
