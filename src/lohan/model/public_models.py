"""Sizes of the models known by name: the paper's, and widely used public ones.

Owns what `known_models.json` holds, no behaviour and no torch. Public ones are the fields of their
published configurations that decide shapes. Read by `names` and, when tracing, by `configs`.
"""

from dataclasses import dataclass
from importlib import resources
from typing import Any

import msgspec

GPT_SEQUENCE = 1024
"""Positions of the paper's GPTs; more are added when a longer sequence is asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperModel:
    """A model of the paper: a GPT, or a diffusion transformer."""

    num_layers: int
    num_heads: int
    hidden: int
    nominal_parameters: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicModel:
    """A public model: its configuration."""

    nominal_parameters: float
    settings: dict[str, Any]
    model_type: str | None = None
    """Of transformers; without it the settings name a class of diffusers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _KnownModels:
    gpts: dict[str, PaperModel]
    dits: dict[str, PaperModel]
    public: dict[str, PublicModel]
    aliases: dict[str, str]


_KNOWN = msgspec.json.decode(
    (resources.files("lohan.model") / "known_models.json").read_bytes(), type=_KnownModels
)
PAPER_GPTS = _KNOWN.gpts
"""The TFLOPS of the 80-layer model count 70e9 parameters; one of the figures calls it 65B."""
PAPER_DITS = _KNOWN.dits
PUBLIC_MODELS = _KNOWN.public
ALIASES = _KNOWN.aliases
"""Other spellings of a name."""
