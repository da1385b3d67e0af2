"""`lohan train` from a checked configuration to a fine-tuned model in OUT.

Owns the order: what is cheap to check comes first, so that a mistake is named before anything long
begins; weights on the hub are fetched once rows are read and a plan fits. Each part is elsewhere
(`source`, `dataset`, `trainer`, `saving`). Called by the command line; prints through the console
it is given.
"""

import contextlib
import copy
import functools
import math
import os
import pathlib
import shlex
import warnings
from collections.abc import Iterator, Sequence, Sized
from typing import Any

from rich.console import Console

from lohan.closing import Closing
from lohan.engine.planning.plan_run import PlannedRun
from lohan.errors import ConfigError, LohanError, LohanWarning
from lohan.parallel.peers import loss_explained
from lohan.simulate.quick import quick_step
from lohan.ssd import check_directories
from lohan.ssd.engines.storage_errors import storage_error
from lohan.train.data.dataset import TrainingRows, load_rows, refuse_missing_template
from lohan.train.data.preview import explained_rows
from lohan.train.data.tokenizing import load_tokenizer
from lohan.train.data.whole_tables import whole_tables
from lohan.train.run.disk_reservation import Reservation, out_uses
from lohan.train.run.out_folder import TABLES_FOLDER, HeldFolder, held_folder
from lohan.train.run.run_files import AcceptedRun
from lohan.train.run.signals import stop_on_signals
from lohan.train.run.writes import planned_steps
from lohan.train.settings.arguments import (
    make_arguments,
    refuse_endless_stream,
    refuse_unsupported,
)
from lohan.train.settings.config import TrainConfig
from lohan.train.trainer.largest_batch import row_lengths
from lohan.units import format_bytes_decimal
from lohan.working_folder import PRIVATE_MODE, make_working_folder, private_files


def run_training(
    config: TrainConfig,
    *,
    resume: str | bool | None = None,
    console: Console,
    callbacks: Sequence[Any] = (),
    is_dry: bool = False,
) -> pathlib.Path | None:
    """Train and export; returns the folder of the model. `callbacks` are transformers'.

    A dry run does all that comes before the first byte of states, says what the run would cost and
    leaves nothing behind; its answer is None.

    Raises:
        LohanError: something is wrong with the configuration, files, data, machine or drives. What
            was sealed before stays and can be resumed.
        KeyboardInterrupt, SystemExit: stopped by a signal, after a seal.
    """
    import datasets

    if not console.is_terminal:
        datasets.disable_progress_bars()
    args = make_arguments(config)
    refuse_unsupported(args)
    refuse_endless_stream(config, args)
    if args.eval_strategy != "no" and not config.eval_data:
        raise ConfigError(
            f"eval_strategy is {args.eval_strategy.value} and there is nothing to evaluate on",
            why="rows that are evaluated on come from files of their own",
            remedy="give some with --eval_data FILE, or leave eval_strategy out",
        )
    out = pathlib.Path(config.out)
    if args.process_index > 0:
        console = Console(quiet=True)  # the first rank speaks, and has the folder
    with (
        contextlib.suppress(_Planned),
        loss_explained(args.process_index, args.world_size),
        stop_on_signals(is_at_once=True),  # until there are steps, which the trainer finishes
        held_folder(out, is_resuming=bool(resume))
        if args.process_index == 0
        else contextlib.nullcontext() as held,
    ):
        return _run(
            config, args, held, resume=resume, console=console, callbacks=callbacks, is_dry=is_dry
        )
    console.print("dry run: nothing was trained, and nothing is left behind")
    return None


class _Planned(Exception):
    """All that was to be done before the first byte of states is done."""


