"""The profile of this machine: what is kept of it, and the rest measured.

Owns which parts are measured and what is said about it. Figures are kept if their samples agree;
memory that is free is not. Called by `lohan profile` and by whoever starts a run.
"""

import contextlib
import os
from collections.abc import Collection, Sequence
from pathlib import Path

from lohan.device import Device
from lohan.errors import ConfigError
from lohan.hardware.machine import Machine
from lohan.hardware.this_host import num_usable_cores
from lohan.measure.bar import OnShare, Report
from lohan.measure.cache import load_profile, save_profile
from lohan.measure.facts import machine_facts
from lohan.measure.machine import (
    SECONDS,
    Instruments,
    check_numbers,
    measure_machine,
    opened_device,
)
from lohan.measure.measured import MeasuredMachine, Part
from lohan.ssd import check_directories


def remember_drives(
    measured: MeasuredMachine, learned: Machine, *, cache: Path | None = None
) -> None:
    """Keep what the steps of a run have shown of drives whose own figures are not worth keeping,
    so that they are not measured, and worn, at every start of a machine that is never quiet.

    Args:
        measured: what the run began with.
        learned: the machine as its steps have shown it.
    """
    kept = load_profile(measured.facts, directory=cache).profile
    if kept is None or not kept.drives or Part.DRIVES not in kept.unsure_parts():
        return  # somebody has measured them in quiet meanwhile
    with contextlib.suppress(ConfigError):  # the run does not need it to be kept
        save_profile(kept.with_learned_drives(learned), directory=cache)


def profile_machine(
    *,
    ssd: Sequence[str | os.PathLike[str]],
    device: str | Device | None = None,
    ram_bytes: int | None = None,
    gpu_bytes: int | None = None,
    seconds: float = SECONDS,
    sustained_seconds: float | None = None,
    num_threads: int | None = None,
    report: Report | None = None,
    on_share: OnShare | None = None,
    instruments: Instruments | None = None,
    should_refresh: bool = False,
    needed: Collection[Part] = tuple(Part),
    cache: Path | None = None,
) -> tuple[MeasuredMachine, str]:
    """Return the profile of this machine, measuring and keeping what is not kept; and say which.

    Memory that is free is asked anew either way. Parts that are not `needed` are taken as they are
    kept, and drives that are not kept as usual ones. Arguments and errors otherwise as in
    `measure_machine`; `cache` is another place for profiles.
    """
    report = report or (lambda line: None)
    instruments = instruments or Instruments()
    check_numbers(seconds, sustained_seconds, num_threads)
    reports = check_directories(ssd)
    with opened_device(device, gpu_bytes) as opened:
        loaded = load_profile(machine_facts(opened, reports), directory=cache)
        reason = "asked for" if should_refresh else loaded.reason
        kept = None if should_refresh else loaded.profile
        # Of what is not kept, only drives can be done without.
        parts = frozenset(Part) if Part.DRIVES in needed else frozenset(Part) - {Part.DRIVES}
        if kept is not None:
            parts = kept.unsure_parts(instruments.most_spread)
            reason = "the kept figures varied too much, or there are none"
            if kept.num_update_threads != (num_threads or num_usable_cores()):
                parts |= {Part.UPDATES}
                reason = f"updates were measured with {kept.num_update_threads} threads"
            parts &= frozenset(needed)
        if parts:
            report(f"measuring {', '.join(one for one in Part if one in parts)}: {reason}")
        measured = measure_machine(
            ssd=ssd,
            device=opened,
            ram_bytes=ram_bytes,
            gpu_bytes=gpu_bytes,
            seconds=seconds,
            sustained_seconds=sustained_seconds,
            num_threads=num_threads,
            report=report,
            on_share=on_share,
            instruments=instruments,
            parts=parts,
            kept=kept,
        )
        opened.trim()  # what was measured with has other sizes than what comes
    if not parts:
        return measured, loaded.reason
    try:
        path = save_profile(measured, directory=cache)
    except ConfigError as error:
        # The figures are good all the same.
        report(f"not kept: {error.what} ({error.why})")
        return measured, f"measured now ({reason}); not kept"
    unsure = measured.unsure_parts(instruments.most_spread) & parts
    again = f"; {', '.join(sorted(unsure))} varied too much to be remembered" if unsure else ""
    return measured, f"measured now ({reason}); kept in {path}{again}"
