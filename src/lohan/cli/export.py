"""`lohan export`: the model of a run's last seal, in Hugging Face's layout.

Owns the options and what is printed. The work is `lohan.train.run.sealed_runs`'.
"""

import pathlib
import sys
from enum import StrEnum
from typing import Annotated

import typer

from lohan.cli.reading.options import JsonOption, RunArgument, RunSsdOption, TrustOption


class _Dtype(StrEnum):
    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"


_TORCH_NAMES = {_Dtype.BF16: "bfloat16", _Dtype.FP16: "float16", _Dtype.FP32: "float32"}


def export(
    run: RunArgument,
    out: Annotated[
        pathlib.Path, typer.Option("--out", "-o", help="A directory that is not there yet.")
    ],
    ssd: RunSsdOption = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model", help="What the run started from. [default: what the run says itself]"
        ),
    ] = None,
    dtype: Annotated[
        _Dtype | None, typer.Option("--dtype", help="[default: what the run computes in]")
    ] = None,
    shard: Annotated[
        str, typer.Option("--shard", help="The largest size of a weights file, with its unit.")
    ] = "5GB",
    trust_remote_code: TrustOption = False,
    merged: Annotated[
        bool, typer.Option("--merged", help="Write the base with the run's adapter merged in.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Write the model of a run's last seal, for from_pretrained; streams, needs little RAM.

    Of a run with an adapter (LoRA) it is the adapter alone, for PeftModel.from_pretrained.
    """
    from lohan.cli.reading.request import parse_size
    from lohan.cli.tables.output import console, print_json
    from lohan.units import format_bytes

    max_shard_bytes = parse_size(shard, "--shard")
    import torch

    from lohan.train.run.sealed_runs import export_run, find_run

    report = export_run(
        find_run(run, ssd or []),
        out,
        model=model,
        dtype=getattr(torch, _TORCH_NAMES[dtype]) if dtype is not None else None,
        max_shard_bytes=max_shard_bytes,
        trust_remote_code=trust_remote_code,
        should_merge_adapter=merged,
        progress=ProgressLine() if sys.stderr.isatty() and not json else None,
    )
    if json:
        print_json(
            {
                "out": str(report.path),
                "architecture": report.architecture,
                "files": report.num_files,
                "tensors": report.num_tensors,
                "parameters": report.num_parameters,
                "total_bytes": report.total_bytes,
                "remarks": list(report.remarks),
            }
        )
        return
    console().print(
        f"{report.path}: {report.architecture}, {report.num_tensors} tensors in "
        f"{report.num_files} files, {format_bytes(report.total_bytes)}",
        soft_wrap=True,
    )
    for remark in report.remarks:
        console().print(f"remark: {remark}", soft_wrap=True)


class ProgressLine:
    """A line on the terminal that says how far it is; rewritten at each whole percent."""

    def __init__(self) -> None:
        self._shown = -1

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        """Say how far it is, if that has changed."""
        percent = 100 * done_bytes // max(1, total_bytes)
        if percent != self._shown:
            self._shown = percent
            print(f"\rwriting: {percent:3d}%", end="", file=sys.stderr, flush=True)
            if percent == 100:
                print(file=sys.stderr)
