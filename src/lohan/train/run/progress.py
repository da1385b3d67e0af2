"""Seeing a run: one line per logged step, a bar with the time left, and log.jsonl.

Owns what is shown and in what words, and the log file, which is always written and filters
nothing. The numbers of a step come from the engine (`step_numbers`). transformers calls the two
callbacks; they run on the main thread.
"""

import json
import logging
import math
import os
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from tqdm.auto import tqdm  # type: ignore[import-untyped]
from transformers import TrainerCallback

from lohan.hardware.machine import Machine
from lohan.simulate.bottleneck import plain_limit
from lohan.train.run.plan_summary import cautions, plan_in_words
from lohan.train.run.writes import planned_seals, write_limit_of
from lohan.units import format_seconds
from lohan.working_folder import make_working_folder, private_files

LOG_NAME = "log.jsonl"
_SETTLED_STEP = 5
"""Of the process: from here on predictions rest on several steps."""
_MOST_COLUMNS = 100
_KEPT_SHARE = 0.9
"""Of the mean loss that is shown, what a further step leaves of the steps before it."""


def step_numbers(trainer: Any) -> dict[str, float]:
    """What the engine measured in the last step, by the names used in logs."""
    result = trainer.last_step
    if result is None:
        return {}
    numbers = {
        "step_seconds": result.seconds,
        "tokens_per_second": result.tokens / result.seconds if result.seconds > 0 else 0.0,
        "read_bytes": float(result.read_bytes),
        "written_bytes": float(result.written_bytes),
    }
    if result.predicted_seconds is not None:
        numbers["predicted_step_seconds"] = result.predicted_seconds
        numbers["prediction_error"] = result.seconds / result.predicted_seconds - 1
    if result.loss_scale is not None:
        numbers["loss_scale"] = result.loss_scale
    numbers |= {f"busy_{lane}": share for lane, share in result.busy.items()}
    return numbers


class LogFile(TrainerCallback):
    """Appends every log to log.jsonl, with NaN and infinity as Python's JSON writes them."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """One line per log."""
        line = {"step": state.global_step, **(logs or {})}
        if self._trainer.last_step is not None and "loss" in line:
            line["bottleneck"] = self._trainer.last_step.bottleneck
        append_log(args, line)


def append_log(args: Any, line: dict[str, Any]) -> None:
    """Add a line to log.jsonl, with the time."""
    path = make_working_folder(pathlib.Path(args.output_dir)) / LOG_NAME
    text = json.dumps({"time": time.time(), **line}, default=float) + "\n"
    with private_files(), open(path, "a+b") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
        if file.read() not in (b"", b"\n"):
            # Behind the last whole line a power cut leaves zeros, a full drive half a line.
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)
        file.write(text.encode())


class RunInWords(TrainerCallback):
    """Says the plan before the first step, and at the end what predictions were worth."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._is_plan_shown = False
        self._begin = (0, 0.0)
        self._errors: list[float] = []

    def _say(self, sentence: str) -> None:
        if self._trainer.tell is not None:
            self._trainer.tell(sentence)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Say what is about to happen."""
        self._begin = (state.global_step, time.monotonic())
        verb = "continues after" if state.global_step else "begins at"
        self._say(
            f"training {verb} step {state.global_step} of {state.max_steps} "
            f"({_counted(args.gradient_accumulation_steps, 'micro-batch', 'micro-batches')} of "
            f"{_counted(args.per_device_train_batch_size, 'row', 'rows')} a step); "
            f"run {self._trainer.engine.run_id}"
        )
        self._show_plan(state)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The plan of the engine is known after the first step at the latest."""
        self._show_plan(state)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Note how far off a prediction was."""
        is_settled = state.global_step - self._begin[0] >= _SETTLED_STEP
        if is_settled and "prediction_error" in (logs or {}):
            self._errors.append(abs(logs["prediction_error"]))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Say what predictions were worth."""
        if self._errors:
            self._say(
                f"from step {self._begin[0] + _SETTLED_STEP} on the median step was "
                f"{statistics.median(self._errors):.0%} off its prediction"
            )

    def _show_plan(self, state: Any) -> None:
        engine = self._trainer.engine
        if self._is_plan_shown or engine.plan is None:
            return
        self._is_plan_shown = True
        self.show_plan(
            engine.plan,
            engine.prediction,
            engine.machine,
            num_steps=max(0, state.max_steps - state.global_step),
            rates_note=engine.rates_note,
        )

    def show_plan(
        self, plan: Any, prediction: Any, machine: Machine, *, num_steps: int, rates_note: str = ""
    ) -> None:
        """Say what a run will be and cost, and what is worth knowing about it."""
        written = self._trainer.written_bytes
        for line in plan_in_words(
            plan,
            prediction,
            num_steps=num_steps,
            num_seals=planned_seals(self._trainer, num_steps),
            write_limit=write_limit_of(self._trainer),
            written_bytes=written,
            rates_note=rates_note,
            machine=machine,
            rooms=self._trainer.rooms,
        ):
            self._say(f"  {line}")
        for caution in cautions(
            plan,
            prediction,
            machine,
            num_steps=num_steps,
            written_bytes=written,
            rooms=self._trainer.rooms,
        ):
            self._warn(f"  worth knowing: {caution}")

    def _warn(self, sentence: str) -> None:
        self._say(sentence)


