"""The answer about one plan as tables for people.

Owns wording and order: first whether it fits, then what it costs, then what to change. Every time
is labelled simulated.
"""

from collections.abc import Sequence

from rich.console import Console

from lohan.cli.tables.output import table
from lohan.hardware.machine import Machine
from lohan.plan.plan import loss_words
from lohan.plan.run_cost import run_cost
from lohan.plan.run_room import DriveRoom
from lohan.simulate.answers.answer import Answer, RunTotals, totals_of
from lohan.simulate.answers.batch_advice import advised
from lohan.simulate.bottleneck import with_remedy
from lohan.simulate.result import SimulatedStep
from lohan.units import format_bytes, format_bytes_decimal, format_count, format_seconds
from lohan.vocabulary import Tier

_MINOR_SHARE = 0.005


def show_answer(answer: Answer, console: Console) -> None:
    """Print everything about one plan."""
    show_request(answer, console)
    show_ledger(answer, console)
    if answer.step is not None and answer.run is not None:
        show_step(answer.step, answer.run, answer.request.machine, console)
    if answer.request.workload.num_ranks > 1:
        return
    if answer.step is not None and answer.run is not None:
        show_batches(answer, console)
        show_what_ifs(answer, console)
    else:
        show_nearest(answer, console)
    show_limits(answer, console)


def show_request(answer: Answer, console: Console) -> None:
    """Print what was asked and whether it fits."""
    request, workload = answer.request, answer.request.workload
    shape = answer.plan.shape
    console.print(
        f"{shape.name} ({shape.in_words}, {shape.num_blocks} blocks) on {request.machine.name}",
        style="bold",
    )
    console.print(request.machine.description)
    clipping = "with" if workload.clips_gradients else "without"
    console.print(
        f"policy {request.policy.name}, batch {workload.batch} x {workload.sequence} tokens, "
        f"{answer.plan.num_micro_batches} micro-batch(es) per GPU, {clipping} clipping"
    )
    if workload.should_chunk_loss:
        console.print(loss_words(answer.plan))
    if workload.num_ranks > 1:
        console.print(
            f"{workload.num_ranks} ranks: memory, traffic, wear and cost are those of each, tokens "
            "those of all"
        )
    console.print()
    ledger = answer.plan.ledger
    if ledger.fits:
        console.print("It fits.", style="bold green")
        for warning in answer.warnings:
            console.print(f"Warning: {warning}.", style="bold red")
        return
    console.print("It does not fit.", style="bold red")
    for tier, short in ledger.shortages().items():
        largest = ledger.lines_of(tier)[0]
        console.print(
            f"  {tier} is short by {format_bytes(short)}: {format_bytes(ledger.total(tier))} "
            f"needed, {format_bytes(ledger.budgets[tier])} allowed; largest part: "
            f"{format_bytes(largest.nbytes)} of {largest.purpose}"
        )


def show_ledger(answer: Answer, console: Console) -> None:
    """Print what is needed per tier, line by line."""
    ledger = answer.plan.ledger
    shown = table("\nMemory", "tier", "what for", "bytes", "share", numbers=("bytes", "share"))
    for tier in Tier:
        budget = ledger.budgets[tier]
        for line in ledger.lines_of(tier):
            shown.add_row(
                tier, line.purpose, format_bytes(line.nbytes), _share(line.nbytes, budget)
            )
        spare = ledger.spare(tier)
        verdict = f"{format_bytes(spare)} spare" if spare >= 0 else f"{format_bytes(-spare)} short"
        shown.add_row(
            tier,
            f"total of {format_bytes(budget)} allowed, {verdict}",
            format_bytes(ledger.total(tier)),
            _share(ledger.total(tier), budget),
            style="bold",
            end_section=True,
        )
    console.print(shown)
    show_rooms(answer.rooms, console)


def show_rooms(rooms: Sequence[DriveRoom], console: Console) -> None:
    """Print what the run takes of each filesystem, where it is known which."""
    if not rooms:
        return
    numbers = ("bytes", "share")
    shown = table("\nRoom on drives", "on", "what for", *numbers, numbers=numbers)
    for room in rooms:
        for use in room.uses:
            purpose = f"{use.purpose} (there already)" if use.is_there else use.purpose
            share = "" if use.is_there else _share(use.nbytes, room.free_bytes)
            shown.add_row(room.path, purpose, format_bytes_decimal(use.nbytes), share)
        shown.add_row(
            room.path,
            f"still to be written, {format_bytes_decimal(room.free_bytes)} are free",
            format_bytes_decimal(room.asked_bytes),
            _share(room.asked_bytes, room.free_bytes),
            style="bold",
            end_section=True,
        )
    console.print(shown)


def _share(nbytes: int, budget: int) -> str:
    # Of a memory of a byte, nothing is allowed.
    return f"{nbytes / budget:.1%}" if budget else "-"


