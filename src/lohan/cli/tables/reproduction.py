"""The published rows beside their simulation, as tables.

Owns wording and order; computed in `lohan.paper.reproduce`.
"""

from collections.abc import Sequence

from rich.console import Console

from lohan.cli.tables.output import table
from lohan.paper.reproduce import Reproduction, Spread


def show_reproduction(found: Reproduction, console: Console) -> None:
    """Print every row, then the spreads, then what was not simulated."""
    shown = table(
        "Published and simulated",
        *("source", "system", "model", "batch", "GPUs", "RAM", "SSDs", "metric"),
        *("published", "simulated", "error"),
        numbers=("batch", "GPUs", "RAM", "SSDs", "published", "simulated", "error"),
    )
    for one in found.rows:
        if one.reason:
            continue
        row = one.row
        error = f"{one.relative_error:+.1%}" if one.relative_error is not None else ""
        if one.is_right is not None:
            error = "right" if one.is_right else "WRONG"
        shown.add_row(
            row.figure,
            row.system,
            row.model,
            row.batch,
            f"{row.num_gpus}x {row.gpu}",
            _cell(row.ram_gb),
            _cell(row.num_ssds),
            row.metric,
            _value(one.published),
            _value(one.simulated),
            error,
        )
    console.print(shown)
    _show_spreads("\nErrors over all figures", found.overall(), console)
    _show_spreads("\nErrors per figure", found.per_figure(), console)
    capacity = found.capacity
    if capacity:
        right = sum(bool(row.is_right) for row in capacity)
        console.print(
            f"\nCapacity rows right: {right} of {len(capacity)} ({right / len(capacity):.1%})"
        )
    if found.skipped:
        skipped = table("\nNot simulated", "source", "system", "model", "batch", "metric", "why")
        for one in found.skipped:
            row = one.row
            skipped.add_row(row.figure, row.system, row.model, row.batch, row.metric, one.reason)
        console.print(skipped)


def _show_spreads(title: str, spreads: Sequence[Spread], console: Console) -> None:
    columns = ("rows", "median", "90th percentile", "largest")
    shown = table(title, "group", *columns, numbers=columns)
    for spread in spreads:
        shown.add_row(
            spread.name,
            str(spread.num_rows),
            f"{spread.median:.1%}",
            f"{spread.percentile_90:.1%}",
            f"{spread.largest:.1%}",
        )
    if shown.row_count:
        console.print(shown)


def _cell(number: int | None) -> str:
    return "-" if number is None else str(number)


def _value(value: float | str | None) -> str:
    return f"{value:.1f}" if isinstance(value, float) else str(value)
