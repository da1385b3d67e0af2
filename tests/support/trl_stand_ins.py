"""Models and rows in place of those that TRL's tests take from the hub, for machines without one.

Owns a cache folder of tiny models under the hub's names, and tables under those of TRL's and a few
more. Whatever else a test asks for fails, for both sides alike.
"""

import json
import pathlib
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"
_TRL = "trl-internal-testing/tiny-"
MODELS = {
    **{
        f"{_TRL}{kind}ForCausalLM{mark}": f"{kind}ForCausalLM"
        for kind, mark in (
            *(("Qwen2", "-2.5"), ("Qwen3", ""), ("Llama", "-3.2"), ("Mistral", "-0.2")),
            *(("GPTNeoX", ""), ("Cohere", ""), ("Cohere2", ""), ("Olmo3", ""), ("Lfm2", "")),
            *(("Lfm2", "-2.5"), ("NemotronH", "-nano")),
            *(("Qwen3Moe", ""), ("Glm4Moe", ""), ("GptOss", "")),
        )
    },
    f"{_TRL}Qwen2ForSequenceClassification-2.5": "Qwen2ForSequenceClassification",
    "hf-internal-testing/tiny-random-LlamaForCausalLM": "LlamaForCausalLM",
    "Qwen/Qwen3-4B": "Qwen3ForCausalLM",
    "bert-base-cased": "BertForSequenceClassification",
}
# Of these only a sweep over all architectures knows sizes that go together.
_OF_THE_SWEEP = ("Cohere2", "Glm4Moe", "GptOss", "NemotronH", "Lfm2", "Bert")
_CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|' + message['role'] + '|>' -}}
{%- if message['role'] == 'assistant' -%}
{%- generation -%}
{{- message['content'] or '' -}}
{%- if message['tool_calls'] -%}{{- message['tool_calls'] | tojson -}}{%- endif -%}
{{- '<|end|>' -}}
{%- endgeneration -%}
{%- else -%}
{{- (message['content'] or '') + '<|end|>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""


def save_models(cache: pathlib.Path) -> None:
    """Make the models, in a folder that stands for the hub's cache."""
    for name, kind in MODELS.items():
        _save(cache, name, kind)


def install_rows() -> None:
    """Answer for the hub where it is asked for rows."""
    import datasets

    plain = datasets.load_dataset

    def load_dataset(path: str, name: str | None = None, *more: Any, **options: Any) -> Any:
        made = _tables(path, name)
        if made is None:
            return plain(path, name, *more, **options)
        tables: Any = datasets.DatasetDict(
            {part: datasets.Dataset.from_list(rows) for part, rows in made.items()}
        )
        if options.get("streaming"):
            tables = datasets.IterableDatasetDict(
                {part: table.to_iterable_dataset() for part, table in tables.items()}
            )
        if not options.get("split"):
            return tables
        part, _, until = options["split"].partition("[:")
        return tables[part].take(int(until.rstrip("]"))) if until else tables[part]

    datasets.load_dataset = load_dataset


def _save(cache: pathlib.Path, name: str, kind: str) -> None:
    import torch
    import transformers

    from support import tiny_chat
    from support.sweep.small_configs import small_config

    tokenizer = tiny_chat.tokenizer()
    tokenizer.chat_template = _CHAT_TEMPLATE
    made: Any = getattr(transformers, kind)
    is_small = kind.startswith(_OF_THE_SWEEP)
    config = (
        small_config(made.config_class, has_dropout=False)
        if is_small
        else made.config_class(
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            **(
                {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
                if "Moe" in kind
                else {}
            ),
            **({"num_labels": 1} if "Sequence" in kind else {}),
        )
    )
    config.vocab_size = 300
    config.pad_token_id, config.eos_token_id, config.bos_token_id = 0, 1, None
    torch.manual_seed(0)
    place = cache / f"models--{name.replace('/', '--')}"
    snapshot = place / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text(COMMIT)
    made(config).save_pretrained(snapshot)
    tokenizer.save_pretrained(snapshot)


def _tables(path: str, name: str | None) -> dict[str, list[dict[str, Any]]] | None:
    """Rows of a data set by its parts; None where there is no stand-in."""
    if path == "trl-internal-testing/zen" and name is not None:
        return {"train": _rows(name, 17), "test": _rows(name, 2)}
    if path == "trl-internal-testing/toolcall":
        return {"train": [_tool_call(row) for row in _rows("standard_prompt_only", 17)]}
    if path == "trl-internal-testing/harmony":
        said = {"reasoning_effort": "low", "model_identity": "You are small."}
        return {"train": [{**row, **said} for row in _rows(f"conversational_{name}", 17)]}
    if path == "Salesforce/wikitext":
        return {"train": _rows("standard_language_modeling", 200)}
    return None


def _tool_call(row: dict[str, Any]) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": "find", "arguments": {"word": "sea"}}}
    settings = {"type": "object", "properties": {"word": {"type": "string"}}}
    tool = {"type": "function", "function": {"name": "find", "parameters": settings}}
    said = [("user", row["prompt"]), ("tool", "blue"), ("assistant", "It is blue.")]
    messages: list[dict[str, Any]] = [{"role": who, "content": text} for who, text in said]
    messages.insert(1, {"role": "assistant", "tool_calls": [call]})
    return {"messages": messages, "tools": json.dumps([tool])}


def _rows(name: str, count: int) -> list[dict[str, Any]]:
    from support.preference_runs import judged, pairs

    form, _, kind = name.partition("_")
    found: list[dict[str, Any]] = pairs(count)
    if kind == "unpaired_preference":
        found = judged(count)
    elif kind == "language_modeling":
        found = [{"text": row["prompt"] + row["chosen"]} for row in found]
    elif kind == "prompt_only":
        found = [{"prompt": row["prompt"]} for row in found]
    elif kind == "prompt_completion":
        found = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in found]
    elif kind == "implicit_prompt_preference":
        found = [
            {name: row["prompt"] + row[name] for name in ("chosen", "rejected")} for row in found
        ]
    elif kind != "preference":
        raise ValueError(f"there is no stand-in for {name}")
    return found if form == "standard" else [_chat(row) for row in found]


def _chat(row: dict[str, Any]) -> dict[str, Any]:
    def said(role: str, text: str) -> dict[str, str]:
        return {"role": role, "content": text}

    if "text" in row:
        return {"messages": [said("user", "one"), said("assistant", row["text"])]}
    is_whole = "prompt" not in row
    found: dict[str, Any] = {}
    for name, value in row.items():
        if not isinstance(value, str):
            found[name] = value
        elif name == "prompt":
            found[name] = [said("user", value)]
        else:
            found[name] = [*([said("user", "one")] if is_whole else []), said("assistant", value)]
    return found