def show_step(step: SimulatedStep, run: RunTotals, machine: Machine, console: Console) -> None:
    """Print time, bytes, wear, bottleneck and lanes."""
    stages = f"forward {format_seconds(step.forward_seconds)}, backward "
    stages += format_seconds(step.backward_seconds)
    if step.optimizer_seconds > _MINOR_SHARE * step.step_seconds:
        stages += f", optimizer {format_seconds(step.optimizer_seconds)}"
    measured = "assumed" if machine.operator_seconds is None else "measured"
    busy = [f"{lane} {step.busy_share(lane):.0%}" for lane, s in step.busy_seconds.items() if s > 0]
    cost = run_cost(machine, seconds=run.hours * 3600, written_bytes=run.written_bytes)
    rows = {
        "step time": f"{format_seconds(step.step_seconds)} ({stages})",
        "tokens per second": f"{step.tokens_per_second:,.1f}",
        "TFLOPS": f"{step.paper_tflops:.1f} by the paper's count, {step.model_tflops:.1f} of model",
        "bottleneck": with_remedy(step.bottleneck),
        "host": f"{format_seconds(step.launch_seconds)} of launching operators "
        f"({format_seconds(machine.launch_seconds)} each, {measured})",
        "share of the roofline": f"{step.roofline_share:.0%}: {step.roofline_resource} alone would "
        f"take {format_seconds(step.roofline_seconds)}",
        "lanes busy": ", ".join(busy),
        "SSD traffic": f"{format_bytes_decimal(step.read_bytes)} read, "
        f"{format_bytes_decimal(step.written_bytes)} written",
    }
    console.print(table("\nOne step (simulated)", has_header=False, rows=rows.items()))
    rows = {
        "steps": f"{run.num_steps:,}",
        "time": f"{run.hours:,.1f} hours ({format_seconds(run.hours * 3600)})",
        "written to SSD": format_bytes_decimal(run.written_bytes),
        "endurance used": f"{run.endurance_share:.2%} of {machine.drives_life}",
        "cost": cost.in_words(),
        "cost of a step": f"${cost.dollars / run.num_steps:.4f}",
    }
    title = f"\nA run of {format_count(run.num_tokens)} tokens (simulated)"
    console.print(table(title, has_header=False, rows=rows.items()))


def show_batches(answer: Answer, console: Console) -> None:
    """Print which batch to take."""
    if len(answer.batches) < 2 or answer.run is None:
        return
    columns = ("sequences a step", "tokens/s", "time", "written")
    shown = table("\nWhich batch (simulated)", *columns, numbers=columns)
    best = advised(list(answer.batches))
    for choice in answer.batches:
        totals = totals_of(choice.step, answer.run.num_tokens)
        shown.add_row(
            f"{choice.batch}",
            f"{choice.step.tokens_per_second:,.1f}",
            f"{totals.hours:,.1f} h",
            format_bytes_decimal(totals.written_bytes),
            style="bold" if choice is best else None,
        )
    console.print(shown)
    asked = answer.request.workload.batch
    console.print(
        f"Take {best.batch}: {best.faster:.1f}x as fast as {asked}, and {best.wear:.0%} of the "
        "writes per token. Larger steps often want a larger learning rate."
        if best.is_worth_saying
        else f"{asked} is a good choice: a larger one brings little."
    )


def show_what_ifs(answer: Answer, console: Console) -> None:
    """Print what to change to go faster."""
    numbers = ("step time", "tokens/s", "factor")
    rows = [
        (one.change, one.option, "does not fit", "", "")
        if one.step is None or one.factor is None
        else (
            one.change,
            one.option,
            format_seconds(one.step.step_seconds),
            f"{one.step.tokens_per_second:,.1f}",
            f"{one.factor:.2f}x",
        )
        for one in answer.what_ifs
    ]
    title = "\nWhat if (simulated)"
    console.print(table(title, "change", "write", *numbers, numbers=numbers, rows=rows))


def show_nearest(answer: Answer, console: Console) -> None:
    """Print what would fit instead."""
    if not answer.nearest:
        console.print("\nNo single change of batch, memory, policy or model makes it fit.")
        return
    rows = [(one.change, one.option) for one in answer.nearest]
    title = "\nWhat does fit, changing one thing"
    console.print(table(title, "change", "write", rows=rows))


def show_limits(answer: Answer, console: Console) -> None:
    """Print the largest batch and model on this machine."""
    batch = "none: not even one sequence per GPU fits"
    if answer.largest_batch is not None:
        batch = f"{answer.largest_batch}"
    rows = {
        "largest batch of this model": batch,
        "largest known model, one sequence per GPU": answer.largest_model or "none of them fits",
    }
    title = "\nLimits of this machine with this policy"
    console.print(table(title, has_header=False, rows=rows.items()))
