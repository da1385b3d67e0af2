"""Policies side by side, and published rows beside their simulation, as tables.

Owns wording and order; computed in `lohan.paper.comparison` and `lohan.paper.reproduce`.
"""

from collections.abc import Sequence

from rich.console import Console

from lohan.cli.tables.output import table
from lohan.paper.comparison import BASELINES, Comparison, speedup, tokens_per_kdollar
from lohan.paper.policies import LATER_SYSTEMS
from lohan.paper.reproduce import Reproduction, Spread
from lohan.units import format_bytes_decimal, format_count, format_seconds


def show_comparison(found: Comparison, console: Console) -> None:
    """Print the policies as a table."""
    workload = found.workload
    console.print(
        f"{found.shape.name} ({format_count(found.shape.num_parameters)} parameters) on "
        f"{found.machine.name}, ${found.machine.price_dollars:,.0f}",
        style="bold",
    )
    console.print(found.machine.description)
    batch = "each at its best batch" if found.finds_best_batch else f"batch {workload.batch}"
    clipping = (
        "lohan+ clips gradients, the others cannot"
        if any(row.plan.workload.clips_gradients for row in found.rows)
        else "without gradient clipping"
    )
    console.print(f"{batch} x {workload.sequence} tokens, {clipping}; all times are simulated")
    best = found.best_baseline
    columns = ["policy", "batch", "step", "tokens/s", "TFLOPS", "of model", "written"]
    columns += ["roofline", "per k$", "speed-up"]
    shown = table("", *columns, numbers=tuple(columns[1:]))
    shown.title = None
    for row in found.rows:
        step = row.step
        if step is None:
            continue
        per_kdollar, faster = tokens_per_kdollar(step), speedup(row, best)
        shown.add_row(
            row.policy,
            str(row.plan.workload.batch),
            format_seconds(step.step_seconds),
            f"{step.tokens_per_second:,.1f}",
            f"{step.paper_tflops:.1f}",
            f"{step.model_tflops:.1f}",
            format_bytes_decimal(step.written_bytes),
            f"{step.roofline_share:.0%}",
            "-" if per_kdollar is None else f"{per_kdollar:.1f}",
            "-" if faster is None else f"{faster:.2f}x",
        )
    console.print()
    console.print(shown if shown.row_count else "No policy fits.")
    missing = [
        (row.policy, str(row.plan.workload.batch), row.shortage)
        for row in found.rows
        if row.step is None
    ]
    if missing:
        columns = ["policy", "batch", "what is short"]
        console.print(table("\nDoes not fit", *columns, numbers=("batch",), rows=missing))
    console.print()
    if best is not None:
        console.print(
            f"speed-up is over {best.policy}, the fastest of the published baselines that fit "
            f"({', '.join(BASELINES)})"
        )
    elif any(row.policy in BASELINES for row in found.rows):
        console.print("none of the published baselines compared here fits: no speed-up is given")
    if any(row.policy in LATER_SYSTEMS for row in found.rows):
        console.print(
            f"{', '.join(LATER_SYSTEMS)}: the best their designs could do here; nothing is fitted "
            "to them (docs/reproduction.md)"
        )
    console.print(
        "TFLOPS: the paper's count of 8 per nominal parameter and token; of model: what the model "
        "itself needs\nwritten: to SSD per step; roofline: share of it that is reached; per k$: "
        "tokens/s for each 1000 dollars"
    )


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
    rows = [
        (
            one.name,
            str(one.num_rows),
            *(f"{share:.1%}" for share in (one.median, one.percentile_90, one.largest)),
        )
        for one in spreads
    ]
    if rows:
        console.print(table(title, "group", *columns, numbers=columns, rows=rows))


def _cell(number: int | None) -> str:
    return "-" if number is None else str(number)


def _value(value: float | str | None) -> str:
    return f"{value:.1f}" if isinstance(value, float) else str(value)
