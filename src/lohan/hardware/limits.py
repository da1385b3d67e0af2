"""How much main memory this process may still take, and what says so.

Owns the question and its sources: what the kernel calls available, the memory limits of every
cgroup above this process (both versions), the process's own limits, and locked memory where a
device counts it. Reads `/proc` and the cgroup filesystem only; allocates (but for one page run in
`is_bound_by_locking`) and decides nothing. Called by whoever needs a RAM budget that was not given.
"""

import contextlib
import ctypes
import mmap
import pathlib
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from lohan.errors import HardwareError, LohanError
from lohan.hardware.this_host import sizes_in, text_of
from lohan.units import KIB, MIB, format_bytes

# Version 1 writes "no limit" as the largest multiple of a page below 2**63.
_NO_LIMIT_BYTES = 2**62
_LOCKING_CAPABILITY = 14  # CAP_IPC_LOCK
_PROBED_BYTES = MIB
_PROBED_LIMIT_BYTES = 64 * KIB


@dataclass(frozen=True, slots=True, kw_only=True)
class AvailableRam:
    """What may still be taken, and which source is the tightest."""

    bytes: int
    reason: str
    """In words for the user, with the numbers."""
    lockable_bytes: int | None = None
    """What may still be locked in place; None where nothing bounds it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bound:
    available_bytes: int
    reason: str


class Pinner(Protocol):
    """Something that locks main memory in place, such as a device."""

    def pin(self, address: int, nbytes: int) -> None:
        """Lock a range of main memory."""

    def unpin(self, address: int) -> None:
        """Undo `pin`."""


def available_ram_bytes(
    *, counts_locked: bool = False, root: str | pathlib.Path = "/"
) -> AvailableRam:
    """Return how much main memory this process can still take without swapping or being killed.

    What this process holds already is not part of it. File pages that can be dropped count as
    available, in a cgroup too.

    Args:
        counts_locked: the memory will be locked, and whoever locks it keeps to the limit of locked
            memory (`is_bound_by_locking` tells).
        root: where `proc` and `sys` are mounted; another one in tests.

    Raises:
        HardwareError: the kernel does not say how much memory there is.
    """
    root = pathlib.Path(root)
    bounds = [_of_the_machine(root), *_of_cgroups(root), *_of_the_process(root)]
    lockable_bytes = _lockable_bytes(root)
    if counts_locked and lockable_bytes is not None:
        said = f"{format_bytes(lockable_bytes)} may still be locked (ulimit -l)"
        bounds.append(_Bound(available_bytes=lockable_bytes, reason=said))
    tightest = min(bounds, key=lambda bound: bound.available_bytes)
    return AvailableRam(
        bytes=tightest.available_bytes, reason=tightest.reason, lockable_bytes=lockable_bytes
    )


def is_bound_by_locking(pinner: Pinner) -> bool:
    """Return whether what this device pins counts against the limit of locked memory.

    Drivers differ: some lock pages without asking. So some memory is pinned under the limit as it
    is, and again with the soft limit lowered for a moment to less than that. Where the first fails
    already, nothing can be pinned and no limit says how much. Runs on: the caller, while nothing
    else locks memory. May block: no.
    """
    with mmap.mmap(-1, _PROBED_BYTES) as memory, memoryview(memory) as view:
        address = ctypes.addressof(ctypes.c_char.from_buffer(view))
        if not _can_pin(pinner, address):
            return False
        with _lowered_limit(_PROBED_LIMIT_BYTES):
            return not _can_pin(pinner, address)


def _can_pin(pinner: Pinner, address: int) -> bool:
    try:
        pinner.pin(address, _PROBED_BYTES)
    except LohanError:
        return False
    pinner.unpin(address)
    return True


@contextlib.contextmanager
def _lowered_limit(limit_bytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    is_lower = soft == resource.RLIM_INFINITY or soft > limit_bytes
    if is_lower:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (limit_bytes, hard))
    try:
        yield
    finally:
        if is_lower:
            resource.setrlimit(resource.RLIMIT_MEMLOCK, (soft, hard))


# The machine ---------------------------------------------------------------------------------


def _of_the_machine(root: pathlib.Path) -> _Bound:
    path = root / "proc/meminfo"
    sizes = sizes_in(path)
    available_bytes = sizes.get("MemAvailable")
    if available_bytes is None:
        raise HardwareError(
            f"{path} does not say how much memory is available",
            why="without it a RAM budget would be a guess",
            remedy='give the budget yourself, such as ram="16GiB"',
        )
    total = sizes.get("MemTotal")
    of = f" of {format_bytes(total)}" if total is not None else ""
    return _Bound(
        available_bytes=available_bytes,
        reason=f"{format_bytes(available_bytes)}{of} of RAM are available",
    )


# Control groups ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Files:
    """What one version of control groups calls its files."""

    limits: tuple[str, ...]
    usage: str
    droppable: tuple[str, ...]
    """Lines of memory.stat with file pages the kernel can drop."""


_VERSION_1 = _Files(
    limits=("memory.limit_in_bytes",),
    usage="memory.usage_in_bytes",
    droppable=("total_inactive_file", "total_active_file"),
)
# Above memory.high a group is slowed down until it crawls: as bad as the limit itself.
_VERSION_2 = _Files(
    limits=("memory.max", "memory.high"),
    usage="memory.current",
    droppable=("inactive_file", "active_file"),
)


def _of_cgroups(root: pathlib.Path) -> Iterator[_Bound]:
    """A bound for every group with a limit, from the one of this process up to the top."""
    for line in text_of(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        mount, kind = before.split(), after.split()
        if len(mount) < 5 or not kind or kind[0] not in ("cgroup", "cgroup2"):
            continue
        is_second = kind[0] == "cgroup2"
        if not is_second and (len(kind) < 3 or "memory" not in kind[2].split(",")):
            continue
        place = _place_in(root, is_second)
        if place is None:
            continue
        top = root / mount[4].lstrip("/")
        # Inside a container the mount may show a part of the tree; what is above it is not ours
        # to see, and its kernel-side limits show in MemAvailable or not at all.
        shown = mount[3].rstrip("/")
        inside = place[len(shown) :] if (place + "/").startswith(shown + "/") else ""
        group = top / inside.lstrip("/")
        files = _VERSION_2 if is_second else _VERSION_1
        for directory in (group, *group.parents):
            bound = _of_group(directory, files)
            if bound is not None:
                yield bound
            if directory == top:
                break


def _place_in(root: pathlib.Path, is_second: bool) -> str | None:
    """Path of this process's group in the hierarchy that counts memory."""
    for line in text_of(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if is_second and number == "0" and not controllers:
            return path
        if not is_second and "memory" in controllers.split(","):
            return path
    return None


def _of_group(directory: pathlib.Path, files: _Files) -> _Bound | None:
    limits = [_number_in(directory / name) for name in files.limits]
    known = [limit for limit in limits if limit is not None and limit < _NO_LIMIT_BYTES]
    usage_bytes = _number_in(directory / files.usage)
    if not known or usage_bytes is None:
        return None
    limit_bytes = min(known)
    droppable = 0
    for line in text_of(directory / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name in files.droppable and value.strip().isdigit():
            droppable += int(value)
    held_bytes = max(0, usage_bytes - droppable)
    available_bytes = max(0, limit_bytes - held_bytes)
    return _Bound(
        available_bytes=available_bytes,
        reason=f"the memory limit of cgroup {directory} is {format_bytes(limit_bytes)}, "
        f"{format_bytes(held_bytes)} of it in use",
    )


def _number_in(path: pathlib.Path) -> int | None:
    text = text_of(path).strip()
    return int(text) if text.isdigit() else None


# The process ---------------------------------------------------------------------------------


def _soft_limits(root: pathlib.Path) -> dict[str, int]:
    limits = {}
    for line in text_of(root / "proc/self/limits").splitlines():
        # Columns are padded: the name has 25 characters and single blanks inside.
        name, words = line[:25].strip(), line[25:].split()
        if words and words[0].isdigit():
            limits[name] = int(words[0])
    return limits


def _of_the_process(root: pathlib.Path) -> Iterator[_Bound]:
    limits, held = _soft_limits(root), sizes_in(root / "proc/self/status")
    for name, used, option in (
        ("Max address space", "VmSize", "-v"),
        ("Max data size", "VmData", "-d"),
    ):
        if name in limits:
            available_bytes = max(0, limits[name] - held.get(used, 0))
            said = f"{name[4:]} is limited to {format_bytes(limits[name])} (ulimit {option})"
            yield _Bound(available_bytes=available_bytes, reason=said)


def _lockable_bytes(root: pathlib.Path) -> int | None:
    limit_bytes = _soft_limits(root).get("Max locked memory")
    if limit_bytes is None:
        return None
    for line in text_of(root / "proc/self/status").splitlines():
        name, _, value = line.partition(":")
        if name == "CapEff" and int(value.strip() or "0", 16) >> _LOCKING_CAPABILITY & 1:
            return None
    locked = sizes_in(root / "proc/self/status").get("VmLck", 0)
    return max(0, limit_bytes - locked)
