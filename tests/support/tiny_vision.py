"""Tiny vision-language models with their processors, and rows with pictures, made on the fly."""

import random
from typing import Any

import datasets
import numpy as np
import PIL.Image
import torch
import transformers

from support import tiny_chat

TEMPLATE = """\
{%- for message in messages -%}
{{- '<|' + message['role'] + '|>' -}}
{%- if message['content'] is string -%}{{- message['content'] -}}
{%- else -%}
{%- for part in message['content'] -%}
{{- 'PICTURE' if part['type'] == 'image' else part['text'] -}}
{%- endfor -%}
{%- endif -%}
{{- '<|end|>' -}}
{%- endfor -%}
"""
SIDE = 16
_MARKS = {
    "image_token": "<image>",
    "boi_token": "<begin of image>",
    "eoi_token": "<end of image>",
    "video_token": "<video>",
}
_TEXT = {
    "vocab_size": 300 + len(_MARKS),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
}
_VISION = {"hidden_size": 32, "num_heads": 2, "patch_size": 4, "depth": 2}
_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": SIDE,
    "patch_size": 4,
}


def tokenizer() -> Any:
    """That of `tiny_chat` with tokens that stand for pictures."""
    return tiny_chat.tokenizer(extra_special_tokens=_MARKS)


class QwenProcessor(transformers.Qwen2VLProcessor):
    """Without videos, which need torchvision."""

    def __init__(
        self, image_processor: Any = None, tokenizer: Any = None, chat_template: Any = None
    ) -> None:
        super().__init__(image_processor, tokenizer, chat_template=chat_template)


def processor(family: str) -> Any:
    """Of llava, gemma3, qwen2_vl or qwen2_5_vl, as `model`."""
    words = tokenizer()
    square = {"height": SIDE, "width": SIDE}
    if family == "llava":
        from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil

        pictures: Any = LlavaImageProcessorPil(size={"shortest_edge": SIDE}, crop_size=square)
        return transformers.LlavaProcessor(
            pictures,
            words,
            patch_size=4,
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
            chat_template=TEMPLATE.replace("PICTURE", _MARKS["image_token"]),
        )
    if family == "gemma3":
        from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

        return transformers.Gemma3Processor(
            Gemma3ImageProcessorPil(size=square),
            words,
            image_seq_length=4,
            chat_template=TEMPLATE.replace("PICTURE", _MARKS["boi_token"]),
        )
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    pictures = Qwen2VLImageProcessorPil(
        patch_size=4, size={"shortest_edge": 8 * 8, "longest_edge": 24 * 24}
    )
    mark = "".join(_MARKS[name] for name in ("boi_token", "image_token", "eoi_token"))
    return QwenProcessor(pictures, words, chat_template=TEMPLATE.replace("PICTURE", mark))


def model(family: str) -> Any:
    """Random weights in bf16; buffers stay as they are."""
    ids = {name: tokenizer().convert_tokens_to_ids(token) for name, token in _MARKS.items()}
    image_id = ids["image_token"]
    torch.manual_seed(0)
    made: Any
    if family == "llava":
        made = transformers.LlavaForConditionalGeneration(
            transformers.LlavaConfig(
                vision_config=transformers.CLIPVisionConfig(**_TOWER, projection_dim=32),
                text_config=transformers.LlamaConfig(**_TEXT),
                image_token_index=image_id,
                vision_feature_layer=-1,
            )
        )
    elif family == "gemma3":
        made = transformers.Gemma3ForConditionalGeneration(
            transformers.Gemma3Config(
                vision_config=transformers.SiglipVisionConfig(**_TOWER, vision_use_head=False),
                text_config=transformers.Gemma3TextConfig(**_TEXT, head_dim=16),
                mm_tokens_per_image=4,
                image_token_index=image_id,
                boi_token_index=ids["boi_token"],
                eoi_token_index=ids["eoi_token"],
            )
        )
    else:
        rotary = {"rope_type": "default", "mrope_section": [2, 3, 3]}
        given = {
            "text_config": {**_TEXT, "rope_parameters": rotary},
            "image_token_id": image_id,
            "video_token_id": ids["video_token"],
            "vision_start_token_id": ids["boi_token"],
            "vision_end_token_id": ids["eoi_token"],
        }
        if family == "qwen2_vl":
            vision = {**_VISION, "embed_dim": 32}
            made = transformers.Qwen2VLForConditionalGeneration(
                transformers.Qwen2VLConfig(vision_config=vision, **given)
            )
        else:
            vision = {
                **_VISION,
                "intermediate_size": 48,
                "out_hidden_size": 32,
                "window_size": 16,
                "fullatt_block_indexes": [1],
            }
            made = transformers.Qwen2_5_VLForConditionalGeneration(
                transformers.Qwen2_5_VLConfig(vision_config=vision, **given)
            )
    for parameter in made.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    return made


def rows(pictures: list[int], seed: int = 0) -> datasets.Dataset:
    """Conversations; of each, how many pictures of different sizes are asked about."""
    draw = random.Random(seed)
    noise = np.random.default_rng(seed)

    def words(most: int) -> str:
        return " ".join(draw.choices(tiny_chat.WORDS, k=draw.randint(1, most)))

    def picture() -> PIL.Image.Image:
        shape = (draw.choice([16, 24, 32]), draw.choice([16, 24, 32]), 3)
        return PIL.Image.fromarray(noise.integers(0, 256, shape, dtype=np.uint8))

    said = [
        [
            {"role": "user", "content": words(9)},
            {"role": "assistant", "content": words(9)},
        ]
        for _ in pictures
    ]
    table = {"messages": said, "images": [[picture() for _ in range(n)] for n in pictures]}
    role = {"role": datasets.Value("string"), "content": datasets.Value("string")}
    features = datasets.Features(
        {"messages": datasets.List(role), "images": datasets.List(datasets.Image())}
    )
    return datasets.Dataset.from_dict(table, features=features)
