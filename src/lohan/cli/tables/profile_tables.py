"""The tables of `lohan profile`. Owns wording and layout; computes nothing."""

import pathlib

from rich.console import Console
from rich.table import Table

from lohan.cli.tables.output import table
from lohan.hardware.drive_life import WRITES_PER_CAPACITY, LifeSource
from lohan.hardware.machine import Machine
from lohan.measure import Figure, MeasuredMachine
from lohan.measure.cache import MOST_AGE
from lohan.simulate.answers.machine_meaning import Meaning
from lohan.simulate.bottleneck import lane_words
from lohan.units import (
    format_bytes,
    format_bytes_decimal,
    format_count,
    format_rate,
    format_seconds,
)


def show_profile(
    measured: MeasuredMachine,
    source: str,
    meaning: Meaning | None,
    console: Console,
    *,
    out: pathlib.Path | None,
) -> None:
    """Print what was measured, when and how, what it means, and how to measure again."""
    facts = measured.facts
    console.print(
        f"{facts.device_hardware} ({facts.device}), {facts.cpu_model} (cores: {facts.num_cores}), "
        f"{format_bytes(facts.ram_total_bytes)} RAM, SSD directories: {len(measured.drives)}"
    )
    console.print(f"measured on {measured.measured_at:%Y-%m-%d %H:%M} UTC; {source}")
    console.print()
    console.print(_drives(measured))
    for drive in measured.drives:
        settings = drive.settings
        console.print(
            f"{drive.path}: blocks of {format_bytes(settings.block_bytes)}, "
            f"{settings.max_requests} in flight, {settings.mixing}"
        )
    console.print()
    console.print(_rates(measured))
    console.print()
    console.print(_memory(measured))
    for note in _notes(measured):
        console.print(f"note: {note}")
    console.print()
    _show_meaning(meaning, measured.machine, console, out)
    console.print(
        f"Kept for {MOST_AGE.days} days or until the hardware changes; --refresh measures again, "
        "--sustained 60 shows what a drive holds once its fast cache is full."
    )


def _rate(figure: Figure) -> str:
    return f"{format_rate(figure.per_second)} {_within(figure)}"


def _flops(figure: Figure) -> str:
    rate = figure.per_second
    return f"{rate / 1e12:.3g} TFLOP/s" if rate >= 1e12 else f"{rate / 1e9:.3g} GFLOP/s"


def _within(figure: Figure) -> str:
    return f"(+-{100 * figure.spread / 2:.0f} %)"


def _drives(measured: MeasuredMachine) -> Table:
    columns = ("read", "write", "both at once", "sustained write", "share")
    shown = table("SSD directories", "path", *columns, numbers=columns)
    total = sum(measured.weights)
    for drive in measured.drives:
        figures = drive.figures
        shown.add_row(
            drive.path,
            _rate(figures.read),
            _rate(figures.write),
            _rate(figures.mixed),
            _rate(drive.sustained_write) if drive.sustained_write else "not measured",
            f"{drive.weight / total:.0%}",
        )
    together = measured.together
    if together is not None and len(measured.drives) > 1:
        shown.add_row(
            "all together", _rate(together.read), _rate(together.write), _rate(together.mixed)
        )
    return shown


def _rates(measured: MeasuredMachine) -> Table:
    copies, compute = measured.copies, measured.compute
    way = "pinned memory" if copies.is_pinned else "memory that is not pinned"
    if copies.both_ways_slowdown > 1.05:
        way += f", {copies.both_ways_slowdown:.2f}x slower with both ways busy"
    updates = f"{format_count(measured.updates.per_second)} parameters/s"
    threads = "threads" if measured.num_update_threads > 1 else "thread"
    rows = (
        ("RAM to GPU", _rate(copies.ram_to_gpu), way),
        ("GPU to RAM", _rate(copies.gpu_to_ram), way),
        (
            "compute in bf16",
            f"{_flops(compute.flops)} {_within(compute.flops)}",
            f"a block of width {compute.width} over {compute.tokens} tokens, forward and backward",
        ),
        ("GPU memory", _rate(compute.memory), "copies within it"),
        (
            "CPU updates",
            f"{updates} {_within(measured.updates)}",
            f"AdamW on the 12-byte state, {measured.num_update_threads} {threads}",
        ),
    )
    return table("Copies, compute, updates", "what", "rate", "how", numbers=("rate",), rows=rows)


def _memory(measured: MeasuredMachine) -> Table:
    machine = measured.machine
    rows = (
        ("GPU", format_bytes(machine.gpu.memory_bytes), ""),
        ("RAM", format_bytes(machine.ram_bytes), measured.ram_reason),
        ("SSD", format_bytes(machine.ssd_capacity_bytes), "free space"),
    )
    return table("Memory to plan with", "tier", "bytes", "why", numbers=("bytes",), rows=rows)


def _notes(measured: MeasuredMachine) -> list[str]:
    notes = list(measured.notes)
    notes.append(f"{format_bytes_decimal(measured.written_bytes)} were written to measure")
    machine = measured.machine
    life = f"{format_bytes_decimal(machine.ssd_endurance_bytes)} are {machine.drives_life}"
    if any(ssd.life is LifeSource.ASSUMED for ssd in machine.ssds):
        life += (
            f": {WRITES_PER_CAPACITY} times what they hold; the data sheet knows better "
            "(endurance_bytes, offload.ssd_rated_tbw)"
        )
    notes.append(life)
    noisy = sorted(measured.unsure_parts())
    if noisy:
        notes.append(
            f"{', '.join(noisy)} varied a lot (was something else running?): measured again next "
            "time"
        )
    if measured.is_burst:
        notes.append(
            "writes are a burst: a run learns what the drives hold from its own, --sustained 60 "
            "measures it"
        )
    for drive in measured.drives:
        if drive.sustained_write is None or measured.sustained_seconds is None:
            continue
        sustained, burst = drive.sustained_write.per_second, drive.figures.write.per_second
        if sustained < 0.8 * burst:
            notes.append(
                f"{drive.path} falls to {format_rate(sustained)} within "
                f"{format_seconds(measured.sustained_seconds)} of writing: its fast cache is full, "
                "or others write to it; plans count on that rate"
            )
    return notes


def _show_meaning(
    meaning: Meaning | None, machine: Machine, console: Console, out: pathlib.Path | None
) -> None:
    if meaning is None:
        console.print("None of the models tried fits: too little memory or disk is free.")
        return
    step = meaning.step
    shown = table(
        f"A full fine-tune of {meaning.model}, batch {meaning.batch} x {meaning.sequence} "
        "(simulated)",
        "what",
        "busy per step",
        "of the step",
        numbers=("busy per step", "of the step"),
    )
    words = lane_words(machine)
    for lane, busy in sorted(step.busy_seconds.items(), key=lambda pair: -pair[1]):
        if busy:
            shown.add_row(words[lane], format_seconds(busy), f"{step.busy_share(lane):.0%}")
    console.print(shown)
    console.print(
        f"one step {format_seconds(step.step_seconds)}, {step.tokens_per_second:,.1f} tokens per "
        f"second; bottleneck: {step.bottleneck}"
    )
    console.print(
        f"lohan plan {meaning.option} --machine {out or 'machine.json'}"
        + ("" if out else "   (write the machine with --out machine.json)")
    )
    console.print()
