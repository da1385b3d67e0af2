"""Examines a machine: everything a run would stumble over, before there is a run.

Owns the questions, their order, and the words for what to fix. Leaves nothing behind; measures no
speed (`lohan profile` does). Where torch is missing, what needs it is left out. Called by `lohan
doctor`.
"""

import os
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from lohan.doctor.finding import Examination, Finding, Level
from lohan.doctor.software import examine_kernels, examine_software, examine_tiles
from lohan.errors import LohanError, missing_package
from lohan.hardware.limits import available_ram_bytes, is_bound_by_locking
from lohan.ssd import DirectoryReport, check_directories, check_directory, choose_engine
from lohan.units import GIB, MIB, format_bytes

if TYPE_CHECKING:
    from lohan.device import Device

_LEAST_RAM_BYTES = 256 * MIB
_AMPLE_RAM_BYTES = 4 * GIB
_AMPLE_LOCKED_BYTES = GIB

Paths = Sequence[str | os.PathLike[str]]


def examine(*, ssd: Paths = (), device: str | None = None) -> Examination:
    """Look at everything; nothing is raised for what is found.

    Args:
        ssd: SSD directories a run would use.
        device: as in `lohan.attach`; None: a GPU if there is one.
    """
    findings = [*examine_software(), examine_tiles(), *examine_kernels(), examine_io_engine()]
    opened: Device | None = None
    try:
        from lohan.device import open_device

        opened = open_device(device)
    except LohanError as error:
        findings.append(_problem("device", error))
    except ModuleNotFoundError as error:
        findings.append(_problem("device", missing_package(error)))
    try:
        if opened is not None:
            findings += examine_device(opened)
        findings += examine_ram(opened)
        reports, found = examine_directories(ssd)
        findings += found
        if opened is not None:
            findings.append(examine_profile(opened, reports))
    finally:
        if opened is not None:
            opened.close()
    return Examination(findings=tuple(findings), directories=tuple(os.fspath(path) for path in ssd))


def examine_io_engine() -> Finding:
    """Which engine reads and writes, and why."""
    try:
        engine, reason = choose_engine()
    except (LohanError, OSError) as error:
        return _problem("io engine", error)
    engine.close()
    if reason.startswith("io_uring"):
        return Finding(name="io engine", found=reason)
    return Finding(
        name="io engine",
        found=reason,
        level=Level.NOTE,
        remedy="threads read and write as correctly and with a little more CPU time; to have "
        "io_uring, use Linux 5.6 or newer and allow it (sysctl kernel.io_uring_disabled=0, and in "
        "containers a seccomp profile that permits it)",
    )


def examine_device(device: "Device") -> Iterator[Finding]:
    """The device, why it was chosen, and whether it keeps its promises."""
    if device.memory_bytes is None:
        memory = "no memory of its own"
    else:
        memory = f"{format_bytes(device.memory_bytes)} of memory"
    found = f"{device.name}, {memory}: {device.reason}"
    if device.shares_ram and "was asked for" not in device.reason:
        yield Finding(
            name="device",
            found=found,
            level=Level.NOTE,
            remedy="right for trying things out; to train on a GPU, install its driver and a torch "
            "built for it, and check torch.cuda.is_available()",
        )
    else:
        yield Finding(name="device", found=found)
    from lohan.device.self_test import failed_promises

    failures = failed_promises(device)
    if failures:
        yield Finding(
            name="device self-test",
            found="; ".join(failures),
            level=Level.PROBLEM,
            remedy="results cannot be trusted here: update the driver and torch, and report this",
        )
    else:
        yield Finding(name="device self-test", found="copies, order, compute and budget are right")


def examine_ram(device: "Device | None") -> Iterator[Finding]:
    """How much memory a run may take, what bounds it, and how much of it may be locked."""
    is_bound = device is not None and is_bound_by_locking(device)
    try:
        free = available_ram_bytes(counts_locked=is_bound)
    except LohanError as error:
        yield _problem("free RAM", error)
        return
    found = f"{format_bytes(free.bytes)} ({free.reason})"
    if free.bytes < _LEAST_RAM_BYTES:
        level, remedy = Level.PROBLEM, "too little for any run: close programs, or raise the limit"
    elif free.bytes < _AMPLE_RAM_BYTES:
        level = Level.NOTE
        remedy = "enough for small models; close programs or raise the limit for larger ones"
    else:
        level, remedy = Level.FINE, ""
    yield Finding(name="free RAM", found=found, level=level, remedy=remedy)
    if free.lockable_bytes is None:
        yield Finding(name="locked memory", found="not limited")
        return
    limit = f"{format_bytes(free.lockable_bytes)} may be locked (ulimit -l)"
    if not is_bound:
        yield Finding(name="locked memory", found=f"{limit}; this device does not count it")
    elif free.lockable_bytes < _AMPLE_LOCKED_BYTES:
        yield Finding(
            name="locked memory",
            found=limit,
            level=Level.PROBLEM,
            remedy='raise it: "* - memlock unlimited" in /etc/security/limits.conf and a new '
            "login, LimitMEMLOCK=infinity for services, --ulimit memlock=-1 for containers",
        )
    else:
        yield Finding(name="locked memory", found=limit)


