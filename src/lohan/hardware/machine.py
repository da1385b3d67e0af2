"""Machine: what a box can do, as facts. GPUs, RAM, links, drives, the CPU, and what they cost.

Owns the shape of these facts, their checks and their JSON form (version 1). Decides and measures
nothing: `machines.toml` names machines, `measure` fills one in, `plan` and `simulate` read them.
Every rate is the one reached in practice, never the data sheet's; a drive's write rate is the one
it holds for hours.
"""

import json
import pathlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Self, TypeVar

from msgspec import to_builtins

from lohan.errors import ConfigError
from lohan.fields import (
    Bytes,
    Count,
    Dollars,
    Name,
    PerSecond,
    Seconds,
    Share,
    check_fields,
    convert,
    read_json,
    read_text,
)
from lohan.hardware.drive_life import LifeSource, life_in_words, one_per_drive
from lohan.units import format_bytes, format_rate

T = TypeVar("T")
FORMAT_VERSION = 1
ASSUMED_LAUNCH_SECONDS = 25e-6
"""Of a host that was not measured: what a step took per operator where `benchmarks/host.py` ran."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU.

    `flops_per_second` is what one block reaches in 16-bit compute inside a training step.
    `flops_per_second_by_dtype` adds the rates of other number formats as (name, rate) pairs.
    `is_processor` says that there is no GPU: the processor computes, in main memory.
    """

    name: Name
    memory_bytes: Bytes
    flops_per_second: PerSecond
    memory_bytes_per_second: PerSecond
    price_dollars: Dollars
    flops_per_second_by_dtype: tuple[tuple[str, PerSecond], ...] = ()
    is_processor: bool = False

    def __post_init__(self) -> None:
        check_fields(self, "gpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ssd:
    """One drive. It writes at the rate it holds once its cache is full."""

    name: Name
    read_bytes_per_second: PerSecond
    write_bytes_per_second: PerSecond
    capacity_bytes: Bytes
    endurance_bytes: Bytes
    """What may be written to it before it is worn out (the "TBW" of a data sheet)."""
    price_dollars: Dollars
    life: LifeSource = LifeSource.STATED
    """Who says what `endurance_bytes` is."""
    used_share: Share | None = None
    """Of its life, before the run, by the drive's own counter; None: not known."""

    def __post_init__(self) -> None:
        check_fields(self, "ssd")


@dataclass(frozen=True, slots=True, kw_only=True)
class SsdPath:
    """What all drives share on the way to RAM.

    On a simplex path the drives together go in one direction at a time; on a duplex path reads and
    writes run side by side. On a pipelined path the ceilings bound the sum of the drives in each
    direction; on one that is not, the path works on a byte only after the drives have, so their
    times add up.
    """

    is_duplex: bool
    read_ceiling_bytes_per_second: PerSecond
    write_ceiling_bytes_per_second: PerSecond
    is_pipelined: bool = True

    def __post_init__(self) -> None:
        check_fields(self, "ssd_path")

    def combine(self, drives_per_second: float, ceiling_per_second: float) -> float:
        """Rate of drives and path together."""
        if self.is_pipelined:
            return min(drives_per_second, ceiling_per_second)
        return 1 / (1 / drives_per_second + 1 / ceiling_per_second)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One box of equal GPUs. The RAM-GPU rates are per GPU and hold both ways at once."""

    name: Name
    gpu: Gpu
    num_gpus: Count
    ram_bytes: Bytes
    ram_to_gpu_bytes_per_second: PerSecond
    gpu_to_ram_bytes_per_second: PerSecond
    cpu_update_parameters_per_second: PerSecond
    ssds: tuple[Ssd, ...]
    ssd_path: SsdPath
    host_price_dollars: Dollars
    peer_bytes_per_second: PerSecond | None = None
    """What one rank gets from the others, as it sends as much to them; None: through main memory,
    as fast as copies to the GPU are."""
    operator_seconds: Seconds | None = None
    """What the host needs to launch one operator of a step: Python, dispatch, the kernel's launch.
    None: not measured, `ASSUMED_LAUNCH_SECONDS`."""

    def __post_init__(self) -> None:
        check_fields(self, "machine")
        if not self.ssds:
            raise ConfigError(
                "machine.ssds is empty",
                why="states that do not fit in RAM need at least one drive",
                remedy="list one drive or more",
            )

    @property
    def launch_seconds(self) -> float:
        """What the host needs to launch one operator, measured or assumed."""
        return self.operator_seconds or ASSUMED_LAUNCH_SECONDS

    def compute_seconds(self, device_seconds: float, num_launches: float) -> float:
        """How long work takes that keeps the device so long and is launched as so many operators.

        A GPU works while the host launches what comes next: the slower of the two counts. Where the
        processor computes it does both, one after the other.
        """
        host_seconds = num_launches * self.launch_seconds
        if self.gpu.is_processor:
            return device_seconds + host_seconds
        return max(device_seconds, host_seconds)

    @property
    def ssd_read_bytes_per_second(self) -> float:
        """What all drives read together, within the path's ceiling."""
        drives = sum(ssd.read_bytes_per_second for ssd in self.ssds)
        return self.ssd_path.combine(drives, self.ssd_path.read_ceiling_bytes_per_second)

    @property
    def ssd_write_bytes_per_second(self) -> float:
        """What all drives write together for hours, within the path's ceiling."""
        drives = sum(ssd.write_bytes_per_second for ssd in self.ssds)
        return self.ssd_path.combine(drives, self.ssd_path.write_ceiling_bytes_per_second)

    @property
    def ssd_capacity_bytes(self) -> int:
        """What all drives hold together."""
        return sum(ssd.capacity_bytes for ssd in self.ssds)

    @property
    def ssd_endurance_bytes(self) -> int:
        """What may be written to all drives together before they are worn out."""
        return sum(ssd.endurance_bytes for ssd in self.ssds)

    @property
    def drives_life(self) -> str:
        """What `ssd_endurance_bytes` is, in words."""
        return life_in_words([ssd.life for ssd in self.ssds], self.drives_used_share)

    @property
    def drives_used_share(self) -> float | None:
        """What is used up of that life before the run; None where a drive does not say."""
        used = [
            ssd.endurance_bytes * ssd.used_share for ssd in self.ssds if ssd.used_share is not None
        ]
        return sum(used) / self.ssd_endurance_bytes if len(used) == len(self.ssds) else None

    @property
    def price_dollars(self) -> float:
        """The whole box: host, GPUs and drives."""
        drives = sum(ssd.price_dollars for ssd in self.ssds)
        return self.host_price_dollars + self.num_gpus * self.gpu.price_dollars + drives

    @property
    def description(self) -> str:
        """One line for a report: what is in the box."""
        drives = ", ".join(f"{count}x {ssd.name}" for ssd, count in _runs(self.ssds))
        way = "duplex" if self.ssd_path.is_duplex else "simplex"
        return (
            f"{self.num_gpus}x {self.gpu.name} ({format_bytes(self.gpu.memory_bytes)}), "
            f"{format_bytes(self.ram_bytes)} RAM, {drives} "
            f"(read {format_rate(self.ssd_read_bytes_per_second)}, "
            f"write {format_rate(self.ssd_write_bytes_per_second)}, {way})"
        )

    def with_ssds(self, count: int) -> Self:
        """Return the machine with `count` drives: its first ones, then more of the last."""
        convert(count, Count, where="number of SSDs")
        kept = self.ssds[:count]
        return replace(self, ssds=kept + (self.ssds[-1],) * (count - len(kept)))

    def with_rated_lives(self, lives_bytes: Sequence[int]) -> Self:
        """Return the machine with what its drives are rated for: one figure for each, or for all.

        Raises:
            ConfigError: there are more figures than one, and not one per drive.
        """
        lives_bytes = one_per_drive(lives_bytes, len(self.ssds))
        rated = [
            replace(ssd, endurance_bytes=nbytes, life=LifeSource.STATED)
            for ssd, nbytes in zip(self.ssds, lives_bytes, strict=True)
        ]
        return replace(self, ssds=tuple(rated))

    def of_rank(self, num_here: int, peer_bytes_per_second: float | None = None) -> Self:
        """What one of several equal ranks of this machine has: a GPU, and its share of all else."""
        rates = ("read_bytes_per_second", "write_bytes_per_second")
        sizes = ("capacity_bytes", "endurance_bytes", "price_dollars")
        ceilings = ("read_ceiling_bytes_per_second", "write_ceiling_bytes_per_second")
        gpu = self.gpu
        if gpu.is_processor:
            gpu = _share(gpu, num_here, "flops_per_second", "memory_bytes_per_second")
        shares = ("ram_bytes", "cpu_update_parameters_per_second", "host_price_dollars")
        return replace(
            _share(self, num_here, *shares),
            gpu=gpu,
            num_gpus=1,
            ssds=tuple(_share(ssd, num_here, *rates, *sizes) for ssd in self.ssds),
            ssd_path=_share(self.ssd_path, num_here, *ceilings),
            peer_bytes_per_second=peer_bytes_per_second,
        )

    def with_ram(self, ram_bytes: int) -> Self:
        """Return the machine with another RAM size."""
        return replace(self, ram_bytes=ram_bytes)

    def with_gpus(self, count: int) -> Self:
        """Return the machine with another number of GPUs."""
        return replace(self, num_gpus=count)

    def with_gpu_memory(self, memory_bytes: int) -> Self:
        """Return the machine with another memory size of each GPU."""
        return replace(self, gpu=replace(self.gpu, memory_bytes=memory_bytes))

    def to_json(self) -> str:
        """Return the machine as JSON text; equal drives in a row are written once, with a count."""
        machine = {"version": FORMAT_VERSION, **to_builtins(self)}
        machine["gpu"]["flops_per_second_by_dtype"] = dict(self.gpu.flops_per_second_by_dtype)
        for optional in ("peer_bytes_per_second", "operator_seconds"):
            if machine[optional] is None:
                del machine[optional]
        machine["ssds"] = [{"count": n, **to_builtins(ssd)} for ssd, n in _runs(self.ssds)]
        return json.dumps(machine, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str, *, where: str = "machine") -> Self:
        """Return the machine in a JSON text; `where` begins the paths in messages.

        Raises:
            ConfigError: for an unknown or missing key, a value that cannot be, another version.
        """
        file = read_json(text, MachineFile, where=where, version=FORMAT_VERSION, has_units=True)
        by_dtype = tuple(file.gpu.flops_per_second_by_dtype.items())
        ssds = [_of(Ssd, drive) for drive in file.ssds for _ in range(drive.count)]
        return _of(
            cls, file, gpu=_of(Gpu, file.gpu, flops_per_second_by_dtype=by_dtype), ssds=tuple(ssds)
        )

    @classmethod
    def load(cls, path: str | pathlib.Path) -> Self:
        """Return the machine in a JSON file.

        Raises:
            ConfigError: if the file cannot be read or is no machine.
        """
        remedy = "give the path of a JSON file that describes a machine"
        return cls.from_json(read_text(path, "the machine file", remedy=remedy), where=str(path))


@dataclass(frozen=True, slots=True, kw_only=True)
class _GpuInFile(Gpu):
    flops_per_second_by_dtype: dict[str, PerSecond] = field(default_factory=dict)  # type: ignore[assignment]


@dataclass(frozen=True, slots=True, kw_only=True)
class _SsdsInFile(Ssd):
    count: Count = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFile(Machine):
    """A machine as its file holds it."""

    gpu: _GpuInFile
    ssds: tuple[_SsdsInFile, ...]


def _of(kind: type[T], record: object, **changes: object) -> T:
    names = kind.__dataclass_fields__  # type: ignore[attr-defined]
    return kind(**{name: getattr(record, name) for name in names} | changes)


def _share(record: T, num_here: int, *names: str) -> T:
    """The record with a part of what is in these fields, whole bytes of sizes."""

    def part(name: str) -> float:
        value: float = getattr(record, name)
        return value // num_here if name.endswith("_bytes") else value / num_here

    return _of(type(record), record, **{name: part(name) for name in names})


def _runs(ssds: tuple[Ssd, ...]) -> list[tuple[Ssd, int]]:
    return [(ssd, len(list(same))) for ssd, same in groupby(ssds)]
