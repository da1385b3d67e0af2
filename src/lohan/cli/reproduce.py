"""`lohan reproduce`: published figures next to simulated ones.

Owns the command's options. Computed in `lohan.paper`, printed in `reproduction`.
"""

import pathlib
from typing import Annotated

import typer

from lohan.cli.reading.options import JsonOption

RowsOption = Annotated[
    pathlib.Path | None,
    typer.Option("--rows", help="Another CSV file with the same columns as the shipped rows."),
]


def reproduce(rows: RowsOption = None, json: JsonOption = False) -> None:
    """Compare every published figure with the simulator: error per row, spread per figure."""
    from lohan.cli.tables.output import console, print_json
    from lohan.cli.tables.reproduction import show_reproduction
    from lohan.paper.reproduce import reproduction_of
    from lohan.paper.rows import rows_of, shipped_rows

    found = reproduction_of(shipped_rows() if rows is None else rows_of(rows))
    if json:
        print_json(found.to_fields())
    else:
        show_reproduction(found, console())
