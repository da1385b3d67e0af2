"""The preview shows what TRL trains on: text, mask and lengths."""

import pathlib
from typing import Any

import pytest
from trl import SFTConfig

from lohan.errors import ConfigError
from lohan.train.data.dataset import load_rows
from lohan.train.data.preview import prepare_tokens, preview_rows
from support import tiny_chat


def previewed(
    folder: pathlib.Path, rows: list[dict[str, Any]], *, max_length: int | None = 64, **changes: Any
) -> Any:
    path = tiny_chat.write_jsonl(folder / "rows.jsonl", rows)
    args = SFTConfig(output_dir=str(folder), use_cpu=True, max_length=max_length, **changes)
    tokenizer = tiny_chat.tokenizer()
    prepared = prepare_tokens(load_rows([str(path)]), tokenizer, args, "m")
    return preview_rows(prepared, tokenizer, num_shown=1, max_length=max_length)


CHAT = {
    "messages": [
        {"role": "user", "content": "red sky"},
        {"role": "assistant", "content": "blue sea"},
    ]
}


def test_the_loss_mask_of_a_chat_is_the_answer(tmp_path: pathlib.Path) -> None:
    shown = previewed(tmp_path, [CHAT], assistant_only_loss=True)
    texts = [(piece.text, piece.is_trained) for piece in shown.rows[0].pieces]
    assert texts == [("<|user|>red sky<|end|><|assistant|>", False), ("blue sea<|end|>", True)]
    assert shown.num_trained_tokens == shown.rows[0].num_trained_tokens > 0


def test_without_a_mask_everything_is_trained_on(tmp_path: pathlib.Path) -> None:
    shown = previewed(tmp_path, [{"text": "red sky"}])
    assert [piece.is_trained for piece in shown.rows[0].pieces] == [True]
    assert shown.rows[0].pieces[0].text == "red sky<|end|>"


def test_a_prompt_is_only_read(tmp_path: pathlib.Path) -> None:
    shown = previewed(tmp_path, [{"prompt": "red ", "completion": "sky"}])
    assert [piece.is_trained for piece in shown.rows[0].pieces] == [False, True]


def test_rows_that_are_cut_off_and_dropped_are_counted(tmp_path: pathlib.Path) -> None:
    long = {
        "messages": [
            {"role": "user", "content": "stone " * 100},
            {"role": "assistant", "content": "x"},
        ]
    }
    shown = previewed(tmp_path, [CHAT, long], max_length=32, assistant_only_loss=True)
    assert (shown.num_rows, shown.num_truncated, shown.num_dropped) == (2, 1, 1)
    assert shown.longest_tokens > 100


def test_the_row_a_template_refuses_is_named(tmp_path: pathlib.Path) -> None:
    wrong = {"messages": list(reversed(CHAT["messages"]))}
    with pytest.raises(ConfigError, match="refuses row 2"):
        previewed(tmp_path, [CHAT, wrong])
