"""Headline: what limited the run, the numbers looked for first, and what is wrong with the files.

Owns their choice, order and wording. A number that no file holds says "not recorded".
"""

import math
from dataclasses import dataclass

from lohan.report.run_files import RunFiles
from lohan.report.sections import facts
from lohan.simulate.answers.advice import limit_sentence
from lohan.units import format_bytes, format_bytes_decimal, format_seconds
from lohan.vocabulary import Tier


@dataclass(frozen=True, slots=True)
class _Card:
    label: str
    value: str | None = None
    below: str = ""


def headline(run: RunFiles) -> dict[str, object]:
    """A sentence, the cards, and the remarks on files below them."""
    found = facts.bottleneck(run)
    remarks = list(run.remarks)
    if run.summary is None:
        remarks.append(
            "There is no usable summary.json: the run is still going on, or it was stopped before "
            "its end."
        )
    return {
        "verdict": found and limit_sentence(*found, facts.advice(run)),
        "cards": [card(run) for card in _CARDS],
        "remarks": remarks,
    }


def _loss(run: RunFiles) -> _Card:
    log = facts.log_of(run)
    logged = [value for value in log.column("loss") if value is not None]
    values = facts.finite(run, "loss")
    if not logged:
        return _Card("Loss")
    below = f"{values[0][1]:.4g} at step {values[0][0]:,}" if values else ""
    num_odd = sum(not math.isfinite(value) for value in logged)
    if num_odd:
        below += f"{'; ' if below else ''}{num_odd:,} value(s) are not finite"
    return _Card("Loss, last logged", f"{logged[-1]:.4g}", below)


def _eval_loss(run: RunFiles) -> _Card:
    values = facts.finite(run, "eval_loss")
    if not values:
        return _Card("Evaluation loss")
    step, best = min(values, key=lambda pair: pair[1])
    return _Card(
        "Evaluation loss, last",
        f"{values[-1][1]:.4g}",
        f"lowest {best:.4g} at step {step:,}",
    )


def _steps(run: RunFiles) -> _Card:
    log = facts.log_of(run)
    last = log.steps[-1] if log.steps else facts.number_in(run.summary, "num_steps")
    if last is None:
        return _Card("Optimizer steps")
    wanted = facts.number_in(run.summary, "max_steps")
    below = f"of {wanted:,.0f}" if wanted is not None and wanted > 0 else ""
    seconds = facts.number_in(run.summary, "seconds")
    if seconds is not None:
        below += f"{' ' if below else ''}in {format_seconds(seconds)}"
    return _Card("Optimizer steps", f"{last:,.0f}", below)


def _step_seconds(run: RunFiles) -> _Card:
    measured = facts.usual(run, "step_seconds")
    predicted = facts.usual(run, "predicted_step_seconds")
    below = "no prediction recorded"
    if predicted is not None:
        below = f"predicted {format_seconds(predicted)}"
        if measured is not None and predicted > 0:
            off = measured / predicted - 1
            below += (
                "; as predicted"
                if abs(off) < 0.005
                else f"; measured is {abs(off):.0%} {'slower' if off > 0 else 'faster'}"
            )
    value = None if measured is None else format_seconds(measured)
    return _Card("Time per step, median", value, below)


def _tokens(run: RunFiles) -> _Card:
    rate = facts.usual(run, "tokens_per_second")
    if rate is None:
        return _Card("Tokens per second")
    return _Card("Tokens per second, median", f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}")


def _bottleneck(run: RunFiles) -> _Card:
    found = facts.bottleneck(run)
    if found is None:
        return _Card("Bottleneck")
    name, share = found
    return _Card("Bottleneck", name, f"in {share:.0%} of the logged steps")


def _written(run: RunFiles) -> _Card:
    written = facts.traffic(run, "written_bytes")
    if written is None:
        return _Card("Written to SSD")
    share = facts.endurance_share(run)
    below = ""
    if share is not None and run.machine is not None:
        below = f"{format_share(share)} of {run.machine.drives_life}"
    return _Card(
        "Written to SSD, about" if written.is_estimate else "Written to SSD",
        format_bytes_decimal(written.nbytes),
        below,
    )


def format_share(share: float) -> str:
    """Print a small share so that it does not become zero."""
    percent = 100 * share
    if percent == 0 or percent >= 1:
        return f"{percent:.1f} %"
    return f"{percent:.2g} %" if percent >= 1e-4 else "below 0.0001 %"


def _memory(run: RunFiles) -> _Card:
    peak = facts.peak_bytes(run, Tier.RAM)
    below = ""
    gpu_peak = facts.peak_bytes(run, Tier.GPU)
    if gpu_peak is not None:
        below = f"GPU {format_bytes(gpu_peak)}"
    return _Card("RAM in use, peak", None if peak is None else format_bytes(peak), below)


_CARDS = (_loss, _eval_loss, _steps, _step_seconds, _tokens, _bottleneck, _written, _memory)
