"""Which adapters can be trained here, and what is refused before anything is written.

Owns the list. LoRA (also rank-stabilised and DoRA), IA3 and prompts are compared with TRL in memory
to the bit by the tests; what is not compared is refused by its name. Called by the trainers.
"""

import dataclasses
from typing import Any

import torch

from lohan.errors import ConfigError
from lohan.train.adapters.prompts import PROMPT_KINDS, has_prompts

QUANTIZED_BASE = (
    "weights are kept and read in 16 bits, as they compute; a quantized base would be another model"
)
_TAKEN = ("LORA", "IA3", *PROMPT_KINDS)
# Of LoraConfig: what changes the base or its forward in ways that are not compared.
_NOT_COMPARED = ("layer_replication", "trainable_token_indices", "target_parameters")
_COMPARED_VARIANTS = ("use_dora",)
_DRAWN = (True, False, "gaussian")
"""Values of init_lora_weights that do not look at the base."""


def is_adapted(model: Any) -> bool:
    """Whether a model is PEFT's."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def adapter_of(model: Any) -> tuple[str, Any]:
    """Name and configuration of the adapter of PEFT's model, which has one."""
    ((name, config),) = model.peft_config.items()
    return name, config


def refuse_untaken(config: Any, *, has_values: bool) -> None:
    """Refuse a kind of adapter that is not known to train exactly.

    Args:
        config: PEFT's.
        has_values: whether the base's weights are in memory; those of a model by name are not.

    Raises:
        ConfigError: naming it.
    """
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    if kind not in _TAKEN:
        raise _refusal(f"an adapter of the kind {kind}", f"{', '.join(_TAKEN)} are")
    if has_prompts(config):
        _refuse_prompts(config, has_values=has_values)
    if kind != "LORA":
        return
    variants = [field.name for field in dataclasses.fields(config) if _is_variant(field)]
    for name in (*_NOT_COMPARED, *variants):
        if name not in _COMPARED_VARIANTS and getattr(config, name, None):
            raise _refusal(f"{name} of LoraConfig", "LoRA, rsLoRA, DoRA and modules_to_save are")
    first = config.init_lora_weights
    if has_values or (first in _DRAWN and not config.use_dora):
        return
    raise _needs_values("use_dora" if config.use_dora else f"init_lora_weights={first!r}")


def refuse_prompts_in_pairs(model: Any, peft_config: Any, trainer: str) -> None:
    """Refuse prompts where a loss takes its tokens by their places, which prompts move.

    Raises:
        ConfigError: the adapter is one.
    """
    configs = [*(model.peft_config.values() if is_adapted(model) else ()), peft_config]
    if any(getattr(one, "is_prompt_learning", False) for one in configs):
        raise _refusal(f"prompts in {trainer}", "LoRA, rsLoRA, DoRA and IA3 are")


def _refuse_prompts(config: Any, *, has_values: bool) -> None:
    task = str(getattr(config.task_type, "value", config.task_type))
    if task != "CAUSAL_LM":
        raise _refusal(f"task_type={task} of {type(config).__name__}", "CAUSAL_LM is")
    first = getattr(config, "prompt_tuning_init", "RANDOM")
    first = str(getattr(first, "value", first))
    if first != "RANDOM" and not has_values:
        raise _needs_values(f"prompt_tuning_init={first}")


def _needs_values(what: str) -> ConfigError:
    return ConfigError(
        f"{what} is not supported for a model that is given by its name",
        why="its first values follow from the base's weights, which are not loaded",
        remedy="load the model, make it PEFT's with get_peft_model and pass that; or leave it out",
    )


def _is_variant(field: "dataclasses.Field[Any]") -> bool:
    return bool(field.metadata.get("is_lora_variant"))


def _refusal(what: str, others: str) -> ConfigError:
    return ConfigError(
        f"{what} is not supported",
        why=f"it is not compared with TRL's own training; {others}",
        remedy="use one of these",
    )


def refuse_unexpected(model: torch.nn.Module, *, has_values: bool) -> None:
    """Refuse a model whose adapters, or whose base, cannot be trained or saved exactly.

    Raises:
        ConfigError: its weights are quantized, it has several adapters or merged ones, or a kind
            that is not taken.
    """
    base: Any = model.get_base_model() if is_adapted(model) else model  # type: ignore[operator]
    flags = ("is_loaded_in_4bit", "is_loaded_in_8bit")
    if any(getattr(base, name, False) for name in flags):
        raise ConfigError(
            f"the weights of {type(base).__name__} are quantized",
            why=QUANTIZED_BASE,
            remedy="load the model without a quantization_config, in bf16",
        )
    if not is_adapted(model):
        if getattr(model, "_hf_peft_config_loaded", False):
            raise ConfigError(
                f"adapters were added to {type(model).__name__} by transformers",
                why="what of it is saved would not be known: a PeftModel says so",
                remedy="use peft.get_peft_model, or give the trainer a peft_config",
            )
        return
    adapted: Any = model
    if len(adapted.peft_config) != 1:
        raise ConfigError(
            f"the model has {len(adapted.peft_config)} adapters: {', '.join(adapted.peft_config)}",
            why="one is trained and saved",
            remedy="delete_adapter the others, or merge them into the base first",
        )
    _, config = adapter_of(adapted)
    refuse_untaken(config, has_values=has_values)
    for name, module in adapted.named_modules():
        if getattr(module, "merged", False) is True:
            raise ConfigError(
                f"the adapter is merged into {name}",
                why="it would be part of the base, and trained beside it",
                remedy="call unmerge_adapter first",
            )
