"""Models and rows in place of those that TRL's tests take from the hub, for machines without one.

Owns a cache folder of tiny models under the hub's names, and tables under the names of
`trl-internal-testing/zen`. Whatever else a test asks for fails, for both sides alike.
"""

import pathlib
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"
MODELS = {
    "tiny-Qwen2ForCausalLM-2.5": "Qwen2ForCausalLM",
    "tiny-Qwen3ForCausalLM": "Qwen3ForCausalLM",
    "tiny-LlamaForCausalLM-3.2": "LlamaForCausalLM",
    "tiny-MistralForCausalLM-0.2": "MistralForCausalLM",
    "tiny-GPTNeoXForCausalLM": "GPTNeoXForCausalLM",
    "tiny-CohereForCausalLM": "CohereForCausalLM",
    "tiny-Qwen3MoeForCausalLM": "Qwen3MoeForCausalLM",
    "tiny-Qwen2ForSequenceClassification-2.5": "Qwen2ForSequenceClassification",
}


def save_models(cache: pathlib.Path) -> None:
    """Make the models, in a folder that stands for the hub's cache."""
    for name, kind in MODELS.items():
        _save(cache, f"trl-internal-testing/{name}", kind)


def install_rows() -> None:
    """Answer for the hub where it is asked for rows."""
    import datasets

    plain = datasets.load_dataset

    def load_dataset(path: str, name: str | None = None, *more: Any, **options: Any) -> Any:
        if path != "trl-internal-testing/zen" or name is None:
            return plain(path, name, *more, **options)
        parts = {"train": _rows(name, 17), "test": _rows(name, 2)}
        tables: Any = datasets.DatasetDict(
            {part: datasets.Dataset.from_list(rows) for part, rows in parts.items()}
        )
        if options.get("streaming"):
            tables = datasets.IterableDatasetDict(
                {part: table.to_iterable_dataset() for part, table in tables.items()}
            )
        return tables[options["split"]] if options.get("split") else tables

    datasets.load_dataset = load_dataset


def _save(cache: pathlib.Path, name: str, kind: str) -> None:
    import torch
    import transformers

    from support import tiny_chat

    tokenizer = tiny_chat.tokenizer()
    tokenizer.chat_template = tiny_chat.CHAT_TEMPLATE
    made: Any = getattr(transformers, kind)
    config = made.config_class(
        vocab_size=300,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        **({"num_experts": 4, "moe_intermediate_size": 32} if "Moe" in kind else {}),
        **({"num_labels": 1} if "Sequence" in kind else {}),
    )
    torch.manual_seed(0)
    place = cache / f"models--{name.replace('/', '--')}"
    snapshot = place / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text(COMMIT)
    made(config).save_pretrained(snapshot)
    tokenizer.save_pretrained(snapshot)


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
