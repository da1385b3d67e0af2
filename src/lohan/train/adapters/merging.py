"""A base with its adapter merged in, one layer in RAM at a time, by PEFT's own arithmetic.

Owns bringing a layer's tensors together and handing the merged ones on by the base's own names.
Called by `lohan export`.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from lohan.errors import ConfigError
from lohan.train.adapters.kinds import adapter_of
from lohan.train.adapters.prompts import has_prompts
from lohan.train.weights.checkpoint_files import shown
from lohan.train.weights.meta_model import explained

_PREFIX = "base_model.model."
_BASE = "base_layer."
_ORIGINAL = ".original_module."


def adapted_skeleton(model: nn.Module, fields: Mapping[str, Any]) -> Any:
    """PEFT's model without values around a base on the meta device.

    Args:
        fields: of an adapter's `adapter_config.json`.

    Raises:
        ConfigError: PEFT cannot make it.
    """
    with explained(
        "the adapter cannot be made for this model", "name the model the run started from"
    ):
        from peft import PeftConfig, get_peft_model

        # Where the base lies now is not what PEFT is to warn of.
        given = {**fields, "inference_mode": False, "base_model_name_or_path": None}
        if "init_lora_weights" in given:
            given["init_lora_weights"] = True  # what values it began with is of no account here
        if "prompt_tuning_init" in given:
            given["prompt_tuning_init"] = "RANDOM"
        config = PeftConfig.from_peft_type(**given)
        return get_peft_model(model, config, low_cpu_mem_usage=True)


def refuse_unmergeable(model: Any, wanted: Iterable[str]) -> None:
    """Refuse a merge whose result would not be the trained model.

    Args:
        model: of `adapted_skeleton`.
        wanted: names of the parameters of the base.

    Raises:
        ConfigError: a merged weight is tied to another one, or was trained apart from it.
    """
    _, config = adapter_of(model)
    if has_prompts(config):
        raise ConfigError(
            "the adapter cannot be merged: it is prompts, which come before the tokens of a row",
            why="no weight of the base has a place for them",
            remedy="leave --merged out and load the adapter on top of its base",
        )
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    layers = _layers(model)
    tied = [one for one in names.values() if len(one) > 1 and any(_owner(n, layers) for n in one)]
    made = {_plain_name(name, model, layers) for name, _ in model.named_parameters()} - {None}
    apart = made ^ set(wanted)
    if tied or apart:
        what = tied[0][0] if tied else sorted(map(str, apart))[0]
        raise ConfigError(
            f"the adapter cannot be merged: {what} shares its values with another weight of the "
            "model",
            why="the configuration ties the two, and merged they differ",
            remedy="leave --merged out and load the adapter on top of its base",
        )


def merged_tensors(
    model: Any, tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter of the base by its own name, adapters merged in.

    Args:
        model: of `adapted_skeleton`.
        tensors: every parameter of it once, block by block, as fp32.
        dtype: what the base is in while adapters, in fp32, are added to it.
    """
    layers = _layers(model)
    missing: dict[str, set[str]] = {layer: set() for layer in layers}
    for name, _ in model.named_parameters():
        owner = _owner(name, layers)
        if owner is not None:
            missing[owner].add(name)
    held: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors:
        owner = _owner(name, layers)
        if owner is None:
            plain = _plain_name(name, model, layers)
            if plain is not None:
                yield plain, tensor
            del tensor
            continue
        is_base = name.startswith(f"{owner}.{_BASE}")
        held.setdefault(owner, {})[name] = tensor.to(dtype) if is_base else tensor
        del tensor
        missing[owner].discard(name)
        if not missing[owner]:
            yield from _merged(model, owner, held.pop(owner))
    assert not held, f"tensors of {shown(held)} are missing"


def _merged(
    model: Any, owner: str, tensors: dict[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    layer = model.get_submodule(owner)
    for name, tensor in tensors.items():
        _put(model, name, tensor)
    layer.merge()
    for name in [name for name in tensors if name.startswith(f"{owner}.{_BASE}")]:
        merged = model.get_parameter(name).detach()
        _put(model, name, torch.empty_like(merged, device="meta"))
        yield (owner + "." + name.removeprefix(f"{owner}.{_BASE}")).removeprefix(_PREFIX), merged
        del merged
    for name, tensor in tensors.items():
        _put(model, name, torch.empty_like(tensor, device="meta"))


def _put(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
    place, _, own = name.rpartition(".")
    setattr(model.get_submodule(place), own, nn.Parameter(tensor, requires_grad=False))


def _layers(model: Any) -> dict[str, nn.Module]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    return {name: one for name, one in model.named_modules() if isinstance(one, BaseTunerLayer)}


def _owner(name: str, layers: Mapping[str, Any]) -> str | None:
    """The adapted layer a parameter belongs to."""
    pieces = name.split(".")
    places = (".".join(pieces[:count]) for count in range(len(pieces) - 1, 0, -1))
    return next((place for place in places if place in layers), None)


def _plain_name(name: str, model: Any, layers: Mapping[str, Any]) -> str | None:
    """What a parameter is called in the base; None for adapters, and what a trained copy replaces.

    Merging leaves `base_layer` out of the names, and `modules_to_save`.
    """
    owner = _owner(name, layers)
    if owner is not None:
        rest = name.removeprefix(f"{owner}.")
        if not rest.startswith(_BASE):
            return None
        name = f"{owner}.{rest.removeprefix(_BASE)}"
    if _ORIGINAL in name:
        return None
    adapter, _ = adapter_of(model)
    return name.replace(f".modules_to_save.{adapter}.", ".").removeprefix(_PREFIX)
