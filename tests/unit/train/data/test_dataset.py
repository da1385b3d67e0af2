"""Rows of files: recognised forms, TRL's columns, and errors that name the row."""

import json
import pathlib
import types
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lohan.errors import ConfigError
from lohan.train.data.dataset import find_refused_row, load_rows, refuse_missing_template
from support import tiny_chat

USER, ASSISTANT = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}
TEXT_PARTS = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]


def written(folder: pathlib.Path, *rows: dict[str, Any]) -> list[str]:
    return [str(tiny_chat.write_jsonl(folder / "rows.jsonl", list(rows)))]


@pytest.mark.parametrize(
    ("row", "expected", "name"),
    [
        ({"messages": [USER, ASSISTANT]}, {"messages": [USER, ASSISTANT]}, "messages"),
        (
            {"messages": [{"role": "user", "content": TEXT_PARTS}, ASSISTANT], "id": 7},
            {"messages": [USER, ASSISTANT]},
            "messages",
        ),
        (
            {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]},
            {"messages": [USER, ASSISTANT]},
            "ShareGPT",
        ),
        (
            {
                "system": "be kind",
                "conversations": [
                    {"from": "human", "value": "hi"},
                    {"from": "gpt", "value": "yo"},
                ],
            },
            {"messages": [{"role": "system", "content": "be kind"}, USER, ASSISTANT]},
            "ShareGPT",
        ),
        (
            {"instruction": "hi", "input": "", "output": "yo"},
            {"prompt": [USER], "completion": [ASSISTANT]},
            "alpaca",
        ),
        (
            {"instruction": "add", "input": "1 2", "output": "3", "history": [["hi", "yo"]]},
            {
                "prompt": [USER, ASSISTANT, {"role": "user", "content": "add\n\n1 2"}],
                "completion": [{"role": "assistant", "content": "3"}],
            },
            "alpaca",
        ),
        (
            {"prompt": "a", "completion": "b"},
            {"prompt": "a", "completion": "b"},
            "prompt and completion",
        ),
        (
            {"prompt": "a", "completion": "b", "label": "of a class"},
            {"prompt": "a", "completion": "b"},
            "prompt and completion",
        ),
        (
            {"prompt": [USER], "completion": [ASSISTANT]},
            {"prompt": [USER], "completion": [ASSISTANT]},
            "prompt and completion",
        ),
        ({"text": "a b"}, {"text": "a b"}, "text"),
    ],
)
def test_a_form_is_recognised_and_converted(
    tmp_path: pathlib.Path, row: dict[str, Any], expected: dict[str, Any], name: str
) -> None:
    rows = load_rows(written(tmp_path, row, row))
    assert rows.format_name == name
    assert list(rows.table) == [expected, expected]


def test_rows_with_tools_fit_into_one_table(tmp_path: pathlib.Path) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    rows = load_rows(
        written(
            tmp_path,
            {"messages": [USER, ASSISTANT]},
            {
                "messages": [USER, {"role": "assistant", "tool_calls": [call]}],
                "tools": [{"name": "f"}],
            },
        ),
        cache=tmp_path / "cache",
    )
    assert rows.table[0] == {"messages": [USER, ASSISTANT], "tools": None}
    assert rows.table[1]["messages"][1]["tool_calls"] == [call]
    assert json.loads(rows.table[1]["tools"]) == [{"name": "f"}]


def test_the_same_rows_come_from_every_kind_of_file(tmp_path: pathlib.Path) -> None:
    rows = [{"text": "one"}, {"text": 'two, "three"\nfour'}]
    paths = {suffix: tmp_path / f"rows{suffix}" for suffix in (".jsonl", ".json", ".csv")}
    tiny_chat.write_jsonl(paths[".jsonl"], rows)
    paths[".json"].write_text(json.dumps(rows))
    paths[".csv"].write_text('text\none\n"two, ""three""\nfour"\n')
    paths[".parquet"] = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(rows), paths[".parquet"])
    for path in paths.values():
        assert list(load_rows([str(path)]).table) == rows, path
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    assert list(load_rows([str(tmp_path / "a.txt")]).table) == [{"text": "one"}, {"text": "two"}]
    (tmp_path / "lines.json").write_text('{"text": "one"}\n{"text": "two"}\n')
    assert len(load_rows([str(tmp_path / "lines.json")]).table) == 2
    (tmp_path / "data.json").write_text(json.dumps({"data": rows}))
    assert len(load_rows([str(tmp_path / "data.json")]).table) == 2


