"""`lohan clean`: the runs left in SSD directories, and removing them when told to.

Owns the questions asked before anything is deleted, and how runs are shown. What belongs to a run
and how it is removed is known to `lohan.store`.
"""

import pathlib
from typing import TYPE_CHECKING, Annotated

import typer

from lohan.cli.reading.options import JsonOption

if TYPE_CHECKING:
    from lohan.store import LeftRun, LeftRuns

EXIT_NOT_REMOVED = 1


def clean(
    ssd: Annotated[
        list[pathlib.Path],
        typer.Option("--ssd", help="An SSD directory to look into; may be given several times."),
    ],
    remove: Annotated[
        list[str] | None,
        typer.Option("--remove", help="Remove the run of this id; may be given several times."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Remove without asking.")] = False,
    incomplete: Annotated[
        bool,
        typer.Option(
            "--incomplete", help="Remove a run although some of its SSD directories are not given."
        ),
    ] = False,
    json: JsonOption = False,
) -> None:
    """List the runs left in SSD directories; remove one only when named and confirmed.

    Exit code 0: done. 1: the answer was no, nothing was removed. 2: it cannot be done.
    """
    from lohan.cli.tables.output import print_json
    from lohan.store import list_left_runs

    found = list_left_runs(ssd)
    if remove:
        _remove(found, remove, is_sure=yes, is_incomplete_fine=incomplete, as_json=json)
    elif json:
        fields: dict[str, object] = {"runs": [_fields(run) for run in found.runs]}
        print_json({**fields, "remarks": list(found.remarks)})
    else:
        _show(found)


def _show(found: "LeftRuns") -> None:
    from lohan.cli.tables.output import console, table
    from lohan.units import format_bytes

    shown = console()
    if not found.runs:
        shown.print("No runs are left there.")
    else:
        title = "Runs left in the SSD directories given"
        numbers = ("sealed step", "on SSD")
        columns = ("run", "model", *numbers, "last used", "state", "output folder")
        rows = [
            (
                run.run_id,
                _short(run.model),
                "none" if run.step is None else f"{run.step:,}",
                format_bytes(run.disk_bytes),
                _age(run.changed_seconds),
                _state(run),
                run.out or "-",
            )
            for run in found.runs
        ]
        shown.print(table(title, *columns, numbers=numbers, rows=rows))
    for remark in _remarks(found):
        shown.print(f"note: {remark}", soft_wrap=True)
    if any(run.holder is None for run in found.runs):
        shown.print("Remove one with --remove RUN. Its states are then gone for good.")


def _short(model: str | None) -> str:
    """Of a model's folder its name; a hub's id as it is."""
    return "-" if model is None else model.rpartition("/")[2] if model.startswith("/") else model


def _remarks(found: "LeftRuns") -> list[str]:
    said = list(found.remarks)
    for run in found.runs:
        said += run.remarks
        said += [f"run {run.run_id}: {run.refusal}"] if run.refusal else []
        said += [f"{path} was not made by a run and would stay" for path in run.foreign_files]
    return said


def _state(run: "LeftRun") -> str:
    if run.holder is not None:
        return f"in use by {run.holder}"
    what = "left by a measurement" if run.is_measurement else "left"
    if run.missing:
        what += f"; also on {', '.join(run.missing)}, not given"
    return what


def _age(changed_seconds: float) -> str:
    import time

    from lohan.units import format_seconds

    passed = time.time() - changed_seconds
    return "now" if passed < 1 else f"{format_seconds(round(passed))} ago"


def _fields(run: "LeftRun") -> dict[str, object]:
    return {
        "run_id": run.run_id,
        "model": run.model,
        "out": run.out,
        "step": run.step,
        "disk_bytes": run.disk_bytes,
        "changed_seconds": run.changed_seconds,
        "holder": run.holder,
        "is_measurement": run.is_measurement,
        "directories": [part.path for part in run.parts],
        "missing_directories": list(run.missing),
        "foreign_files": list(run.foreign_files),
        "remarks": [*run.remarks, *([run.refusal] if run.refusal else [])],
    }


def _remove(
    found: "LeftRuns",
    names: list[str],
    *,
    is_sure: bool,
    is_incomplete_fine: bool,
    as_json: bool,
) -> None:
    from lohan.cli.tables.output import console, print_json
    from lohan.errors import ConfigError, LohanError
    from lohan.store import refuse_removal, remove_left_run
    from lohan.store.seals.commits import run_of
    from lohan.train.run.out_folder import clear_folder_of
    from lohan.units import format_bytes

    runs = [run for name in dict.fromkeys(names) for run in _named(found, name)]
    # Everything is checked before anything is deleted.
    for run in runs:
        refuse_removal(run, is_incomplete_fine=is_incomplete_fine)
    if as_json and not is_sure:
        raise ConfigError(
            "--remove with --json does not ask",
            why="a question would spoil the output, and nothing is removed unasked",
            remedy="add --yes",
        )
    removed: list[dict[str, object]] = []
    for run in runs:
        if not is_sure:
            _confirm(run)
        done = remove_left_run(run, is_incomplete_fine=is_incomplete_fine)
        not_cleared = ""
        try:
            if run.out is not None:
                clear_folder_of(run_of(run.run_id)[0], pathlib.Path(run.out))
        except (LohanError, OSError) as error:  # the states are removed, whatever is there
            not_cleared = f"note: {run.out} may hold space and half a model: {error}"
        left = [*done.left, *run.missing]
        removed.append(
            {"run_id": run.run_id, "removed_bytes": done.removed_bytes, "left_directories": left}
        )
        if as_json:
            continue
        shown = console()
        shown.print(f"removed run {run.run_id}: {format_bytes(done.removed_bytes)} freed")
        if not_cleared:
            shown.print(not_cleared, soft_wrap=True)
        for path in done.left:
            shown.print(f"note: {path} stays: other files are in it", soft_wrap=True)
        for path in run.missing:
            shown.print(f"note: left of this run: {path}", soft_wrap=True)
        if run.manifest is None and not run.missing:
            shown.print("note: it was never sealed: other SSD directories may hold parts of it")
    if as_json:
        print_json({"removed": removed})


def _named(found: "LeftRuns", name: str) -> list["LeftRun"]:
    """A run, or of one of several ranks what each of them has there."""
    from lohan.errors import ConfigError, nearest_names
    from lohan.store.seals.commits import run_of

    of_ranks = [run for run in found.runs if run.run_id != name == run_of(run.run_id)[0]]
    if of_ranks:
        return of_ranks
    chosen = [run for run in found.runs if run.run_id == name]
    if not chosen:
        known = sorted({run_of(run.run_id)[0] for run in found.runs})
        raise ConfigError(
            f"there is no run {name!r}",
            why="the given SSD directories hold "
            + (f"{len(known)} other run(s)" if known else "no run"),
            remedy=nearest_names(name, known) if known else "check the directories",
        )
    if len(chosen) > 1:
        places = "; ".join(", ".join(part.path for part in run.parts) for run in chosen)
        raise ConfigError(
            f"there are {len(chosen)} runs named {name!r}",
            why=f"they do not belong together: {places}",
            remedy="give the SSD directories of one of them only",
        )
    return chosen


def _confirm(run: "LeftRun") -> None:
    from lohan.cli.tables.output import console
    from lohan.units import format_bytes

    sealed = "never sealed" if run.step is None else f"sealed at step {run.step:,}"
    model = f"{run.model}, " if run.model else ""
    shown = console()
    shown.print(
        f"run {run.run_id}: {model}{sealed}, {format_bytes(run.disk_bytes)}, last used "
        f"{_age(run.changed_seconds)}",
        soft_wrap=True,
    )
    for part in run.parts:
        shown.print(f"  {part.path}", soft_wrap=True)
    try:
        is_sure = typer.confirm("Delete it? It cannot be brought back.", default=False)
    except typer.Abort:  # no terminal to ask on, or Ctrl-C
        shown.print()
        is_sure = False
    if not is_sure:
        shown.print(f"run {run.run_id} stays as it is")
        raise typer.Exit(EXIT_NOT_REMOVED)
