"""`lohan verify`: does offloading change the result? A small copy of a model, trained both ways.

Owns the options, the table and the verdict. Training and comparing are `lohan.verify`'s. Exit code
0: equal. 1: different, the first tensor and step named. 2: it cannot be done, and why.
"""

import pathlib
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from lohan.cli.reading.options import DeviceOption, JsonOption, TrustOption

if TYPE_CHECKING:
    from lohan.verify import CaseResult, SmallCopy, Verification

EXIT_DIFFERENT = 1
_DEFAULT_STEPS = 5


def verify(
    model: Annotated[
        str,
        typer.Argument(
            help="A known name (lohan models), a config.json, a model's folder, or its hub id. Of "
            "a model only the configuration is used; values are random.",
        ),
    ],
    ssd: Annotated[
        list[pathlib.Path] | None,
        typer.Option(
            "--ssd",
            help="An SSD directory for the states; may be given several times. Nothing is left "
            "there. [default: a temporary directory]",
        ),
    ] = None,
    device: DeviceOption = None,
    steps: Annotated[
        int, typer.Option("--steps", min=1, max=1000, help="Optimizer steps per case.")
    ] = _DEFAULT_STEPS,
    ram: Annotated[
        str | None,
        typer.Option(
            "--ram", help="RAM of the engine: 64MiB. [default: the least that will do, from 4MiB]"
        ),
    ] = None,
    micro_batches: Annotated[
        list[int] | None,
        typer.Option(
            "--micro-batches",
            min=1,
            max=64,
            help="Micro-batches per step; may be given several times. [default: 1 and 2]",
        ),
    ] = None,
    hidden_states: Annotated[
        bool,
        typer.Option("--hidden-states", help="A loss on hidden states and router logits, too."),
    ] = False,
    ranks: Annotated[
        int,
        typer.Option(
            "--ranks",
            min=1,
            max=16,
            help="Processes that train together, on the CPU unless --device says else; compared "
            "with a plain loop of as many reduction groups.",
        ),
    ] = 1,
    trust_remote_code: TrustOption = False,
    json: JsonOption = False,
) -> None:
    """Train a small copy of a model offloaded and in memory, and compare every bit.

    Losses, masters and both moments are compared in twenty cases: activations as planned, kept,
    swapped to RAM, swapped to SSD and recomputed; one and two micro-batches; with and without
    gradient clipping. The copy has the architecture of the model, with fewer layers and smaller
    sizes. Exit code 0: equal. 1: different. 2: it cannot be done.
    """
    from lohan.cli.reading.extra_args import require_train_packages
    from lohan.cli.reading.request import parse_size
    from lohan.cli.tables.lasting_output import leaving_on_sigterm
    from lohan.cli.tables.output import print_json

    ram_bytes = None if ram is None else parse_size(ram, "--ram")
    require_train_packages()
    from lohan.verify import all_cases, make_small_copy, verify_copy

    copy = make_small_copy(model, trust_remote_code=trust_remote_code)
    if not json:
        _print_copy(copy)
    with leaving_on_sigterm():  # states on the SSDs are removed first
        found = verify_copy(
            copy,
            ssd=ssd or (),
            device=device,
            ram_bytes=ram_bytes,
            num_steps=steps,
            cases=all_cases(counts=micro_batches or (ranks, 2 * ranks), reads_states=hidden_states),
            report=lambda line: print(line, file=sys.stderr, flush=True),
            num_ranks=ranks,
            trust_remote_code=trust_remote_code,
        )
    if json:
        print_json(_fields(found))
    else:
        _print_cases(found)
    if not found.is_equal:
        raise typer.Exit(EXIT_DIFFERENT)


def _print_copy(copy: "SmallCopy") -> None:
    from lohan.cli.tables.output import console

    out = console()
    out.print(f"{copy.name}: a small {copy.architecture}, {copy.num_parameters:,} parameters")
    out.print(f"  {'; '.join(copy.changes) or 'nothing was made smaller'}")
    out.print()


def _print_cases(found: "Verification") -> None:
    from lohan.cli.tables.output import console, table
    from lohan.units import format_bytes

    shown = table(
        f"Offloaded and in memory, {found.num_steps} steps each",
        *("activations", "micro-batches", "clipping", "read from SSD", "written", "result"),
        numbers=("micro-batches", "read from SSD", "written"),
        rows=[
            (
                one.case.activations,
                str(one.case.num_micro_batches),
                "off" if one.case.max_grad_norm is None else "on",
                format_bytes(one.read_bytes),
                format_bytes(one.written_bytes),
                "equal" if one.difference is None else "DIFFERENT",
            )
            for one in found.cases
        ],
    )
    out = console()
    out.print(shown)
    out.print()
    for line in _verdict(found):
        out.print(line, soft_wrap=True)


def _verdict(found: "Verification") -> list[str]:
    from lohan.units import format_bytes

    where = (
        f"on {found.device}, {format_bytes(found.ram_bytes)} of RAM, states of "
        f"{format_bytes(found.state_bytes)} on SSD"
    )
    different = [one for one in found.cases if one.difference is not None]
    if not different:
        if found.tolerance is None:
            return [
                f"EQUAL: losses, masters, m and v have the same bits in all {len(found.cases)} "
                f"cases ({where})"
            ]
        return [
            f"EQUAL within {found.tolerance:.0%} in all {len(found.cases)} cases ({where})",
            "  not every bit is compared on this device: its libraries choose kernels by where "
            "operands lie, and sum in another order",
        ]
    lines = [f"DIFFERENT in {len(different)} of {len(found.cases)} cases ({where})"]
    for one in different:
        assert one.difference is not None
        lines.append(f"  {one.case.words}: {one.difference.words}")
    lines.append("Please report this with the output of `lohan doctor --report`.")
    return lines


def _fields(found: "Verification") -> dict[str, object]:
    return {
        "model": found.copy.name,
        "architecture": found.copy.architecture,
        "num_parameters": found.copy.num_parameters,
        "changes": list(found.copy.changes),
        "device": found.device,
        "device_reason": found.reason,
        "ram_bytes": found.ram_bytes,
        "state_bytes": found.state_bytes,
        "num_steps": found.num_steps,
        "tolerance": found.tolerance,
        "is_equal": found.is_equal,
        "cases": [_case_fields(one) for one in found.cases],
    }


def _case_fields(one: "CaseResult") -> dict[str, object]:
    difference = one.difference
    return {
        **asdict(one.case),
        "is_equal": difference is None,
        "seconds": one.seconds,
        "read_bytes": one.read_bytes,
        "written_bytes": one.written_bytes,
        "difference": None if difference is None else asdict(difference),
    }
