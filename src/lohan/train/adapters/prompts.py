"""Prompt, prefix and P-tuning: what is trained comes before the tokens, and changes no layer.

Owns what their files hold. PEFT writes the prompts themselves, which some kinds compute from what
is trained by a small network. Called where adapters are looked at and written.
"""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._pytree import register_pytree_node
from transformers import DynamicCache

PROMPT_KINDS = ("PROMPT_TUNING", "PREFIX_TUNING", "P_TUNING")
PROMPTS = "prompt_embeddings"
"""PEFT's name of the one tensor in the file of such an adapter."""
_ENCODER = "prompt_encoder"


def has_prompts(config: Any) -> bool:
    """Whether an adapter, by PEFT's configuration of it, is one of these."""
    return bool(config.is_prompt_learning)


def keep_prefixes(model: Any) -> None:
    """Have each block join its own keys to the prefix it is given, and not write into that.

    PEFT hands a prefix on as a cache, which grows by the keys of a row; a block that runs again in
    the backward pass would find those of its first run in it.
    """
    plain = type(model)

    class Prefixed(plain):  # type: ignore[misc,valid-type]
        def get_prompt(self, *given: Any, **kwargs: Any) -> Any:
            found = super().get_prompt(*given, **kwargs)
            return _Prefix(found) if type(found) is DynamicCache else found

    Prefixed.__name__ = Prefixed.__qualname__ = plain.__name__
    model.__class__ = Prefixed  # and not its method: that of a copy is to be of the copy


class _Prefix(DynamicCache):
    """A cache that does not grow, and is to be seen through: gradients go into its tensors."""

    def update(
        self, key_states: Any, value_states: Any, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        layer: Any = self.layers[layer_idx]
        keys = torch.cat([layer.keys, key_states], dim=-2)
        return keys, torch.cat([layer.values, value_states], dim=-2)


register_pytree_node(
    _Prefix,
    lambda prefix: ([pair[:2] for pair in prefix], None),
    lambda pairs, _: _Prefix(pairs),
    serialized_type_name="lohan.prefix",
)


def encoder_names(model: Any, adapter: str) -> dict[str, str]:
    """The trained tensors by their names in PEFT's network, each with its name in the model."""
    place = f"{_ENCODER}.{adapter}."
    names = (name for name, _ in model.named_parameters() if name.startswith(place))
    return {f"{_ENCODER}.{name.removeprefix(place)}": name for name in names}


def are_of_prompts(names: Mapping[str, str]) -> bool:
    """Whether names of `adapter_files.saved_names` are those of `encoder_names`."""
    return all(name.startswith(f"{_ENCODER}.") for name in names)


def prompts_of(
    names: Mapping[str, str], trained: Mapping[str, torch.Tensor], fields: Mapping[str, Any]
) -> torch.Tensor:
    """What a trained adapter puts before every row, in fp32.

    Args:
        names: of `encoder_names`.
        trained: fp32 masters by their names in the model.
        fields: of the adapter's `adapter_config.json`.
    """
    values = {own.removeprefix(f"{_ENCODER}."): trained[name] for own, name in names.items()}
    if len(values) == 1:
        (prompts,) = values.values()
        return prompts
    from peft import PeftConfig
    from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING

    config: Any = PeftConfig.from_peft_type(**{**fields, "inference_mode": False})
    made: Any = PEFT_TYPE_TO_TUNER_MAPPING[config.peft_type]
    assert len(inspect.signature(made).parameters) == 1, "prompts with a base have one tensor"
    with torch.device("meta"):  # it draws no number
        encoder = made(config).eval()
    encoder.load_state_dict(values, assign=True)
    with torch.no_grad():
        return torch.as_tensor(encoder(torch.arange(len(values["embedding.weight"]))[None])[0])
