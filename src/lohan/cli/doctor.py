"""`lohan doctor`: is this machine ready, what to fix, and a block for a bug report.

Owns the options and the printing; what is looked at is in `lohan.doctor`. It measures nothing and
leaves nothing behind. Exit code 0: ready. 1: not ready.
"""

import pathlib
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from lohan.cli.reading.options import DeviceOption, JsonOption

if TYPE_CHECKING:
    from lohan.doctor import Examination

EXIT_NOT_READY = 1


def doctor(
    ssd: Annotated[
        list[pathlib.Path] | None,
        typer.Option("--ssd", help="An SSD directory to check; may be given several times."),
    ] = None,
    device: DeviceOption = None,
    report: Annotated[
        bool,
        typer.Option("--report", help="Print plain text without personal paths, for a bug report."),
    ] = False,
    json: JsonOption = False,
) -> None:
    """Say whether this machine is ready to train, and what to fix if not.

    Looks at versions, native kernels, the I/O engine, the device, memory limits and the SSD
    directories given. Exit code 0: ready. 1: not ready.
    """
    from lohan.cli.tables.output import print_json
    from lohan.doctor import examine, report_text

    found = examine(ssd=ssd or (), device=device)
    if json:
        findings = [{**asdict(one), "remedy": one.remedy or None} for one in found.findings]
        print_json({"is_ready": found.is_ready, "findings": findings})
    elif report:
        print(report_text(found))
    else:
        _print(found)
    if not found.is_ready:
        raise typer.Exit(EXIT_NOT_READY)


def _print(found: "Examination") -> None:
    from lohan.cli.tables.output import console, table
    from lohan.doctor import Level

    out = console()
    marks = {Level.FINE: ""}
    rows = [(one.name, marks.get(one.level, one.level.value), one.found) for one in found.findings]
    out.print(table("This machine", "what", "", "found", rows=rows))
    for level, title in ((Level.PROBLEM, "To fix"), (Level.NOTE, "Worth knowing")):
        remedies = [one for one in found.findings if one.level is level]
        if remedies:
            out.print()
            out.print(title, style="bold")
        for one in remedies:
            out.print(f"  {one.name}: {one.remedy}", soft_wrap=True)
    count = sum(one.level is Level.PROBLEM for one in found.findings)
    problems = f"{count} problem{'s' if count > 1 else ''}"
    out.print()
    out.print(f"Not ready: {problems} to fix first." if count else "Ready to train.")
    out.print("For a bug report: lohan doctor --report")
