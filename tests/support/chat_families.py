"""Families of chat models in small: architecture, control tokens, chat template, and their mask.

Templates are TRL's copies where it has one. The others are written here after the order of their
family's control tokens.
"""

import pathlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, normalizers
from tokenizers.pre_tokenizers import ByteLevel
from trl import chat_template_utils

_VOCABULARY = 400
CHAT = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "red sky"},
    {"role": "assistant", "content": "blue sea"},
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "two"},
]
CHATML = """\
{% for message in messages %}
{% if loop.first and message['role'] != 'system' %}
{{ '<|im_start|>system\nYou help.<|im_end|>\n' }}
{%- endif %}
{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}
{%- endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""
# No control token opens an answer, and a system message is within the first question.
_LLAMA_2 = """\
{% set told = '' %}
{% if messages[0].role == 'system' %}
{% set told = '<<SYS>>\n' ~ messages[0].content ~ '\n<</SYS>>\n\n' %}
{% set messages = messages[1:] %}
{% endif %}
{% for message in messages %}
{% if (message.role == 'user') != (loop.index0 is even) %}
{{ raise_exception('user and assistant take turns') }}
{% elif message.role == 'user' %}
{{ bos_token ~ '[INST] ' ~ (told if loop.first else '') ~ message.content.strip() ~ ' [/INST]' }}
{%- else %}
{{ ' ' ~ message.content.strip() ~ ' ' ~ eos_token }}
{%- endif %}
{% endfor %}
"""
# A system message goes with the last question, and is gone once there is an answer.
_MISTRAL = """\
{{ bos_token }}
{%- if messages[0].role == 'system' %}
{% set told = messages[0].content ~ '\n\n' %}
{% set messages = messages[1:] %}
{% endif %}
{% for message in messages %}
{% if message.role == 'user' %}
{{ '[INST] ' ~ (told if told is defined and loop.last else '') ~ message.content ~ '[/INST]' }}
{%- else %}
{{ ' ' ~ message.content | trim ~ eos_token }}
{%- endif %}
{% endfor %}
"""


@dataclass(frozen=True, kw_only=True)
class Family:
    """How to make a small model of a family, and what it should be trained on."""

    models: tuple[str, ...]
    """How names of its models on the hub begin."""
    config: type
    template: str
    special: tuple[str, ...]
    """Control tokens; the first is the beginning, the second the end of a text."""
    expected: str
    """How the rendered chat ends, with what is trained on in [[ ]]."""
    chat: list[dict[str, str]] = field(default_factory=lambda: CHAT)
    make_tokenizer: Callable[[tuple[str, ...]], Tokenizer]
    settings: dict[str, Any] = field(default_factory=dict)

    def tokenizer(self) -> Any:
        """The family's template over a few hundred tokens; padded with its end of text."""
        bos, eos = self.special[:2]
        fast = transformers.PreTrainedTokenizerFast(
            tokenizer_object=self.make_tokenizer(self.special),
            bos_token=bos,
            eos_token=eos,
            pad_token=eos,
            additional_special_tokens=list(self.special[2:]),
        )
        fast.chat_template = self.template
        return fast

    def save_model(self, folder: pathlib.Path) -> pathlib.Path:
        """Write a model of two layers with random weights, and its tokenizer."""
        sizes = {
            "vocab_size": _VOCABULARY,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 4096,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "pad_token_id": 1,
        }
        torch.manual_seed(0)
        config = self.config(**{**sizes, **self.settings})
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(folder)
        self.tokenizer().save_pretrained(folder)
        return folder


def _bytes(special: tuple[str, ...]) -> Tokenizer:
    """One token per byte."""
    letters = {letter: index for index, letter in enumerate(sorted(ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(vocab=letters, merges=[]))
    made.pre_tokenizer = ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(list(special))
    return made


def _pieces(special: tuple[str, ...]) -> Tokenizer:
    """One token per letter, spaces as letters that words begin with: " b" and " t" are one."""
    names = [f"<0x{byte:02X}>" for byte in range(256)] + list(map(chr, range(33, 127)))
    vocabulary = {name: index for index, name in enumerate([*names, "▁", "▁b", "▁t", "<unk>"])}
    made = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=[("▁", "b"), ("▁", "t")],
            byte_fallback=True,
            unk_token="<unk>",
        )
    )
    made.normalizer = normalizers.Replace(" ", "▁")
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    made.add_special_tokens(list(special))
    return made


def trl_template(name: str) -> str:
    """A template that comes with TRL."""
    folder = pathlib.Path(chat_template_utils.__file__).parent / "chat_templates"
    return (folder / f"{name}.jinja").read_text(encoding="utf-8")


