"""Seeing a run: one line per logged step, a bar with the time left, and OUT/log.jsonl.

Owns what is shown and in what words, and the log file, which is always written and filters
nothing. The numbers of a step come from the engine (`step_numbers`). transformers calls the two
callbacks; they run on the main thread.
"""

import json
import math
import pathlib
import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from transformers import TrainerCallback

from lohan.train.plan_words import plan_in_words
from lohan.train.writes import planned_seals, write_limit_of
from lohan.units import format_bytes_decimal, format_seconds
from lohan.vocabulary import Lane

LOG_NAME = "log.jsonl"


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
    prediction = trainer.engine.prediction
    if prediction is not None:
        numbers["predicted_step_seconds"] = prediction.step_seconds
    if result.loss_scale is not None:
        numbers["loss_scale"] = result.loss_scale
    numbers |= {f"busy_{lane}": share for lane, share in result.busy.items()}
    return numbers


class LogFile(TrainerCallback):
    """Appends every log to OUT/log.jsonl, with NaN and infinity as Python's JSON writes them."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """One line per log."""
        line = {"step": state.global_step, "time": time.time(), **(logs or {})}
        if self._trainer.last_step is not None and "loss" in line:
            line["bottleneck"] = self._trainer.last_step.bottleneck
        path = pathlib.Path(args.output_dir) / LOG_NAME
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line, default=float) + "\n")


class ConsoleProgress(TrainerCallback):
    """Prints the plan, a line per logged step, and in a terminal a bar with the time left."""

    def __init__(self, trainer: Any, console: Console) -> None:
        self._trainer, self._console = trainer, console
        self._bar: Progress | None = None
        self._task: Any = None
        self._is_plan_shown = False
        self._begin = (0, 0.0)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Say what is about to happen."""
        self._begin = (state.global_step, time.monotonic())
        verb = "continues after" if state.global_step else "begins at"
        self._console.print(
            f"training {verb} step {state.global_step} of {state.max_steps} "
            f"({_counted(args.gradient_accumulation_steps, 'micro-batch', 'micro-batches')} of "
            f"{_counted(args.per_device_train_batch_size, 'row', 'rows')} a step); "
            f"run {self._trainer.engine.run_id}"
        )
        self._show_plan(state)
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
        """Move the bar; the plan of the engine is known after the first step at the latest."""
        self._show_plan(state)
        if self._bar is not None:
            self._bar.update(self._task, completed=state.global_step, left=self._left(state))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """One line, whatever the numbers are."""
        logs = logs or {}
        if "loss" in logs:
            self._console.print(self._step_line(state, logs), soft_wrap=True)
        elif any(name.endswith("_loss") and name.startswith("eval") for name in logs):
            shown = [
                f"{name} {value:.4f}" for name, value in logs.items() if name.endswith("_loss")
            ]
            for name, value in logs.items():
                if name.endswith("_loss") and math.isfinite(value) and value < 700:
                    shown.append(f"perplexity {math.exp(value):.2f}")
                if name.endswith("mean_token_accuracy"):
                    shown.append(f"token accuracy {value:.1%}")
            self._console.print(f"evaluation at step {state.global_step}: " + ", ".join(shown))

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A seal is worth a line."""
        self._console.print(f"sealed at step {state.global_step}", style="dim")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take the bar away."""
        self.close()

    def close(self) -> None:
        """Take the bar away, also when training failed. Twice is fine."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _show_plan(self, state: Any) -> None:
        engine = self._trainer.engine
        if self._is_plan_shown or engine.plan is None:
            return
        self._is_plan_shown = True
        left = max(0, state.max_steps - state.global_step)
        for line in plan_in_words(
            engine.plan,
            engine.prediction,
            num_steps=left,
            num_seals=planned_seals(self._trainer, left),
            write_limit=write_limit_of(self._trainer),
        ):
            self._console.print(f"  {line}", soft_wrap=True)

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
        result = self._trainer.last_step
        parts = [f"step {state.global_step}", f"loss {logs['loss']:.4f}"]
        if "learning_rate" in logs:
            parts.append(f"lr {logs['learning_rate']:.3g}")
        if logs.get("grad_norm") is not None:
            parts.append(f"grad norm {logs['grad_norm']:.3g}")
        if "tokens_per_second" in logs:
            parts.append(f"{logs['tokens_per_second']:,.1f} tokens/s")
        if "step_seconds" in logs:
            took = format_seconds(logs["step_seconds"])
            if "predicted_step_seconds" in logs:
                took += f" (predicted {format_seconds(logs['predicted_step_seconds'])})"
            parts.append(took)
        busy = [f"{lane} {logs[f'busy_{lane}']:.0%}" for lane in Lane if f"busy_{lane}" in logs]
        if busy:
            parts.append("busy: " + " ".join(busy))
        if result is not None and result.written_bytes:
            parts.append(f"{format_bytes_decimal(result.written_bytes)} written")
        if result is not None and result.bottleneck:
            parts.append(f"bottleneck {result.bottleneck}")
        if result is not None and result.is_skipped:
            parts.append("SKIPPED (gradients not finite)")
        return " | ".join(parts)


def _counted(count: int, one: str, several: str) -> str:
    return f"{count} {one if count == 1 else several}"