def test_several_files_make_one_table(tmp_path: pathlib.Path) -> None:
    tiny_chat.write_jsonl(tmp_path / "a.jsonl", [{"text": "one"}])
    tiny_chat.write_jsonl(tmp_path / "b.jsonl", [{"text": "two"}])
    rows = load_rows([str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")])
    assert [row["text"] for row in rows.table] == ["one", "two"]


def test_a_changed_file_is_not_taken_from_an_old_table(tmp_path: pathlib.Path) -> None:
    path = written(tmp_path, {"text": "one"})
    first = load_rows(path, cache=tmp_path / "cache")
    assert written(tmp_path, {"text": "two"}) == path
    second = load_rows(path, cache=tmp_path / "cache")
    assert [first.table[0]["text"], second.table[0]["text"]] == ["one", "two"]
    assert first.files_hash != second.files_hash


FILES = {
    "cut.jsonl": (b'{"text": "abc"}\n{"text": "de', "line 2.*ends within the line"),
    "wrong.jsonl": (b'{"text": "abc"}\n{"text" "d"}\n{"text": "x"}\n', "line 2 is not JSON"),
    "list.jsonl": (b"[1, 2]\n", "line 1 is not an object"),
    "empty.jsonl": (b"", "is empty"),
    "blank.jsonl": (b"\n\n", "has no rows"),
    "latin.txt": (b"caf\xe9 \xff\n", "line 1 is not UTF-8"),
    "cut.json": (b'[{"text": "a"}, {"te', "not JSON, at line 1"),
    "object.json": (b'{"rows": []}', "holds no list of rows"),
    "none.json": (b"[]", "has no rows"),
    "columns.csv": (b"text,id\na,1\nb\n", "line 3 has another number of columns"),
    "quote.csv": (b'text\n"a" b\n', "cannot be read"),
    "bad.parquet": (b"not parquet", "cannot be read as parquet"),
    "rows.xml": (b"<a/>", "unknown kind"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_broken_file_is_named_with_its_line(tmp_path: pathlib.Path, name: str) -> None:
    content, words = FILES[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=words) as refused:
        load_rows([str(tmp_path / name)])
    assert name in refused.value.what


def test_a_missing_file_is_named_with_the_nearest_one(tmp_path: pathlib.Path) -> None:
    (tmp_path / "chat.jsonl").write_text("{}")
    with pytest.raises(ConfigError, match="there is no file") as refused:
        load_rows([str(tmp_path / "caht.jsonl")])
    assert '"chat.jsonl"' in refused.value.remedy
    with pytest.raises(ConfigError, match="is not a file"):
        load_rows([str(tmp_path)])


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{"question": "a"}], "columns question: no known form"),
        ([{"prompt": "a", "chosen": "b", "rejected": "c"}], "trained on with --task dpo"),
        ([{"chosen": "b", "rejected": "c"}], "trained on with --task dpo"),
        ([{"prompt": "a", "completion": "b", "label": False}], "train with --task kto"),
        ([{"messages": [USER], "text": "a"}], "both messages and text fit"),
        ([{"text": "a"}, {"txt": "b"}], 'line 2 has no column "text"'),
        ([{"text": "  "}], "line 1: text is"),
        ([{"text": 5}], "line 1: text is 5"),
        ([{"messages": []}], "at least one message"),
        ([{"messages": "hello"}], "list of messages"),
        ([{"messages": [{"content": "a"}]}], r"messages\[1\]"),
        ([{"messages": [{"role": "user", "content": None}]}], r"messages\[1\].content"),
        ([{"messages": [{"role": "user", "content": [{"type": "image"}]}]}], "text parts only"),
        ([{"messages": [USER], "tools": "{"}], "tools is not JSON"),
        ([{"conversations": [{"from": "alien", "value": "a"}]}], "alien"),
        ([{"conversations": [{"speaker": "a"}]}], r"conversations\[1\]"),
        ([{"conversations": ["a"]}], r"conversations\[1\]"),
        ([{"instruction": "a", "output": ""}], "output is ''"),
        ([{"instruction": "a", "output": "b", "history": [["x"]]}], r"history\[1\]"),
        ([{"prompt": "a", "completion": [ASSISTANT]}], "not of one kind"),
        (
            [{"prompt": "a", "completion": "b"}, {"prompt": [USER], "completion": [ASSISTANT]}],
            "line 2 is text where",
        ),
    ],
)
def test_a_row_that_cannot_be_meant_is_named(
    tmp_path: pathlib.Path, rows: list[dict[str, Any]], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        load_rows(written(tmp_path, *rows))


def test_a_named_text_column_settles_what_is_meant(tmp_path: pathlib.Path) -> None:
    rows = load_rows(
        written(tmp_path, {"instruction": "a", "output": "b", "text": "c"}), text_column="text"
    )
    assert list(rows.table) == [{"text": "c"}]


def test_chat_rows_without_a_template_are_refused(tmp_path: pathlib.Path) -> None:
    tokenizer = tiny_chat.tokenizer()
    chat = load_rows(written(tmp_path, {"messages": [USER, ASSISTANT]}))
    with_path = types.SimpleNamespace(chat_template_path=None)
    refuse_missing_template(chat, tokenizer, "m", with_path)
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match=r"no chat template.*give a template with chat_template"):
        refuse_missing_template(chat, tokenizer, "m", with_path)
    with pytest.raises(ConfigError, match=r"put a template into the tokenizer"):
        refuse_missing_template(chat, tokenizer, "m", types.SimpleNamespace())
    texts = load_rows(written(tmp_path, {"text": "a"}))
    refuse_missing_template(texts, tokenizer, "m", with_path)


def test_the_row_a_template_refuses_is_found(tmp_path: pathlib.Path) -> None:
    rows = load_rows(
        written(tmp_path, {"messages": [USER, ASSISTANT]}, {"messages": [ASSISTANT, USER]})
    )
    found = find_refused_row(rows, tiny_chat.tokenizer())
    assert found is not None
    assert found[0] == 2
    assert "take turns" in found[1]
    assert "roles: assistant, user" in found[1]
