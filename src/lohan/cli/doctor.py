"""`lohan doctor`: what this machine offers, which code paths are in use and why.

Owns the questions and their order. It measures nothing and leaves nothing behind; a directory is
checked as a run would check it before it starts.
"""

import pathlib
from typing import Annotated

import typer

from lohan.cli.options import JsonOption


def doctor(
    ssd: Annotated[
        list[pathlib.Path] | None,
        typer.Option("--ssd", help="An SSD directory to check; may be given several times."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Show the kernels, the I/O engine and the SSD directories lohan would use here."""
    from lohan.cli.output import console, print_json, table
    from lohan.units import format_bytes

    facts = _facts()
    reports = [_directory(path) for path in ssd or []]
    if json:
        print_json({**facts, "ssd": reports})
        return
    shown = table("This machine", "what", "found")
    for name, value in facts.items():
        shown.add_row(name.replace("_", " "), str(value))
    console().print(shown)
    if not reports:
        return
    drives = table("SSD directories", "path", "filesystem", "access", "free", "beware")
    for report in reports:
        free = format_bytes(float(str(report["free_bytes"])))
        beware = "; ".join(str(warning) for warning in _list(report["warnings"])) or "-"
        drives.add_row(
            str(report["path"]), str(report["filesystem"]), str(report["access"]), free, beware
        )
    console().print()
    console().print(drives)


def _list(value: object) -> list[object]:
    return list(value) if isinstance(value, list) else [value]


def _facts() -> dict[str, object]:
    import os
    import platform
    from importlib import metadata

    import lohan
    from lohan import _native
    from lohan.ssd import choose_engine

    def version_of(package: str) -> str:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            return "not installed"

    engine, reason = choose_engine()
    engine.close()
    usable, compiled = _native.available_kernel_isas(), _native.compiled_kernel_isas()
    unusable = [isa for isa in compiled if isa not in usable]
    return {
        "lohan": lohan.__version__,
        "python": platform.python_version(),
        "torch": version_of("torch"),
        "transformers": version_of("transformers"),
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "cores": os.cpu_count() or 1,
        "update_kernels": f"{_native.kernel_isa()} (usable: {', '.join(usable)}"
        + (f"; this processor lacks {', '.join(unusable)})" if unusable else ")"),
        "checksums": _native.crc32c_path(),
        "io_engine": reason,
    }


def _directory(path: pathlib.Path) -> dict[str, object]:
    from lohan.ssd import check_directory

    report = check_directory(path)
    return {
        "path": report.path,
        "filesystem": report.filesystem,
        "access": report.access.value,
        "free_bytes": report.free_bytes,
        "warnings": list(report.warnings),
    }
