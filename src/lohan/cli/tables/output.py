"""How commands print: one console, one JSON form.

Tables go to stdout as wide as the terminal, but never so narrow that numbers would be cut off: a
terminal wraps what is too wide for it.
"""

import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

_WIDTH_WITHOUT_TERMINAL = 132
_LEAST_WIDTH = 104


def console() -> Console:
    """The console for tables; colours only in a terminal."""
    found = Console(highlight=False, emoji=False, markup=False)
    found.width = max(found.width, _LEAST_WIDTH) if found.is_terminal else _WIDTH_WITHOUT_TERMINAL
    return found


def table(
    title: str,
    *columns: str,
    numbers: Sequence[str] = (),
    has_header: bool = True,
    rows: Iterable[Sequence[str]] = (),
) -> Table:
    """A table, of two columns unless they are named; those in `numbers` are set to the right."""
    columns = columns or ("what", "value")
    made = Table(
        show_header=has_header,
        title=title,
        title_justify="left",
        title_style="bold",
        box=None,
        pad_edge=False,
        # A title is not broken to the width of a narrow table.
        min_width=len(title.strip()),
    )
    for number, column in enumerate(columns):
        is_number = column in numbers
        # Names in the first column and numbers are read whole; long texts may wrap.
        made.add_column(
            column,
            justify="right" if is_number else "left",
            no_wrap=is_number or number == 0,
            overflow="fold",
        )
    for row in rows:
        made.add_row(*row)
    return made


def print_json(fields: dict[str, object]) -> None:
    """Print exactly one JSON object; what is not finite becomes null."""
    print(json.dumps(_finite(fields), indent=1, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return value
