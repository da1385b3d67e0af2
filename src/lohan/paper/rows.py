"""The published rows: reading them, and what their words mean.

Owns the CSV's columns and the spelling of its cells ("13B / 70B", "70B and up", "best", "-"). What
a row says is compared with the simulator in `reproduce`.
"""

import csv
import pathlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from importlib import resources
from typing import Any

from lohan.errors import ConfigError

GPT_SIZES = ("1.55B", "6B", "13B", "30B", "65B", "70B", "135B", "175B", "276B", "412B")
"""The paper's GPT models, smallest first. 65B and 70B are two names of one model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRow:
    """One published figure."""

    gpu: str
    num_gpus: int
    ram_gb: int | None
    num_ssds: int | None
    model: str
    batch: str
    system: str
    metric: str
    value: str
    source: str
    certainty: str

    @property
    def figure(self) -> str:
        """The figure or section the row comes from."""
        return self.source.split("(")[0].split("/")[0].removesuffix(" raw data in artifact").strip()


COLUMNS = tuple(field.name for field in fields(PublishedRow))
_NUMBERS = ("num_gpus", "ram_gb", "num_ssds")


def whole_number(text: str) -> int | None:
    """The whole number a cell holds; None if it holds none. Spreadsheets write 12 as 12.0."""
    digits = text.strip()
    if "." in digits:
        digits = digits.rstrip("0").removesuffix(".")
    try:
        return int(digits)
    except ValueError:
        return None


def _whole(text: str, *, column: str, line: int) -> int | None:
    if text.strip() in ("-", ""):
        return None
    number = whole_number(text)
    if number is None or number < 1:
        raise ConfigError(
            f"line {line} has {column} {text!r}",
            why="a whole number of 1 or more, or '-' for unstated, was expected",
            remedy="correct the row",
        )
    return number


def parse_rows(lines: Iterable[str], *, where: str) -> list[PublishedRow]:
    """Rows of a CSV with the columns above.

    Raises:
        ConfigError: naming the line, if a column is missing or a number is none.
    """
    reader = csv.DictReader(lines)
    missing = [column for column in COLUMNS if column not in (reader.fieldnames or ())]
    if missing:
        raise ConfigError(
            f"{where} lacks the columns {', '.join(missing)}",
            why=f"its first line names {', '.join(reader.fieldnames or ['nothing'])}",
            remedy=f"give it the columns {', '.join(COLUMNS)}",
        )
    rows = []
    for cells in _cells(reader, where):
        line = reader.line_num
        if any(cells[column] is None for column in COLUMNS):
            raise ConfigError(
                f"line {line} of {where} has too few cells",
                why=f"a row has {len(COLUMNS)} cells",
                remedy="complete or delete the row",
            )
        numbers = {one: _whole(cells[one], column=one, line=line) for one in _NUMBERS}
        texts = {one: cells[one].strip() for one in COLUMNS if one not in _NUMBERS}
        row: Any = {**texts, **numbers, "num_gpus": numbers["num_gpus"] or 1}
        rows.append(PublishedRow(**row))
    return rows


def _cells(reader: "csv.DictReader[str]", where: str) -> Iterator[dict[str, str]]:
    try:
        yield from reader
    except csv.Error as error:
        raise ConfigError(
            f"line {reader.line_num} of {where} is not CSV",
            why=str(error),
            remedy="correct the row",
        ) from error


def shipped_rows() -> list[PublishedRow]:
    """The rows that come with the project."""
    text = resources.files("lohan.paper").joinpath("published_numbers.csv").read_text()
    return parse_rows(text.splitlines(), where="published_numbers.csv")


def rows_of(path: str | pathlib.Path) -> list[PublishedRow]:
    """Rows of a file with the same columns.

    Raises:
        ConfigError: if the file cannot be read or is not such a table.
    """
    try:
        # Spreadsheets put a byte order mark before the first column's name.
        text = pathlib.Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} cannot be read",
            why=str(error),
            remedy="give the path of a CSV file with published rows",
        ) from error
    return parse_rows(text.splitlines(), where=str(path))
