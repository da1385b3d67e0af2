"""Tables of rows that a power cut left empty, short or changed are made again."""

import pathlib

import pytest

from lohan.train.data.dataset import load_rows
from lohan.train.data.whole_tables import whole_tables
from support import tiny_chat


def rows_in(tables: pathlib.Path, data: pathlib.Path) -> list[object]:
    with whole_tables(tables):
        return list(load_rows([str(data)], cache=tables / "train").table)


@pytest.mark.parametrize("name", ["dataset_info.json", "generator-train.arrow", "files-0.json"])
@pytest.mark.parametrize("damage", ["empty", "short", "changed", "gone"])
def test_damaged_tables_are_made_again(tmp_path: pathlib.Path, name: str, damage: str) -> None:
    data = tiny_chat.write_jsonl(tmp_path / "rows.jsonl", tiny_chat.conversations(4))
    tables = tmp_path / "tables"
    tables.mkdir()
    expected = rows_in(tables, data)
    (path,) = tables.rglob(name)
    whole = path.read_bytes()
    changed = {"empty": b"", "short": whole[:-9], "changed": whole[:30] + b"\0" + whole[31:]}
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(changed[damage])
    assert rows_in(tables, data) == expected


def test_whole_tables_stay_and_what_nobody_finished_goes(tmp_path: pathlib.Path) -> None:
    data = tiny_chat.write_jsonl(tmp_path / "rows.jsonl", tiny_chat.conversations(4))
    tables = tmp_path / "tables"
    tables.mkdir()
    rows_in(tables, data)
    (table,) = tables.rglob("generator-train.arrow")
    made = table.stat().st_ino
    half = table.with_name("cache-0123.arrow")
    half.write_bytes(b"half of a table")
    rows_in(tables, data)
    assert table.stat().st_ino == made
    assert not half.exists()