def _run(
    config: TrainConfig,
    args: Any,
    held: HeldFolder | None,
    *,
    resume: str | bool | None,
    console: Console,
    callbacks: Sequence[Any],
    is_dry: bool,
) -> pathlib.Path:
    out = pathlib.Path(config.out)
    for report in check_directories(config.offload.ssd):
        for warning in report.warnings:
            console.print(f"note: {warning}", soft_wrap=True)
    with _shown_warnings(console), contextlib.ExitStack() as private:
        source = _open(config, args, should_fetch=False)
        if config.adapter is None and held is not None:  # the trainer counts those of adapters
            _refuse_full(out, source, config, args)
        tokenizer = load_tokenizer(source, args)
        private.enter_context(private_files())  # the rows are copied there, also by TRL
        read = functools.partial(
            load_rows,
            text_column=config.arguments.get("dataset_text_field"),
            forms=config.task.rows,
        )
        with args.main_process_first(desc="the rows"):  # of each machine; others find its tables
            tables = make_working_folder(out) / TABLES_FOLDER
            tables.mkdir(exist_ok=True)
            tables.chmod(PRIVATE_MODE)  # those of older releases were open to others
            if args.local_process_index == 0:
                private.enter_context(whole_tables(tables))
            rows = read(config.data, cache=tables / "train", is_streamed=config.is_streamed)
            refuse_missing_template(rows, tokenizer, config.model, args)
            held_out = read(config.eval_data, cache=tables / "eval") if config.eval_data else None
        console.print(
            ("a stream of" if config.is_streamed else f"{len(rows.table):,}")
            + f" rows of the form {rows.format_name}"
            + (f", {len(held_out.table):,} to evaluate on" if held_out is not None else "")
        )
        if held_out is not None and args.eval_strategy == "no":
            console.print(
                "note: eval_strategy is no, so nothing is evaluated; write epoch or steps"
            )
        if not source.has_weights and not is_dry:
            own = copy.deepcopy(args)
            trial = _make_trainer(config, own, source, tokenizer, rows, held_out, console)
            _refuse_unplannable(trial, resume=resume)
            console.print(f"the plan fits; fetching the weights of {config.model}", style="dim")
            with args.main_process_first(desc="the weights"):
                source = _open(config, args, revision=source.directory.name)
        trainer = _make_trainer(config, args, source, tokenizer, rows, held_out, console)
    trainer.model_name, trainer.data_names = config.model, config.data
    _report_rows(trainer, rows, console)
    if held is not None:
        trainer.add_callback(AcceptedRun(held, config))
    progress = _show_progress(trainer, console)
    for callback in callbacks:
        trainer.add_callback(callback)
    if is_dry:
        trainer.on_planned = lambda planned: _end_dry_run(trainer, planned, progress)
    with Closing() as closing:
        closing.callback(trainer.close)
        closing.callback(progress.close)
        try:
            trainer.train(resume_from_checkpoint=resume)
            if args.push_to_hub:
                _push(trainer, out)
            else:
                trainer.save_model(str(out))
            console.print(
                f"done after {trainer.state.global_step} steps; "
                f"{format_bytes_decimal(trainer.written_bytes)} written to SSD; model in {out}",
                soft_wrap=True,
            )
        except BaseException as error:
            console.print(_what_stays(trainer, out, error), soft_wrap=True, end="")
            if not isinstance(error, OSError):
                raise
            what, path = "a file of the run cannot be written", str(error.filename or out)
            raise storage_error(what, error, path=path) from error
    return out


def _what_stays(trainer: Any, out: pathlib.Path, error: BaseException) -> str:
    """A line on what can be gone on from; none where there is nothing to say."""
    if isinstance(error, _Planned):
        return ""
    num_here = os.environ.get("LOCAL_WORLD_SIZE", "1")
    again = f"lohan train {shlex.quote(str(out))} --resume"
    again += f" --gpus {num_here}" if num_here != "1" else ""
    if isinstance(error, KeyboardInterrupt | SystemExit) and trainer.stop_request.is_set:
        if trainer.sealed_step is None:
            return "stopped before training began: nothing of it is left behind\n"
        return f"stopped and sealed at step {trainer.state.global_step}; continue with {again}\n"
    if trainer.sealed_step is None:
        return ""
    return (
        f"the states of run {trainer.engine.run_id} are sealed at step {trainer.sealed_step} and "
        f"stay; continue with {again}, or remove them with lohan clean\n"
    )


def _end_dry_run(trainer: Any, planned: PlannedRun, progress: Any) -> None:
    """Say what the run would be, and end it."""
    prediction = quick_step(planned.plan, planned.machine)
    num_steps = planned_steps(trainer) or 0
    progress.show_plan(planned.plan, prediction, planned.machine, num_steps=num_steps)
    raise _Planned


def _refuse_unplannable(trainer: Any, *, resume: str | bool | None) -> None:
    """Start a run up to its plan, with a model whose weights are not here.

    Raises:
        LohanError: the run cannot be started, whatever its weights are.
    """

    def end(_: PlannedRun) -> None:
        raise _Planned

    trainer.on_planned = end
    try:
        if trainer.largest_step() is not None:
            with contextlib.suppress(_Planned):
                trainer.train(resume_from_checkpoint=resume)
    finally:
        trainer.close()


def _open(
    config: TrainConfig, args: Any, *, revision: str | None = None, should_fetch: bool = True
) -> Any:
    """The model; `revision` is the commit whose other files are here already."""
    import torch

    from lohan.train.weights.source import open_source

    settings = args.model_init_kwargs or {}
    return open_source(
        config.model,
        revision=revision or settings.get("revision"),
        trust_remote_code=args.trust_remote_code,
        dtype=torch.float16 if args.fp16 else torch.bfloat16,
        should_fetch=should_fetch,
        head=config.task.head,
        seed=args.seed,
    )


