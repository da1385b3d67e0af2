"""A plan in words, for the lines printed before the first step. Every time in them is predicted.

Owns the wording. Numbers come from the plan's ledger and its simulated step; tables of the same
things are the command line's. Called by `progress`.
"""

import contextlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

from lohan.engine.planning.write_limit import WriteLimit, written_by_seal
from lohan.errors import ConfigError, DoesNotFit
from lohan.hardware.machine import Machine
from lohan.plan.plan import loss_words
from lohan.plan.run_cost import run_cost, run_warnings
from lohan.plan.run_room import DriveRoom
from lohan.simulate.answers.advice import larger_batch
from lohan.simulate.answers.batch_advice import BatchChoice
from lohan.simulate.bottleneck import with_remedy
from lohan.units import format_bytes, format_bytes_decimal, format_seconds
from lohan.vocabulary import Choice, Tier

_CHOICES = {
    Choice.KEEP: "kept on the GPU",
    Choice.SWAP_TO_RAM: "swapped to RAM",
    Choice.SWAP_TO_SSD: "swapped to SSD",
    Choice.RECOMPUTE: "recomputed",
}


def plan_in_words(
    plan: Any,
    prediction: Any,
    *,
    num_steps: int,
    num_seals: int = 0,
    write_limit: WriteLimit | None = None,
    written_bytes: int = 0,
    rates_note: str = "",
    machine: Machine | None = None,
    rooms: Sequence[DriveRoom] = (),
) -> list[str]:
    """Sentences about a plan; without a prediction those about time are left out.

    Args:
        num_steps: still to take.
        num_seals: that write what lives in RAM meanwhile.
        write_limit: of the whole run.
        written_bytes: so far, to measure the drives and as first states.
        rates_note: what to know about the rates behind predictions.
        machine: it runs on; without it nothing is said about money.
        rooms: of the filesystems the run touches.
    """
    ledger, shape = plan.ledger, plan.shape
    memory = ", ".join(
        f"{tier} {format_bytes(ledger.total(tier))} of {format_bytes(ledger.budgets[tier])}"
        for tier in Tier
        if tier in ledger.budgets
    )
    num_ranks = plan.workload.num_ranks
    ranks = f" on each of {num_ranks} ranks" if num_ranks > 1 else ""
    lines = [
        f"{shape.in_words} in {shape.num_blocks} blocks; "
        f"{plan.workload.batch} x {plan.workload.sequence} tokens a step in "
        f"{_micro_batches(plan.num_micro_batches)}{ranks}; policy {plan.policy}",
        f"{'fits' if ledger.fits else 'does not fit'}: {memory}",
        f"activations (what the forward pass leaves for the backward pass): {_activations(plan)}",
    ]
    if plan.workload.should_chunk_loss:
        lines.append(loss_words(plan))
    lines += [f"room on {room.in_words()}" for room in rooms]
    if prediction is not None:
        hours = num_steps * prediction.step_seconds / 3600
        sealed = num_seals * written_by_seal(plan)
        written = num_steps * prediction.written_bytes + sealed
        share = (written_bytes + written) / prediction.endurance_bytes
        life = "the drives' rated life" if machine is None else machine.drives_life
        lines += [
            f"predicted: {format_seconds(prediction.step_seconds)} a step, "
            f"{prediction.tokens_per_second:,.1f} tokens/s; limit (what the step waits for): "
            f"{with_remedy(prediction.bottleneck)}" + (f"; {rates_note}" if rates_note else ""),
            f"predicted for {num_steps:,} steps: {format_seconds(hours * 3600)}, "
            f"{format_bytes_decimal(written)} written to SSD"
            + (f" ({format_bytes_decimal(sealed)} by seals)" if sealed else "")
            + (f" beside {format_bytes_decimal(written_bytes)} so far" if written_bytes else "")
            + f", {share:.2%} of {life}",
        ]
        if machine is not None:
            cost = run_cost(machine, seconds=hours * 3600, written_bytes=written)
            lines.append(f"cost: {cost.in_words()}")
        if write_limit is not None:
            total = write_limit.run_bytes(plan, prediction.written_bytes)
            lines.append(
                f"write budget: {format_bytes_decimal(total)} of "
                f"{format_bytes_decimal(write_limit.budget_bytes)} for the whole run, first states "
                "included"
            )
    return lines


def cautions(
    plan: Any,
    prediction: Any,
    machine: Machine,
    *,
    num_steps: int,
    written_bytes: int = 0,
    rooms: Sequence[DriveRoom] = (),
) -> list[str]:
    """What a user would want to know before step 1: wear, full drives, a batch that costs much."""
    if prediction is None:
        return []
    written = written_bytes + num_steps * prediction.written_bytes
    found = run_warnings(machine, plan.ledger, written_bytes=written, rooms=rooms)
    # What cannot be planned, such as a policy that is a function, is not advised on.
    with contextlib.suppress(ConfigError, DoesNotFit):
        choice = larger_batch(plan, machine)
        if choice is not None:
            found.append(batch_in_words(choice, plan.workload.batch))
    return found


def batch_in_words(choice: BatchChoice, batch: int) -> str:
    """What a larger batch would bring."""
    return (
        f"{choice.batch} rows a step instead of {batch} (gradient_accumulation_steps) would be "
        f"{choice.faster:.1f}x as fast and write {choice.wear:.0%} as much per token (simulated); "
        "a larger step often wants a larger learning rate"
    )


def _micro_batches(count: int) -> str:
    """So many parts, and what they are where there are several."""
    return "one part" if count == 1 else f"{count} micro-batches (computed one after the other)"


def _activations(plan: Any) -> str:
    counted: Counter[Choice] = Counter()
    for block in plan.blocks:
        counted.update(choice for _, choice in block.choices)
        counted[block.input_choice] += 1
    total = sum(counted.values())
    shown = [
        f"{counted[choice]} of {total} {words}" for choice, words in _CHOICES.items()
        if counted[choice]
    ]  # fmt: skip
    return ", ".join(shown) if shown else "all recomputed"
