"""What is wrong, known and not mended yet: counted by name, apart from what is found wrong.

An entry goes with the change that mends it.
"""

import shutil

from torturing.places import Run
from torturing.totals import Totals

KNOWN = {
    "an I/O error on OUT ends in a traceback": (
        r"a traceback is shown.*(OSError: \[Errno (5|27|28|30|122)\]|FileNotFoundError: \[Errno)"
    ),
    "a killed process leaves .partial- or .lohan-reserved in OUT": (
        r"(files more than the undisturbed run|left beside the output folder): .*"
        r"(\.partial-|\.lohan-reserved)"
    ),
    "tables of rows that are damaged end in a traceback": (
        r"tables/.*a traceback is shown|a traceback is shown.*(flatbuffers|ArrowInvalid|pyarrow)"
    ),
}
"""A sentence of the judge that matches is of this name."""


def clear_row_cache(run: Run, totals: Totals) -> None:
    """Remove tables of rows that a power cut left empty: the library that writes them does not
    flush them, and reads them again."""
    tables = run.out / "_lohan" / "tables"
    files = [path for path in tables.rglob("*") if path.is_file() and path.suffix != ".lock"]
    if any(path.stat().st_size == 0 for path in files):
        totals.known["tables of rows are empty after a power cut"] += 1
        shutil.rmtree(tables)
