"""The settings of an adapter, under the names TRL's `ModelConfig` has for them.

Owns their names, types and defaults, so that a misspelt one is told without importing TRL; what
they mean to PEFT is asked of TRL. Read by `config`; used by `lohan train` and `lohan plan`.
"""

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lohan.errors import ConfigError

_ALL = "all-linear"
HELP = {
    "use_peft": "Train an adapter (LoRA) and leave the model as it is. On where one of the "
    "following is written.",
    "lora_r": "Rank of the adapter's matrices.",
    "lora_alpha": "The adapter's part is scaled by alpha / r.",
    "lora_dropout": "Dropout in front of the adapter.",
    "lora_target_modules": "Names of the layers that get an adapter, or all-linear. Left out: what "
    "PEFT has for the model.",
    "lora_modules_to_save": "Names of layers that are trained whole beside it, such as lm_head.",
    "use_rslora": "Scale by alpha / sqrt(r) instead (rank-stabilised).",
    "use_dora": "Refused for a model given by its name; see docs/training.md.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSettings:
    """An adapter that was asked for; defaults are TRL's."""

    use_peft: bool = False
    lora_r: int = 16
    lora_alpha: int = 32
    lora_dropout: float = 0.05
    lora_target_modules: list[str] | str | None = None
    lora_modules_to_save: list[str] | str | None = None
    use_rslora: bool = False
    use_dora: bool = False

    def peft_config(self) -> Any:
        """PEFT's configuration, as TRL makes it for a model that is given by its name.

        Raises:
            ConfigError: PEFT refuses it, or a kind that is not taken.
        """
        from lohan.train.adapters.kinds import refuse_untaken
        from lohan.train.weights.meta_model import explained

        with explained("the adapter cannot be made", "correct the settings lora_..."):
            from trl import ModelConfig, get_peft_config

            layers = _names(self.lora_target_modules)
            given = dataclasses.asdict(self) | {"lora_target_modules": layers}
            given["lora_modules_to_save"] = _names(self.lora_modules_to_save)
            made = get_peft_config(ModelConfig(**given))
            if isinstance(layers, list):
                made.target_modules = set(layers)  # of one name TRL makes a pattern
        refuse_untaken(made, has_values=False)
        return made

    def on(self, model: Any) -> Any:
        """A model on the meta device with the adapter on it, for its shape. Raises ConfigError."""
        from lohan.train.adapters.merging import adapted_skeleton

        return adapted_skeleton(model, self.peft_config().to_dict()).train()


def _names(written: list[str] | str | None) -> list[str] | str | None:
    """Names of layers as a list, also of one or of several with commas; no pattern is a name."""
    if isinstance(written, list):
        return written if written != [_ALL] else _ALL
    if written is None or written == _ALL or not re.fullmatch(r"[\w.-]+(, *[\w.-]+)*", written):
        return written
    return re.split(", *", written)


FIELDS = {field.name: field for field in dataclasses.fields(AdapterSettings)}


def adapter_asked(written: Mapping[str, Any]) -> AdapterSettings | None:
    """The adapter that settings ask for; None if they ask for none.

    Args:
        written: values that were written, checked; others than an adapter's are left alone.

    Raises:
        ConfigError: one is described and switched off, or a number is out of its range.
    """
    given = {name: value for name, value in written.items() if name in FIELDS}
    if not given.get("use_peft", True):
        others = [name for name in given if name != "use_peft"]
        if others:
            raise ConfigError(
                f"{others[0]} is set and use_peft is false",
                why="it would be without effect: no adapter is trained",
                remedy="leave use_peft out, or the other",
            )
        return None
    if not given:
        return None
    found = AdapterSettings(**{**given, "use_peft": True})
    for name, is_valid, wanted in (
        ("lora_r", found.lora_r >= 1, "1 or more"),
        ("lora_alpha", found.lora_alpha > 0, "above 0"),
        ("lora_dropout", 0 <= found.lora_dropout < 1, "0 or more and below 1"),
    ):
        if not is_valid:  # PEFT takes some of them, and trains nothing or against the loss
            raise ConfigError(
                f"{name} is {getattr(found, name)}",
                why=f"it must be {wanted}",
                remedy=f"set {name} to {wanted}",
            )
    return found
