"""A tiny chat model on disk, its tokenizer and conversations, made on the fly."""

import json
import pathlib
import random
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if loop.index0 % 2 == 0 and message['role'] not in ('user', 'system') -%}
{{- raise_exception('user and assistant must take turns') -}}
{%- endif -%}
{{- '<|' + message['role'] + '|>' -}}
{%- if message['role'] == 'assistant' -%}
{%- generation -%}{{- message['content'] + '<|end|>' -}}{%- endgeneration -%}
{%- else -%}
{{- message['content'] + '<|end|>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""
SPECIAL = ["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
_TEXT = "red green blue one two three sky sea sun moon day night tree stone cat dog"
WORDS = _TEXT.split()


def tokenizer(**more: Any) -> Any:
    """A byte-level BPE tokenizer of 300 tokens with a chat template."""
    made = Tokenizer(BPE())
    made.pre_tokenizer = ByteLevel(add_prefix_space=False)
    made.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=300,
        special_tokens=SPECIAL,
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([" ".join(WORDS)] * 4, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<|pad|>", eos_token="<|end|>", **more
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def config(**changes: Any) -> LlamaConfig:
    return LlamaConfig(
        **{
            "vocab_size": 300,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
            "tie_word_embeddings": True,
            "pad_token_id": 0,
            "eos_token_id": 1,
            "bos_token_id": None,
            **changes,
        }
    )


def model(seed: int = 0, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    made = LlamaForCausalLM(config(**changes))
    # Parameters only, as from_pretrained does it: the rotary frequencies stay fp32.
    for parameter in made.parameters():
        parameter.data = parameter.data.to(dtype)
    return made


def save_model(folder: pathlib.Path, **changes: Any) -> pathlib.Path:
    """Write model and tokenizer as from_pretrained expects them."""
    model(**changes).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def conversations(count: int, seed: int = 0) -> list[dict[str, Any]]:
    draw = random.Random(seed)

    def words(most: int) -> str:
        return " ".join(draw.choices(WORDS, k=draw.randint(1, most)))

    return [
        {
            "messages": [
                {"role": "user", "content": words(12)},
                {"role": "assistant", "content": words(20)},
            ]
        }
        for _ in range(count)
    ]


def write_jsonl(path: pathlib.Path, rows: list[dict[str, Any]]) -> pathlib.Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
