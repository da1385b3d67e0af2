"""`lohan profile`: measure this machine, or show what was measured.

Owns the command's options. Measuring is in `lohan.measure`, the tables in `profile_tables`, what
the figures mean for a fine-tune in `profile_meaning`.
"""

import pathlib
import sys
from typing import Annotated

import typer

from lohan.cli.reading.options import DeviceOption, ForceOption, JsonOption


def profile(
    ssd: Annotated[
        list[pathlib.Path],
        typer.Option("--ssd", help="An SSD directory, one per drive; may be given several times."),
    ],
    device: DeviceOption = None,
    ram: Annotated[
        str | None,
        typer.Option("--ram", help="RAM to plan with: 48GiB. [default: what is free]"),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option("--gpu", help="GPU memory to plan with: 20GiB. [default: what is free]"),
    ] = None,
    refresh: Annotated[
        bool, typer.Option("--refresh", help="Measure again, whatever was kept.")
    ] = False,
    sustained: Annotated[
        float | None,
        typer.Option(
            "--sustained",
            help="Seconds of writing without a pause, per drive; long enough to fill a drive's "
            "fast cache, such as 60: tens of GB. Measures again. [default: not at all, and 2 GiB "
            "are written]",
        ),
    ] = None,
    json: JsonOption = False,
    out: Annotated[
        pathlib.Path | None,
        typer.Option("--out", help="Write the machine to this .json, for --machine elsewhere."),
    ] = None,
    force: ForceOption = False,
) -> None:
    """Measure SSDs, copies, compute and CPU updates; kept, so the next time answers at once.

    Exit code 0: measured or kept figures are shown. 2: the request cannot be met.
    """
    from lohan.cli.reading.files import check_outputs
    from lohan.cli.reading.request import parse_size
    from lohan.cli.tables.lasting_output import leaving_on_sigterm
    from lohan.cli.tables.output import console, print_json
    from lohan.cli.tables.profile_tables import show_profile
    from lohan.durable_files import replace_text
    from lohan.measure import measuring_bar, profile_machine
    from lohan.simulate.answers.machine_meaning import meaning_of

    check_outputs([out], force=force)
    ram_bytes = None if ram is None else parse_size(ram, "--ram")
    gpu_bytes = None if gpu is None else parse_size(gpu, "--gpu")
    # The files made for measuring are removed first.
    with leaving_on_sigterm(), measuring_bar() as on_share:
        measured, source = profile_machine(
            ssd=ssd,
            device=device,
            ram_bytes=ram_bytes,
            gpu_bytes=gpu_bytes,
            sustained_seconds=sustained,
            should_refresh=refresh or sustained is not None,
            report=lambda line: print(line, file=sys.stderr, flush=True),
            on_share=on_share,
        )
    meaning = meaning_of(measured.machine)
    if out is not None:
        replace_text(out, measured.machine.to_json())
    if json:
        print_json(
            {
                **measured.to_fields(),
                "source": source,
                "meaning": None if meaning is None else meaning.to_fields(),
            }
        )
        return
    show_profile(measured, source, meaning, console(), out=out)
