"""`lohan compare`: every policy on the same machine, model and batch. `lohan reproduce`: published
figures next to simulated ones.

Owns the commands' options. Computed in `lohan.paper`, printed in `paper_tables`.
"""

import pathlib
from typing import Annotated

import typer

from lohan.cli.reading import options

PoliciesOption = Annotated[
    str | None, typer.Option("--policies", help="Only these, separated by commas.")
]
BestBatchOption = Annotated[
    bool, typer.Option("--best-batch", help="Each policy at its own fastest batch instead.")
]
ClipOption = Annotated[
    bool, typer.Option("--clip", help="lohan+ with gradient clipping; the others have none.")
]
RowsOption = Annotated[
    pathlib.Path | None,
    typer.Option("--rows", help="Another CSV file with the same columns as the shipped rows."),
]


def compare(
    model: options.ModelArgument,
    machine: options.MachineOption = None,
    batch: options.BatchOption = 8,
    seq: options.SequenceOption = None,
    ram: options.RamOption = None,
    gpu: options.GpuOption = None,
    ssds: options.SsdsOption = None,
    gpus: options.GpusOption = None,
    policies: PoliciesOption = None,
    best_batch: BestBatchOption = False,
    clip: ClipOption = False,
    json: options.JsonOption = False,
) -> None:
    """Put the policies side by side: what fits, how fast, what it wears and costs (simulated)."""
    from lohan.cli.reading.request import machine_asked, policies_asked, shape_asked
    from lohan.cli.tables.output import console, print_json
    from lohan.cli.tables.paper_tables import show_comparison
    from lohan.paper.comparison import comparison_of
    from lohan.plan.workload import Workload

    asked = policies_asked(policies)
    box = machine_asked(machine, ram=ram, gpu=gpu, ssds=ssds, gpus=gpus)
    shape, sequence = shape_asked(model, seq)
    workload = Workload(batch=batch, sequence=sequence)
    found = comparison_of(asked, box, shape, workload, finds_best_batch=best_batch, clips_ours=clip)
    if json:
        print_json(found.to_fields())
    else:
        show_comparison(found, console())


def reproduce(rows: RowsOption = None, json: options.JsonOption = False) -> None:
    """Compare every published figure with the simulator: error per row, spread per figure."""
    from lohan.cli.tables.output import console, print_json
    from lohan.cli.tables.paper_tables import show_reproduction
    from lohan.paper.reproduce import reproduction_of
    from lohan.paper.rows import rows_of, shipped_rows

    found = reproduction_of(shipped_rows() if rows is None else rows_of(rows))
    if json:
        print_json(found.to_fields())
    else:
        show_reproduction(found, console())
