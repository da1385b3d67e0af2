"""`lohan check`: is what lies in a directory whole? A model, or the states of a run.

Owns the command's options and what is printed; checked in `lohan.train.run.checking`. Exit code 1
means that something is wrong with what was found, or that it could not be checked.
"""

import pathlib
from typing import Annotated

import typer

from lohan.cli.reading.options import JsonOption, RunSsdOption, TrustOption

EXIT_DAMAGED = 1


def check(
    directory: Annotated[
        pathlib.Path,
        typer.Argument(
            metavar="RUN",
            help="A run's output folder, its directory on an SSD, or its id with --ssd; or a "
            "model, an archive, or an SSD directory with runs.",
        ),
    ],
    ssd: RunSsdOption = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Of a model: headers only, not every value.")
    ] = False,
    trust_remote_code: TrustOption = False,
    json: JsonOption = False,
) -> None:
    """Check that a model, copies of states beside it, or the sealed states of a run are whole."""
    from lohan.cli.tables.output import print_json
    from lohan.train.run.checking import check_directory

    reports = check_directory(
        directory, ssd or [], quick=quick, trust_remote_code=trust_remote_code
    )
    if json:
        print_json({"checked": reports})
    else:
        for report in reports:
            _print(report)
    if any(report["problems"] for report in reports):
        raise typer.Exit(EXIT_DAMAGED)


def _print(report: dict[str, object]) -> None:
    from lohan.cli.tables.output import console, table

    problems, remarks = report["problems"], report["remarks"]
    assert isinstance(problems, list)
    assert isinstance(remarks, list)
    verdict = "Whole" if not problems else "Damaged" if report["is_checked"] else "Not checked"
    about = report.keys() - {"problems", "remarks", "is_checked"}
    rows = [(name, str(value)) for name, value in report.items() if name in about]
    console().print(table(verdict, "what", "found", rows=rows))
    for kind, sentences in (("problem", problems), ("remark", remarks)):
        for sentence in sentences:
            console().print(f"{kind}: {sentence}", soft_wrap=True)
