"""Training and speed: what was logged over steps, as charts, and sample prompts as they were
answered before and after.

Owns which columns of the log are shown, how, and in which order.
"""

import math
from typing import Any

from lohan.report.html.axis import scientific
from lohan.report.html.line_chart import Chart, Series, line_chart
from lohan.report.html.markup import Table
from lohan.report.html.thinning import Column, running_mean
from lohan.report.run_files import RunFiles, RunLog
from lohan.report.sections import facts
from lohan.units import format_rate, format_seconds
from lohan.vocabulary import Lane

_FEWEST_FOR_A_MEAN = 60
_MOST_LATER = 3
"""A run that was made longer several times has been asked after each."""
_MOST_PROMPTS = 50


def training(run: RunFiles) -> dict[str, object]:
    """Loss, evaluation loss, learning rate, gradient norm."""
    log = facts.log_of(run)
    evaluation = Series(name="evaluation loss", values=log.column("eval_loss"), colour=2)
    rate = Series(name="rate", values=log.column("learning_rate"), colour=3)
    norm = Series(name="norm", values=log.column("grad_norm"), colour=5)
    return {
        "loss": _chart(
            log,
            "loss",
            "Loss",
            *_loss_series(log.column("loss")),
            evaluation,
            format_value=_four_digits,
            starts_at_zero=False,
        ),
        "small": [
            _chart(
                log, "learning-rate", "Learning rate", rate, format_value=scientific, is_small=True
            ),
            _chart(
                log,
                "grad-norm",
                "Gradient norm, before clipping",
                norm,
                format_value=_four_digits,
                is_small=True,
            ),
        ],
    }


def _chart(log: RunLog, anchor: str, title: str, *series: Series, **more: Any) -> str:
    return line_chart(Chart(anchor=anchor, title=title, steps=log.steps, series=series, **more))


def _four_digits(value: float) -> str:
    return f"{value:.4g}"


def _loss_series(loss: Column) -> tuple[Series, ...]:
    num_values = sum(value is not None and math.isfinite(value) for value in loss)
    if num_values < _FEWEST_FOR_A_MEAN:
        return (Series(name="loss", values=loss, colour=1),)
    num_rows = max(9, num_values // 40 | 1)
    mean = running_mean(loss, num_rows)
    return (
        Series(name="loss", values=loss, colour=1, look="faint"),
        Series(name=f"mean of {num_rows} logged losses", values=mean, colour=1),
    )


def speed(run: RunFiles) -> list[str]:
    """Seconds per step, tokens per second, bytes per second."""
    log = facts.log_of(run)
    seconds = log.column("step_seconds")
    predicted = log.column("predicted_step_seconds")
    read, written = (_rates(log.column(f"{way}_bytes"), seconds) for way in ("read", "written"))
    tokens = Series(name="tokens/s", values=log.column("tokens_per_second"), colour=3)
    return [
        _chart(
            log,
            "step-seconds",
            "Seconds per step",
            Series(name="predicted", values=predicted, colour=2, look="dashed"),
            Series(name="measured", values=seconds, colour=1),
            format_value=format_seconds,
            format_tick=format_seconds,
            is_seconds=True,
        ),
        _chart(
            log,
            "bandwidth",
            "SSD bytes per second",
            Series(name="read", values=read, colour=1),
            Series(name="written", values=written, colour=2),
            format_value=format_rate,
            format_tick=format_rate,
            remark=_drive_rates(run),
        ),
        _chart(
            log,
            "tokens",
            "Tokens per second",
            tokens,
            format_value=lambda value: f"{value:,.4g}" if value < 1000 else f"{value:,.0f}",
            is_small=True,
        ),
        _chart(
            log,
            "busy",
            "Share of time each lane is busy",
            *(
                Series(name=lane, values=log.column(f"busy_{lane}"), colour=number)
                for number, lane in enumerate(Lane, start=1)
            ),
            format_value="{:.0%}".format,
            format_tick="{:.0%}".format,
            is_small=True,
        ),
    ]


def _rates(nbytes: Column, seconds: Column) -> list[float | None]:
    return [
        moved / took if moved is not None and took is not None and took > 0 else None
        for moved, took in zip(nbytes, seconds, strict=True)
    ]


def _drive_rates(run: RunFiles) -> str:
    machine = run.machine
    if machine is None:
        return ""
    return (
        f"Means over a step. The drives of this machine together read at "
        f"{format_rate(machine.ssd_read_bytes_per_second)} and write at "
        f"{format_rate(machine.ssd_write_bytes_per_second)} (machine.json)."
    )


def answers(run: RunFiles) -> Table | None:
    """A table with a row per prompt and a column per step it was answered at; or nothing."""
    log = facts.log_of(run)
    columns: dict[int, dict[str, str]] = {}
    for step, row in zip(log.steps, log.rows, strict=True):
        found = row.get("samples")
        for one in found if isinstance(found, list) else ():
            if isinstance(one, dict) and isinstance(one.get("prompt"), str):
                columns.setdefault(step, {})[one["prompt"]] = str(one.get("answer", ""))
    if not columns:
        return None
    first, *later = columns.items()
    columns = dict([first, *later[-_MOST_LATER:]])
    prompts = list(dict.fromkeys(one for answers in columns.values() for one in answers))
    heads = ["before training" if step == 0 else f"after step {step:,}" for step in columns]
    rows = [
        [prompt, *(one.get(prompt, "") for one in columns.values())]
        for prompt in prompts[:_MOST_PROMPTS]
    ]
    return Table(
        caption="The most likely tokens, one after the other, until the answer ends or is cut off.",
        columns=["prompt", *heads],
        rows=rows,
        num_text_columns=1 + len(heads),
    )
