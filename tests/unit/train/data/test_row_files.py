"""Rows that no program should choke on are named, whatever is wrong with them."""

import pathlib

import pytest

from lohan.errors import ConfigError
from lohan.train.data.dataset import load_rows

GOOD = '{"text": "red"}\n'
DEEP = "[" * 100_000 + "]" * 100_000
DIGITS = "9" * 5000
HALF = "red \\ud800 blue"


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        (
            "a.jsonl",
            GOOD + f'{{"text": "{HALF}"}}\n',
            r"a.jsonl line 2 has half a character, \\ud8",
        ),
        ("a.jsonl", GOOD + f'{{"text": {DEEP}}}\n', "a.jsonl line 2 is nested too deeply"),
        ("a.jsonl", GOOD + f'{{"text": "a", "n": {DIGITS}}}\n', "a.jsonl line 2 has a number"),
        ("a.json", f'[{{"text": "red"}}, {{"text": "{HALF}"}}]', "a.json row 2 has half a char"),
        ("a.json", DEEP, "a.json is nested too deeply"),
        ("a.json", f"[{DIGITS}]", "a.json has a number"),
        ("a.csv", f'messages\n"[{DIGITS}]"\n', "a.csv line 2: messages has a number"),
    ],
)
def test_a_row_that_cannot_be_read_is_named(
    tmp_path: pathlib.Path, name: str, text: str, told: str
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=told):
        load_rows([str(tmp_path / name)])


def test_a_character_of_two_halves_is_one(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "\\ud83d\\ude00"}\n')
    assert load_rows([str(tmp_path / "a.jsonl")]).table[0] == {"text": "\U0001f600"}


def test_a_row_that_a_tokenizer_would_take_minutes_for_is_refused(tmp_path: pathlib.Path) -> None:
    long = "red " * 4_000_001
    rows = [
        f'{{"text": "{long}"}}\n',
        f'{{"messages": [{{"role": "user", "content": "{long}"}}]}}\n',
    ]
    for row in rows:
        (tmp_path / "a.jsonl").write_text(row)
        with pytest.raises(ConfigError, match=r"a.jsonl line 1 has 16,000,004 characters"):
            load_rows([str(tmp_path / "a.jsonl")])


@pytest.mark.parametrize("is_cached", [False, True])
def test_what_a_table_does_not_take_is_named_too(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, is_cached: bool
) -> None:
    (tmp_path / "a.jsonl").write_text(GOOD)
    half = {"text": "\ud800"}  # as if a reader had let it through
    monkeypatch.setattr("lohan.train.data.dataset.convert", lambda row, form: half)
    with pytest.raises(ConfigError, match=r"a row cannot be put into a table, a.jsonl line 1"):
        load_rows([str(tmp_path / "a.jsonl")], cache=tmp_path / "t" if is_cached else None)
