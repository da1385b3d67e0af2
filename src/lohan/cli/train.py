"""`lohan train`: fine-tune a model, from a file of rows to a folder `from_pretrained` loads.

Owns the command's options. Training itself is `train.fine_tune`, imported when it runs.
"""

import pathlib
import sys
from typing import Annotated

import typer

from lohan.cli.reading.extra_args import read_extra_args, require_train_packages


def train(
    ctx: typer.Context,
    model: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Folder of a Hugging Face model, or its id on the hub."),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE", help="File of rows (.jsonl, .json, .csv, .parquet, .txt)."),
    ] = None,
    eval_data: Annotated[
        list[str] | None,
        typer.Option("--eval-data", "--eval_data", metavar="FILE", help="Rows to evaluate on."),
    ] = None,
    sample_prompts: Annotated[
        list[str] | None,
        typer.Option(
            "--sample-prompts",
            "--sample_prompts",
            metavar="TEXT",
            help="Answered before and after training; once per prompt, or a file of prompts.",
        ),
    ] = None,
    ssd: Annotated[
        list[str] | None,
        typer.Option(metavar="DIR", help="SSD directory for the states; once per drive."),
    ] = None,
    out: Annotated[
        str | None, typer.Option(metavar="OUT", help="Folder for checkpoints, logs and the model.")
    ] = None,
    ram: Annotated[
        str | None, typer.Option(metavar="SIZE", help="RAM budget, such as 48GiB.")
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Budget of GPU memory, such as 20GiB.")
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="cuda, cuda:0, cpu or emulated. [default: a GPU if any]"),
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Processes of this machine that train together, a GPU each."
        ),
    ] = None,
    machines: Annotated[
        int, typer.Option(metavar="N", min=1, help="Machines, each with as many; see --rendezvous.")
    ] = 1,
    rendezvous: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Of one of the machines, where all of them meet."),
    ] = None,
    machine: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="A preset or machine file to plan with; nothing is measured. "
            "[default: this machine, measured as far as the plan needs it]",
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Continue the run in OUT from its newest seal, with its own settings.",
        ),
    ] = False,
    resume_from: Annotated[
        str | None,
        typer.Option(
            "--resume-from",
            metavar="DIR",
            help="Continue from this checkpoint folder (an archive).",
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Check rows, template, room and memory, say what the run would cost, and exit.",
        ),
    ] = False,
    print_config: Annotated[
        bool,
        typer.Option("--print-config", help="Print every setting and its origin, and exit."),
    ] = False,
) -> None:
    """Fine-tune a model: settings from CONFIG.yaml, and any training argument as --key value.

    Names are those of TRL's SFTConfig and transformers' TrainingArguments (--learning_rate 1e-5,
    --max_length 2048), see docs/configuration.md. Exit code 0: done. 2: an error, nothing sealed
    is lost. 130 or 143: stopped by Ctrl-C or SIGTERM after a seal; go on with --resume.
    """
    from lohan.cli.tables.lasting_output import lasting_output
    from lohan.cli.tables.output import console

    path, overrides = read_extra_args(ctx.args)
    if resume:
        path, out = _of_the_run(path, out)
    given = {"model": model, "data": data, "eval_data": eval_data, "out": out}
    given |= {"offload.ssd": ssd, "offload.ram": ram, "offload.gpu": gpu, "offload.device": device}
    given |= {"offload.machine": machine, "sample_prompts": sample_prompts}
    overrides += [(key, value) for key, value in given.items() if value not in (None, [])]
    require_train_packages()
    from lohan.train.settings.config import check_places, checked_config, read_settings

    written = read_settings(path, overrides)
    if not print_config:
        check_places(written)
    config = checked_config(written)
    if print_config:
        sys.stdout.write(config.to_text())
        return
    from lohan.parallel.launch import is_rank, launch_ranks

    if not is_rank() and (gpus or 1) * machines > 1:
        raise typer.Exit(launch_ranks(gpus or 1, num_machines=machines, rendezvous=rendezvous))
    from lohan.train.fine_tune import run_training

    with lasting_output():
        run_training(config, resume=resume_from or resume, console=console(), is_dry=dry_run)


def _of_the_run(path: str | None, out: str | None) -> tuple[str | None, str | None]:
    """Settings and folder of a run that goes on: its own settings where no other file is given."""
    from lohan.working_folder import settings_of_run

    if path is not None and pathlib.Path(path).expanduser().is_dir():
        path, out = None, out or path
    if path is None and out is not None:
        kept = settings_of_run(pathlib.Path(out).expanduser())
        path = None if kept is None else str(kept)
    return path, out
