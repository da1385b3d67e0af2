"""The profile of this machine: the one that is kept, or a new one.

Owns the decision between the two and what is said about it. Figures are kept, memory that is free
is not. Called by `lohan profile` and by whoever starts a run.
"""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lohan.device import Device
from lohan.errors import ConfigError
from lohan.hardware.this_host import num_usable_cores
from lohan.measure.cache import load_profile, save_profile
from lohan.measure.disks import Report
from lohan.measure.facts import machine_facts
from lohan.measure.machine import (
    SECONDS,
    SUSTAINED_SECONDS,
    Instruments,
    measure_machine,
    with_room,
)
from lohan.measure.measured import MeasuredMachine
from lohan.measure.memory import memory_to_plan_with
from lohan.measure.opening import OpenedDevice, check_numbers
from lohan.ssd import check_directories


def profile_machine(
    *,
    ssd: Sequence[str | os.PathLike[str]],
    device: str | Device | None = None,
    ram_bytes: int | None = None,
    gpu_bytes: int | None = None,
    seconds: float = SECONDS,
    sustained_seconds: float = SUSTAINED_SECONDS,
    num_threads: int | None = None,
    report: Report | None = None,
    instruments: Instruments | None = None,
    should_refresh: bool = False,
    cache: Path | None = None,
) -> tuple[MeasuredMachine, str]:
    """Return the kept profile of this machine, or measure and keep one; and say which.

    Memory that is free is asked anew either way. Arguments and errors as in `measure_machine`;
    `cache` is another place for profiles.
    """
    report = report or (lambda line: None)
    instruments = instruments or Instruments()
    check_numbers(seconds, sustained_seconds, num_threads)
    reports = check_directories(ssd)
    with OpenedDevice(device, gpu_bytes) as opened:
        facts = machine_facts(opened, reports)
        loaded = load_profile(facts, directory=cache)
        reason = "asked for" if should_refresh else loaded.reason
        kept = None if should_refresh else loaded.profile
        wanted_threads = num_threads or num_usable_cores()
        if kept is not None and kept.num_update_threads != wanted_threads:
            reason = f"updates were measured with {kept.num_update_threads} threads"
            kept = None
        if kept is not None:
            ram, gpu, why = memory_to_plan_with(
                opened, ram_bytes, gpu_bytes, available=instruments.available_ram
            )
            machine = kept.machine.with_ram(ram).with_gpu_memory(gpu)
            machine = replace(machine, ssds=with_room(machine.ssds, reports))
            found = replace(kept, machine=machine, ram_reason=why)
            return found.at_paths(tuple(one.path for one in reports)), loaded.reason
        report(f"measuring: {reason}")
        measured = measure_machine(
            ssd=ssd,
            device=opened,
            ram_bytes=ram_bytes,
            gpu_bytes=gpu_bytes,
            seconds=seconds,
            sustained_seconds=sustained_seconds,
            num_threads=num_threads,
            report=report,
            instruments=instruments,
        )
    try:
        path = save_profile(measured, directory=cache)
    except ConfigError as error:
        # The figures are good all the same.
        report(f"not kept: {error.what} ({error.why})")
        return measured, f"measured now ({reason}); not kept"
    return measured, f"measured now ({reason}); kept in {path}"
