"""Training and speed: what was logged over steps, as charts.

Owns which columns of the log are shown, how, and in which order.
"""

import math

from lohan.report.html.axis import scientific
from lohan.report.html.line_chart import Chart, Series, line_chart
from lohan.report.html.thinning import Column, running_mean
from lohan.report.run_files import RunFiles
from lohan.report.sections import facts
from lohan.units import format_rate, format_seconds
from lohan.vocabulary import Lane

_FEWEST_FOR_A_MEAN = 60


def training(run: RunFiles) -> dict[str, object]:
    """Loss, evaluation loss, learning rate, gradient norm."""
    log = facts.log_of(run)
    loss = log.column("loss")
    return {
        "loss": line_chart(
            Chart(
                anchor="loss",
                title="Loss",
                steps=log.steps,
                series=(
                    *_loss_series(loss),
                    Series(name="evaluation loss", values=log.column("eval_loss"), colour=2),
                ),
                format_value=lambda value: f"{value:.4g}",
                starts_at_zero=False,
            )
        ),
        "small": [
            line_chart(
                Chart(
                    anchor="learning-rate",
                    title="Learning rate",
                    steps=log.steps,
                    series=(Series(name="rate", values=log.column("learning_rate"), colour=3),),
                    format_value=scientific,
                    is_small=True,
                )
            ),
            line_chart(
                Chart(
                    anchor="grad-norm",
                    title="Gradient norm, before clipping",
                    steps=log.steps,
                    series=(Series(name="norm", values=log.column("grad_norm"), colour=5),),
                    format_value=lambda value: f"{value:.4g}",
                    is_small=True,
                )
            ),
        ],
    }


def _loss_series(loss: Column) -> tuple[Series, ...]:
    num_values = sum(value is not None and math.isfinite(value) for value in loss)
    if num_values < _FEWEST_FOR_A_MEAN:
        return (Series(name="loss", values=loss, colour=1),)
    num_rows = max(9, num_values // 40 | 1)
    return (
        Series(name="loss", values=loss, colour=1, look="faint"),
        Series(
            name=f"mean of {num_rows} logged losses",
            values=running_mean(loss, num_rows),
            colour=1,
        ),
    )


def speed(run: RunFiles) -> list[str]:
    """Seconds per step, tokens per second, bytes per second."""
    log = facts.log_of(run)
    seconds = log.column("step_seconds")
    return [
        line_chart(
            Chart(
                anchor="step-seconds",
                title="Seconds per step",
                steps=log.steps,
                series=(
                    Series(
                        name="predicted",
                        values=log.column("predicted_step_seconds"),
                        colour=2,
                        look="dashed",
                    ),
                    Series(name="measured", values=seconds, colour=1),
                ),
                format_value=format_seconds,
                format_tick=format_seconds,
                is_seconds=True,
            )
        ),
        line_chart(
            Chart(
                anchor="bandwidth",
                title="SSD bytes per second",
                steps=log.steps,
                series=(
                    Series(name="read", values=_rates(log.column("read_bytes"), seconds), colour=1),
                    Series(
                        name="written",
                        values=_rates(log.column("written_bytes"), seconds),
                        colour=2,
                    ),
                ),
                format_value=format_rate,
                format_tick=format_rate,
                remark=_drive_rates(run),
            )
        ),
        line_chart(
            Chart(
                anchor="tokens",
                title="Tokens per second",
                steps=log.steps,
                series=(Series(name="tokens/s", values=log.column("tokens_per_second"), colour=3),),
                format_value=lambda value: f"{value:,.4g}" if value < 1000 else f"{value:,.0f}",
                is_small=True,
            )
        ),
        line_chart(
            Chart(
                anchor="busy",
                title="Share of time each lane is busy",
                steps=log.steps,
                series=tuple(
                    Series(name=lane, values=log.column(f"busy_{lane}"), colour=number)
                    for number, lane in enumerate(Lane, start=1)
                ),
                format_value=lambda share: f"{share:.0%}",
                format_tick=lambda share: f"{share:.0%}",
                is_small=True,
            )
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
