"""Which architectures the sweep knows: all of transformers' tables, and diffusers' denoisers."""

import functools
from dataclasses import dataclass

from transformers.models.auto import modeling_auto

from support.sweep.image_denoisers import IMAGE_DENOISERS
from support.sweep.video_denoisers import VIDEO_DENOISERS

CAUSAL, SEQ2SEQ, MASKED = "causal", "seq2seq", "masked"
VISION, AUDIO, SPEECH = "vision", "audio", "speech"
PICTURES, TEXT_ONLY = "pictures", "text-only"
DIFFUSION = "diffusion"

DENOISERS = IMAGE_DENOISERS | VIDEO_DENOISERS


@dataclass(frozen=True, kw_only=True)
class Family:
    """One architecture and what it is fed with."""

    kind: str
    model_type: str
    """Of transformers, or a class of diffusers."""
    class_name: str

    @property
    def name(self) -> str:
        """One of a kind."""
        return f"{self.kind}/{self.model_type}"


_TABLES = {
    CAUSAL: modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    SEQ2SEQ: modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    MASKED: modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    VISION: modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    AUDIO: modeling_auto.MODEL_FOR_CTC_MAPPING_NAMES,
    SPEECH: modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
    PICTURES: modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    TEXT_ONLY: modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
}

SHORT_LIST = (
    *(f"{CAUSAL}/{name}" for name in ("llama", "qwen3", "gemma2", "gemma3_text", "gpt2")),
    *(f"{CAUSAL}/{name}" for name in ("gpt_neox", "phi3", "mixtral", "qwen3_moe")),
    *(f"{CAUSAL}/{name}" for name in ("deepseek_v3", "gpt_oss", "mamba2")),
    *(f"{SEQ2SEQ}/t5", f"{SEQ2SEQ}/bart", f"{SPEECH}/whisper", f"{MASKED}/bert"),
    f"{VISION}/vit",
    *(f"{DIFFUSION}/{name}Transformer2DModel" for name in ("DiT", "SD3", "Flux", "QwenImage")),
    f"{DIFFUSION}/WanTransformer3DModel",
)
"""What every change to the engine is shown on."""


@functools.cache
def all_families() -> dict[str, Family]:
    """By name; a class that a table has twice is listed under its shorter name."""
    found: dict[str, Family] = {}
    for kind, table in _TABLES.items():
        by_class: dict[str, str] = {}
        for model_type, classes in table.items():
            class_name = classes if isinstance(classes, str) else classes[0]
            names = (by_class.get(class_name, model_type), model_type)
            by_class[class_name] = min(names, key=len)
        for class_name, model_type in by_class.items():
            one = Family(kind=kind, model_type=model_type, class_name=class_name)
            found[one.name] = one
    for class_name in DENOISERS:
        one = Family(kind=DIFFUSION, model_type=class_name, class_name=class_name)
        found[one.name] = one
    return found
