"""`lohan report`: the page about a run, made again from the files in its folder.

Owns the command's options. The page itself is made by `lohan.report`.
"""

import pathlib
from typing import Annotated

import typer

from lohan.cli.options import ForceOption


def report(
    run: Annotated[pathlib.Path, typer.Argument(help="The folder of a run (its --out).")],
    out: Annotated[
        pathlib.Path | None,
        typer.Option(
            "--out", help="Write the page there. [default: _lohan/report.html in the folder]"
        ),
    ] = None,
    force: ForceOption = False,
    should_open: Annotated[
        bool, typer.Option("--open", help="Show the page in the web browser.")
    ] = False,
) -> None:
    """Write report.html: one page about a run that needs no network and can be passed on.

    The report in the run's own folder is replaced; with --out nothing is, unless --force is given.
    """
    from lohan.cli.files import check_outputs
    from lohan.cli.output import console
    from lohan.report.page import write_report

    check_outputs((out,), force=force)
    path = write_report(run, out=out)
    shown = console()
    shown.print(f"wrote {path}", soft_wrap=True)
    if should_open:
        _open(path)


def _open(path: pathlib.Path) -> None:
    import webbrowser

    from lohan.errors import HardwareError

    if not webbrowser.open(path.resolve().as_uri()):
        raise HardwareError(
            f"{path} was written, and no web browser could be started",
            why="none was found on this machine",
            remedy="open the file yourself; it can be copied to another machine",
        )
