"""`lohan report`: the page about a run, made again from the files in its folder.

Owns the command's options. The page itself is made by `lohan.report`.
"""

import pathlib
from typing import Annotated

import typer

from lohan.cli.reading.options import ForceOption, RunArgument, RunSsdOption


def report(
    run: RunArgument,
    ssd: RunSsdOption = None,
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
    from lohan.cli.reading.files import check_outputs
    from lohan.cli.tables.output import console
    from lohan.report.page import write_report

    check_outputs((out,), force=force)
    path = write_report(_folder_of(run, ssd or []), out=out)
    shown = console()
    shown.print(f"wrote {path}", soft_wrap=True)
    if should_open:
        _open(path)


def _folder_of(run: str, ssd: list[pathlib.Path]) -> pathlib.Path:
    """The output folder of a run, asked of its states where it is not named itself."""
    folder = pathlib.Path(run).expanduser()
    if not ssd and not folder.name.startswith("lohan-") and not any(folder.glob("lohan-*")):
        return folder  # without torch, which reading states needs
    from lohan.train.run.sealed_runs import find_run, out_of_run
    from lohan.working_folder import RUN_NAME, working_folder

    is_folder = (working_folder(folder) / RUN_NAME).is_file()
    return folder if is_folder else out_of_run(find_run(run, ssd))


def _open(path: pathlib.Path) -> None:
    import webbrowser

    from lohan.errors import HardwareError

    if not webbrowser.open(path.resolve().as_uri()):
        raise HardwareError(
            f"{path} was written, and no web browser could be started",
            why="none was found on this machine",
            remedy="open the file yourself; it can be copied to another machine",
        )