class ConsoleProgress(RunInWords):
    """Prints a line per logged step, too, and in a terminal a bar with the time left."""

    def __init__(self, trainer: Any, console: Console) -> None:
        super().__init__(trainer)
        self._console = console
        self._bar: Progress | None = None
        self._task: Any = None
        self._has_sealed = False
        self._smoothed = _Smoothed()

    def _say(self, sentence: str) -> None:
        self._console.print(sentence, soft_wrap=True)

    def _warn(self, sentence: str) -> None:
        self._console.print(sentence, style="bold yellow", soft_wrap=True)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Say what is about to happen, and show the bar."""
        super().on_train_begin(args, state, control, **kwargs)
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(),
                TextColumn("{task.fields[left]}"),
                console=self._console,
            )
            self._task = self._bar.add_task(
                "", total=state.max_steps, completed=state.global_step, left=self._left(state)
            )
            self._bar.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Move the bar."""
        super().on_step_end(args, state, control, **kwargs)
        if self._bar is not None:
            self._bar.update(self._task, completed=state.global_step, left=self._left(state))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """One line, whatever the numbers are."""
        super().on_log(args, state, control, logs, **kwargs)
        logs = logs or {}
        if "loss" in logs:
            self._console.print(self._step_line(state, logs), soft_wrap=True)
        elif any(name.endswith("_loss") and name.startswith("eval") for name in logs):
            shown = [
                f"{name} {value:.4f}" for name, value in logs.items() if name.endswith("_loss")
            ]
            has_perplexity = self._trainer.is_loss_of_tokens
            for name, value in logs.items():
                is_loss = has_perplexity and name.endswith("_loss")
                if is_loss and math.isfinite(value) and value < 700:
                    shown.append(f"perplexity {math.exp(value):.2f}")
                if name.endswith("mean_token_accuracy"):
                    shown.append(f"token accuracy {value:.1%}")
            self._console.print(f"evaluation at step {state.global_step}: " + ", ".join(shown))

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A seal is worth a line; the first one says what it is."""
        meaning = "" if self._has_sealed else ": a resume goes on from here, whatever happens next"
        self._has_sealed = True
        self._console.print(f"sealed at step {state.global_step}{meaning}", style="dim")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take the bar away, and say what predictions were worth."""
        self.close()
        super().on_train_end(args, state, control, **kwargs)

    def close(self) -> None:
        """Take the bar away, also when training failed. Twice is fine."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _left(self, state: Any) -> str:
        """Time left: as measured, and before the first step as predicted."""
        num_left = state.max_steps - state.global_step
        num_done = state.global_step - self._begin[0]
        if num_done > 0:
            seconds = (time.monotonic() - self._begin[1]) / num_done
            return f"{format_seconds(num_left * seconds)} left"
        prediction = self._trainer.engine.prediction
        if prediction is None:
            return "the first step is planned and measured"
        return f"{format_seconds(num_left * prediction.step_seconds)} left (predicted)"

    def _step_line(self, state: Any, logs: dict[str, Any]) -> str:
        """What fits 100 columns; everything else is in the log file."""
        result = self._trainer.last_step
        parts = [f"step {state.global_step}/{state.max_steps}"]
        if state.epoch is not None:
            parts.append(f"epoch {state.epoch:.2f}")
        mean = self._smoothed.add(logs["loss"])
        parts.append(f"loss {logs['loss']:.4g} (~{mean:.4g})")
        if "tokens_per_second" in logs:
            rate = logs["tokens_per_second"]
            parts.append(f"{rate:,.0f} tok/s" if rate >= 100 else f"{rate:.3g} tok/s")
        parts.append(self._left(state))
        if result is not None and result.bottleneck:
            parts.append(f"limit: {plain_limit(result.bottleneck)}")
        if result is not None and result.is_skipped:
            parts.append("SKIPPED (gradients not finite)")
        line = "  ".join(parts)
        if len(line) > _MOST_COLUMNS and state.epoch is not None:
            line = "  ".join([parts[0], *parts[2:]])  # the epoch can be told from the step
        return line


def teller(args: Any) -> Callable[[str], None] | None:
    """Prints sentences above transformers' bar; None where only errors are asked for, and on ranks
    but the first."""
    if args.process_index > 0 or args.get_process_log_level() > logging.WARNING:
        return None
    return lambda sentence: tqdm.write(sentence)


class _Smoothed:
    """A mean in which the newest values weigh most; what is not finite is left out."""

    def __init__(self) -> None:
        self._sum = self._weight = 0.0

    def add(self, value: float) -> float:
        """The mean with this value in it."""
        if math.isfinite(value):
            self._sum = _KEPT_SHARE * self._sum + (1 - _KEPT_SHARE) * value
            self._weight = _KEPT_SHARE * self._weight + (1 - _KEPT_SHARE)
        return self._sum / self._weight if self._weight else math.nan


def _counted(count: int, one: str, several: str) -> str:
    return f"{count} {one if count == 1 else several}"