def examine_directories(ssd: Paths) -> tuple[list[DirectoryReport], list[Finding]]:
    """Every SSD directory as a run would check it, and what is left in it."""
    if not ssd:
        said = "none was given: name those of a run with --ssd DIR to have them checked"
        return [], [Finding(name="SSD directories", found=said)]
    reports: list[DirectoryReport] = []
    findings: list[Finding] = []
    for path in ssd:
        try:
            reports.append(check_directory(path))
        except LohanError as error:
            findings.append(_problem(f"SSD directory {os.fspath(path)}", error))
    if len(reports) == len(ssd):
        try:
            reports = list(check_directories(ssd))
        except LohanError as error:  # one of them is given twice
            findings.append(_problem("SSD directories", error))
    named = [path for path in ssd if not _is_refused(path, findings)]
    for path, report in zip(named, reports, strict=True):
        findings.append(_directory(path, report))
    findings += _left_runs([report.path for report in reports])
    return reports, findings


def examine_profile(device: "Device", reports: Sequence[DirectoryReport]) -> Finding:
    """Whether this machine has been measured, and how long ago."""
    from lohan.measure import cache_directory, load_profile, machine_facts

    name = "profile"
    measure = (
        "a run measures what it needs first, in some seconds; `lohan profile --ssd DIR` does it now"
    )
    if not reports:
        try:
            count = len(list(cache_directory().glob("profile-*.json")))
        except LohanError as error:
            return Finding(name=name, found=str(error.what), level=Level.NOTE, remedy=error.remedy)
        return Finding(name=name, found=f"{count} kept; which one fits depends on --ssd DIR")
    loaded = load_profile(machine_facts(device, reports))
    if loaded.profile is None:
        return Finding(name=name, found=loaded.reason, level=Level.NOTE, remedy=measure)
    age = loaded.profile.age(datetime.now(UTC))
    days = max(0, age.days)
    words = "today" if not days else f"{days} day{'s' if days > 1 else ''} ago"
    return Finding(name=name, found=f"measured {words}, {loaded.reason}")


def _is_refused(path: str | os.PathLike[str], findings: Sequence[Finding]) -> bool:
    return any(one.name == f"SSD directory {os.fspath(path)}" for one in findings)


def _directory(path: str | os.PathLike[str], report: DirectoryReport) -> Finding:
    found = (
        f"{report.filesystem}, {report.access.value} I/O, {format_bytes(report.free_bytes)} free "
        f"of {format_bytes(report.total_bytes)}"
    )
    if report.warnings:
        found += f"; {'; '.join(report.warnings)}"
    return Finding(
        name=f"SSD directory {os.fspath(path)}",
        found=found,
        level=Level.NOTE if report.warnings else Level.FINE,
        remedy="a directory on a local SSD of its own, with direct I/O and room, is faster"
        if report.warnings
        else "",
    )


def _left_runs(paths: Sequence[str]) -> Iterator[Finding]:
    try:
        from lohan.store import list_left_runs

        runs = [run for run in list_left_runs(paths).runs if run.holder is None] if paths else []
    except (LohanError, ModuleNotFoundError):
        return  # a directory that cannot be looked into, and torch, have findings of their own
    if runs:
        size = format_bytes(sum(run.disk_bytes for run in runs))
        yield Finding(
            name="left runs",
            found=f"{len(runs)} with {size} on these drives",
            level=Level.NOTE,
            remedy="`lohan clean --ssd DIR` lists them and removes those you name",
        )


def _problem(name: str, error: Exception) -> Finding:
    if isinstance(error, LohanError):
        found, remedy = f"{error.what}: {error.why}", error.remedy
    else:
        found, remedy = str(error), "report this"
    return Finding(name=name, found=found, level=Level.PROBLEM, remedy=remedy)
