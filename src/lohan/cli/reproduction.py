"""The published rows and their simulation, summed up per figure, as tables or JSON.

Owns grouping and printing; each row is simulated in `lohan.simulate.reproduce`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from rich.console import Console

from lohan.cli.output import table
from lohan.simulate.reproduce import (
    THROUGHPUT_METRICS,
    ReproducedRow,
    Spread,
    reproduce_row,
    spread_of,
)
from lohan.simulate.rows import PublishedRow


@dataclass(frozen=True, slots=True, kw_only=True)
class Reproduction:
    """Every row, and the spreads."""

    rows: tuple[ReproducedRow, ...]

    @property
    def throughput(self) -> list[ReproducedRow]:
        """Rows about speed: tokens, images or FLOPs per second."""
        return [row for row in self.rows if row.row.metric in THROUGHPUT_METRICS]

    @property
    def capacity(self) -> list[ReproducedRow]:
        """Rows about what fits that were simulated."""
        return [row for row in self.rows if row.is_right is not None]

    @property
    def skipped(self) -> list[ReproducedRow]:
        """Rows that were not simulated."""
        return [row for row in self.rows if row.reason]

    def overall(self) -> list[Spread]:
        """The spreads over all figures."""
        throughput = self.throughput
        groups = {
            "throughput, all systems": throughput,
            "throughput, lohan on one GPU": [
                row for row in throughput if row.row.system == "lohan" and row.row.num_gpus == 1
            ],
            "throughput, other systems": [row for row in throughput if row.row.system != "lohan"],
            "throughput, several GPUs": [row for row in throughput if row.row.num_gpus > 1],
            "stages and shares": [
                row for row in self.rows if row.row.metric not in THROUGHPUT_METRICS
            ],
        }
        return _spreads(groups.items())

    def per_figure(self) -> list[Spread]:
        """The spreads figure by figure, throughput and stage times alike."""
        figures: dict[str, list[ReproducedRow]] = {}
        for row in self.rows:
            figures.setdefault(row.row.figure, []).append(row)
        return _spreads(sorted(figures.items()))

    def to_fields(self) -> dict[str, object]:
        """Every row with all its columns, and the summary."""
        right = sum(bool(row.is_right) for row in self.capacity)
        return {
            "simulated": True,
            "rows": [row.to_fields() for row in self.rows],
            "summary": {
                "overall": [asdict(spread) for spread in self.overall()],
                "figures": [asdict(spread) for spread in self.per_figure()],
                "capacity": {
                    "num_rows": len(self.capacity),
                    "num_right": right,
                    "share_right": right / len(self.capacity) if self.capacity else None,
                },
                "num_rows": len(self.rows),
                "num_not_simulated": len(self.skipped),
            },
        }


def _spreads(groups: Iterable[tuple[str, Sequence[ReproducedRow]]]) -> list[Spread]:
    found = (spread_of(name, rows) for name, rows in groups)
    return [spread for spread in found if spread is not None]


def reproduction_of(rows: Iterable[PublishedRow]) -> Reproduction:
    """Simulate every row."""
    return Reproduction(rows=tuple(reproduce_row(row) for row in rows))


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