FAMILIES = {
    "llama-3.1": Family(
        models=("meta-llama/Llama-3.1-",),
        config=transformers.LlamaConfig,
        template=trl_template("llama3_1"),
        special=("<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"),
        expected="<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n"
        "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\nBe kind.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nred sky<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n[[blue sea<|eot_id|>]]"
        "<|start_header_id|>user<|end_header_id|>\n\none<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n[[two<|eot_id|>]]",
        make_tokenizer=_bytes,
    ),
    "llama-2": Family(
        models=("meta-llama/Llama-2-",),
        config=transformers.LlamaConfig,
        template=_LLAMA_2,
        special=("<s>", "</s>"),
        expected="<s>[INST] <<SYS>>\nBe kind.\n<</SYS>>\n\nred sky [/INST][[ blue sea </s>]]"
        "<s>[INST] one [/INST][[ two </s>]]",
        make_tokenizer=_pieces,
    ),
    "smollm2": Family(
        models=("HuggingFaceTB/SmolLM2-",),
        config=transformers.LlamaConfig,
        template=CHATML,
        special=("<|im_start|>", "<|im_end|>"),
        expected="<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nred sky<|im_end|>\n"
        "<|im_start|>assistant\n[[blue sea<|im_end|>\n]]<|im_start|>user\none<|im_end|>\n"
        "<|im_start|>assistant\n[[two<|im_end|>\n]]",
        make_tokenizer=_bytes,
        settings={"tie_word_embeddings": True},
    ),
    "mistral": Family(
        models=("mistralai/Mistral-7B-",),
        config=transformers.MistralConfig,
        template=_MISTRAL,
        special=("<s>", "</s>", "[INST]", "[/INST]"),
        chat=CHAT[1:],
        expected="<s>[INST] red sky[/INST][[ blue sea</s>]][INST] one[/INST][[ two</s>]]",
        make_tokenizer=_pieces,
        settings={"sliding_window": None},
    ),
    "qwen3": Family(
        models=("Qwen/Qwen3-",),
        config=transformers.Qwen3Config,
        template=trl_template("qwen3"),
        special=("<|endoftext|>", "<|im_end|>", "<|im_start|>"),
        expected="<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nred sky<|im_end|>\n"
        "<|im_start|>assistant\n[[<think>\n\n</think>\n\nblue sea<|im_end|>\n]]"
        "<|im_start|>user\none<|im_end|>\n"
        "<|im_start|>assistant\n[[<think>\n\n</think>\n\ntwo<|im_end|>\n]]",
        make_tokenizer=_bytes,
    ),
    "gemma-3": Family(
        models=("google/gemma-3-",),
        config=transformers.Gemma3TextConfig,
        template=trl_template("gemma3"),
        special=("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
        expected="<bos><start_of_turn>user\nBe kind.\n\nred sky<end_of_turn>\n"
        "<start_of_turn>model\n[[blue sea<end_of_turn>\n]]"
        "<start_of_turn>user\none<end_of_turn>\n<start_of_turn>model\n[[two<end_of_turn>\n]]",
        make_tokenizer=_bytes,
        settings={"tie_word_embeddings": True, "sliding_window": 16},
    ),
    "gpt-oss": Family(
        models=("openai/gpt-oss-", "models/gpt-oss-"),
        config=transformers.GptOssConfig,
        template=trl_template("gptoss"),
        special=(
            "<|startoftext|>",
            "<|return|>",
            "<|start|>",
            "<|end|>",
            "<|message|>",
            "<|channel|>",
        ),
        # Before it, TRL's template tells the date.
        expected="<|start|>developer<|message|># Instructions\n\nBe kind.\n\n<|end|>"
        "<|start|>user<|message|>red sky<|end|>"
        "[[<|start|>assistant<|channel|>final<|message|>blue sea<|end|>]]"
        "<|start|>user<|message|>one<|end|>"
        "[[<|start|>assistant<|channel|>final<|message|>two<|return|>]]",
        make_tokenizer=_bytes,
        settings={"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16},
    ),
}


def family_of(model: str) -> Family:
    """The family a model on the hub belongs to."""
    found = [one for one in FAMILIES.values() if model.startswith(one.models)]
    assert len(found) == 1, f"write a family for {model} into tests/support/chat_families.py"
    return found[0]


def shown(tokens: list[int], labels: list[int], tokenizer: Any) -> str:
    """A row as text, what is trained on in [[ ]]."""
    text, is_within = "", False
    for token, label in zip(tokens, labels, strict=True):
        assert label in (-100, token)
        if is_within != (label != -100):
            is_within = not is_within
            text += "[[" if is_within else "]]"
        text += tokenizer.decode([token])
    return text + "]]" * is_within
