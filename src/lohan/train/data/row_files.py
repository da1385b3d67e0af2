"""Rows of a file, one at a time, each with the place to name when it is wrong.

Owns reading .jsonl, .json, .csv, .parquet and .txt and saying where a file is broken. What a row
means is in `row_formats`. Called by `dataset`.
"""

import csv
import json
import os
import pathlib
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lohan.errors import ConfigError, nearest_names

_HALF_CHARACTER = re.compile(r"\\u[dD][89a-fA-F]")
"""As JSON escapes it; where two make one character, both match."""
SUFFIXES = (".jsonl", ".json", ".csv", ".parquet", ".txt")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row and where it stands, such as `chat.jsonl line 12`."""

    place: str
    fields: dict[str, Any]


def read_rows(path: pathlib.Path) -> Iterator[Row]:
    """Read a file row by row.

    Raises:
        ConfigError: the file is missing, empty, cut off, not UTF-8 or of an unknown kind; the line
            or row is named.
    """
    check_file(path)
    readers = {
        ".jsonl": _read_lines,
        ".json": _read_json,
        ".csv": _read_csv,
        ".parquet": _read_parquet,
        ".txt": _read_text,
    }
    has_rows = False
    for row in readers[path.suffix.lower()](path):
        has_rows = True
        yield row
    if not has_rows:
        raise ConfigError(
            f"{path} has no rows",
            why="there is nothing to train on",
            remedy="give a file with rows",
        )


def refuse_other_bytes(path: str) -> None:
    """Refuse a path that is not UTF-8 where libraries are given it."""
    if path != path.encode(errors="replace").decode():
        raise ConfigError(
            f"the path {os.fsencode(path)!r} is not UTF-8",
            why="libraries that read and write there take paths in UTF-8 only",
            remedy="rename it, or make a link to it whose path is UTF-8",
        )


def check_file(path: pathlib.Path) -> None:
    """Refuse a file that is not there, empty, or of a kind that is not read."""
    if not path.exists():
        near = [one.name for one in path.parent.glob("*")] if path.parent.is_dir() else []
        hint = nearest_names(path.name, near) if near else "correct the path"
        raise ConfigError(
            f"there is no file {path}",
            why="rows are read from it",
            remedy=hint if not hint.startswith("write one of") else "correct the path",
        )
    if not path.is_file():
        raise ConfigError(
            f"{path} is not a file", why="rows are read from files", remedy="name the file in it"
        )
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(
            f"{path} is of an unknown kind",
            why=f"files that end in {', '.join(SUFFIXES)} are read",
            remedy="convert it, or give it the ending of what it holds",
        )
    if path.stat().st_size == 0:
        raise ConfigError(
            f"{path} is empty", why="there is nothing to train on", remedy="give a file with rows"
        )


def _text_lines(path: pathlib.Path) -> Iterator[tuple[int, str]]:
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise ConfigError(
                    f"{path} line {number} is not UTF-8 (byte {error.start} of the line)",
                    why="text files are read as UTF-8",
                    remedy="convert the file, for example with iconv -t UTF-8",
                ) from error


def _read_lines(path: pathlib.Path) -> Iterator[Row]:
    last = path.stat().st_size
    seen = 0
    for number, line in _text_lines(path):
        seen += len(line.encode())
        if not line.strip():
            continue
        place = f"{path.name} line {number}"
        try:
            found = parse_json(line, f"{path} line {number}")
        except json.JSONDecodeError as error:
            is_cut = seen >= last and not line.endswith("\n")
            raise ConfigError(
                f"{path} line {number} is not JSON, at column {error.colno}"
                + (": the file ends within the line" if is_cut else ""),
                why=error.msg[:1].lower() + error.msg[1:],
                remedy="the file was cut off: copy it again, or delete the last line"
                if is_cut
                else "correct the line: each one holds one JSON object",
            ) from error
        yield Row(place=place, fields=_object(found, place))


def parse_json(text: str, place: str, *, is_whole: bool = True) -> Any:
    """Read JSON that somebody else wrote; `place` names it where it cannot be used.

    Args:
        is_whole: False where rows in it are looked through one by one.

    Raises:
        JSONDecodeError: it is none.
        ConfigError: it is, and no text and no number of this world comes of it.
    """
    try:
        found = json.loads(text)
        if is_whole and _HALF_CHARACTER.search(text):
            _refuse_half_characters(found, place)
    except json.JSONDecodeError:
        raise
    except RecursionError as error:
        raise ConfigError(
            f"{place} is nested too deeply",
            why=f"more than about {sys.getrecursionlimit()} lists or objects are in each other",
            remedy="correct or delete it",
        ) from error
    except ValueError as error:
        raise ConfigError(
            f"{place} has a number that cannot be read",
            why=str(error).partition(";")[0],
            remedy="correct it, or write it as a text",
        ) from error
    return found


def _refuse_half_characters(found: Any, place: str) -> None:
    try:
        json.dumps(found, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{place} has half a character, \\u{ord(error.object[error.start]):04x}",
            why="such characters are written as two of these, and this one stands alone",
            remedy="correct or delete it: text was cut in the middle of a character",
        ) from error


def _read_json(path: pathlib.Path) -> Iterator[Row]:
    text = "".join(line for _, line in _text_lines(path))
    try:
        found = parse_json(text, str(path), is_whole=False)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":  # one object per line, under the wrong ending
            yield from _read_lines(path)
            return
        raise ConfigError(
            f"{path} is not JSON, at line {error.lineno} column {error.colno}",
            why=error.msg[:1].lower() + error.msg[1:],
            remedy="correct it; if it was cut off, copy it again",
        ) from error
    rows = found.get("data") if isinstance(found, dict) else found
    if not isinstance(rows, list):
        raise ConfigError(
            f"{path} holds no list of rows",
            why='a list of objects is expected, or an object with a list under "data"',
            remedy="write [{...}, {...}], or one object per line in a .jsonl file",
        )
    may_have_halves = _HALF_CHARACTER.search(text) is not None
    for number, row in enumerate(rows, start=1):
        place = f"{path.name} row {number}"
        if may_have_halves:
            _refuse_half_characters(row, place)
        yield Row(place=place, fields=_object(row, place))


def _read_csv(path: pathlib.Path) -> Iterator[Row]:
    reader = csv.DictReader((line for _, line in _text_lines(path)), strict=True)
    try:
        for fields in reader:
            place = f"{path.name} line {reader.line_num}"
            if None in fields or None in fields.values():
                raise ConfigError(
                    f"{place} has another number of columns than the first line",
                    why=f"the first line names {len(reader.fieldnames or ())} columns",
                    remedy="put texts with commas or line ends in double quotes",
                )
            yield Row(place=place, fields=dict(fields))
    except csv.Error as error:
        raise ConfigError(
            f"{path} line {reader.line_num} cannot be read",
            why=str(error),
            remedy="put texts with commas or line ends in double quotes",
        ) from error


def _read_parquet(path: pathlib.Path) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        number = 0
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1000):
                for fields in batch.to_pylist():
                    number += 1
                    yield Row(place=f"{path.name} row {number}", fields=fields)
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(
            f"{path} cannot be read as parquet",
            why=" ".join(str(error).split()),
            remedy="copy the file again, or write it anew",
        ) from error


def _read_text(path: pathlib.Path) -> Iterator[Row]:
    for number, line in _text_lines(path):
        text = line.rstrip("\r\n")
        if text.strip():
            yield Row(place=f"{path.name} line {number}", fields={"text": text})


def _object(found: Any, place: str) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise ConfigError(
            f"{place} is not an object",
            why="a row has named columns",
            remedy='write it as {"messages": [...]}',
        )
    return found