def _refuse_full(out: pathlib.Path, source: Any, config: TrainConfig, args: Any) -> None:
    """Refuse an output folder without room for the model before its weights are taken in."""
    uses = out_uses(
        str(out),
        sum(math.prod(shape) for shape in source.parameters.values()),
        num_steps=max(0, args.max_steps),
        archive_steps=config.offload.archive_steps,
        save_model_steps=config.offload.save_model_steps,
        save_total_limit=args.save_total_limit,
        num_models=2 if args.load_best_model_at_end else 1,
    )
    space = Reservation(out)
    space.hold(sum(use.nbytes for use in uses), purpose="the model and its archives")
    space.release()


def _make_trainer(
    config: TrainConfig,
    args: Any,
    source: Any,
    tokenizer: Any,
    rows: TrainingRows,
    held_out: TrainingRows | None,
    console: Console,
) -> Any:
    from lohan.train.data.answer_marks import answer_template

    template = answer_template(rows, tokenizer, args)
    with contextlib.ExitStack() as stack:
        for table in (rows, held_out):
            if table is not None:
                stack.enter_context(explained_rows(table, tokenizer, args, template))
        try:
            trainer = config.task.trainer_class()(
                source,
                args=args,
                train_dataset=rows.table,
                eval_dataset=None if held_out is None else held_out.table,
                processing_class=tokenizer,
                offload=config.offload,
                peft_config=None if config.adapter is None else config.adapter.peft_config(),
                sample_prompts=config.sample_prompts,
            )
        except (ValueError, TypeError, RuntimeError) as error:
            raise ConfigError(
                "TRL refuses this run",
                why=" ".join(str(error).split()).rstrip("."),
                remedy="correct the named argument or the rows; `lohan data preview` shows them",
            ) from error
        except Exception as error:  # the hub's client has many
            if isinstance(error, LohanError) or not args.push_to_hub:
                raise
            raise ConfigError(
                f"the repository {args.hub_model_id or config.out} cannot be made on the hub",
                why=_one_line(error),
                remedy="check the connection, hub_model_id and your login (`hf auth login`), or "
                "leave push_to_hub out",
            ) from error
    if not config.is_streamed and len(trainer.train_dataset) == 0:
        raise ConfigError(
            "no row is left to train on",
            why=f"truncation to max_length={args.max_length} leaves no token with a loss",
            remedy="raise max_length; `lohan data preview` shows the lengths",
        )
    trainer.is_out_held = True
    trainer.tell = lambda sentence: console.print(sentence, style="dim", soft_wrap=True)
    return trainer


def _push(trainer: Any, out: pathlib.Path) -> None:
    """Write the model and send it to the hub; it stays in OUT if the hub cannot be reached."""
    trainer.save_model(str(out), _internal_call=True)
    try:
        trainer.send_model()
    except LohanError:
        raise
    except Exception as error:  # the hub's client has many
        raise ConfigError(
            f"the model is in {out}, but the hub did not take it",
            why=_one_line(error),
            remedy=f"send it later with lohan train {out} --resume: nothing is trained again, and "
            "of the folder only the model is sent",
        ) from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def _report_rows(trainer: Any, rows: TrainingRows, console: Console) -> None:
    """Say how many rows truncation cut or dropped: silence would be a surprise later."""
    most, is_packed = trainer.args.max_length, getattr(trainer.args, "packing", False)
    if is_packed or most is None or not isinstance(trainer.train_dataset, Sized):
        return
    num_left, num_given = len(trainer.train_dataset), len(rows.table)
    lengths = row_lengths(trainer.train_dataset, trainer.token_columns)
    num_full = 0 if lengths is None else int((lengths >= most).sum())
    if num_full:
        console.print(
            f"note: {num_full:,} of {num_left:,} rows fill max_length={most}; what is longer is "
            "cut off (`lohan data preview` counts them)",
            soft_wrap=True,
        )
    if num_left < num_given:
        console.print(
            f"note: {num_given - num_left} rows have no token with a loss within "
            f"max_length={trainer.args.max_length} and are left out",
            soft_wrap=True,
        )


def _show_progress(trainer: Any, console: Console) -> Any:
    from transformers import PrinterCallback, ProgressCallback

    from lohan.train.run.progress import ConsoleProgress

    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)
    progress = ConsoleProgress(trainer, console)
    trainer.add_callback(progress)
    return progress


@contextlib.contextmanager
def _shown_warnings(console: Console) -> Iterator[None]:
    """Our own warnings as notes, once each; those of libraries about themselves are not ours."""
    from lohan.train.weights.source import WeightsWarning

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for text in dict.fromkeys(
        str(one.message)
        for one in caught
        if issubclass(one.category, LohanWarning | WeightsWarning)
    ):
        console.print(f"note: {text}", soft_wrap=True)
