"""Machine: what a box can do, as facts. GPUs, RAM, links, drives, the CPU, and what they cost.

Owns the shape of these facts, their checks and their JSON form (version 1). Decides and measures
nothing: `presets.py` names machines, `measure` fills one in, `plan` and `simulate` read them. Every
rate is the one reached in practice, never the data sheet's; a drive's write rate is the one it
holds for hours.
"""

import json
import pathlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Self

from lohan.errors import ConfigError
from lohan.fields import (
    Fields,
    check_bytes,
    check_count,
    check_dollars,
    check_rate,
    check_share,
    check_text,
    check_version,
    parse_object,
)
from lohan.hardware.drive_life import LifeSource, life_in_words, one_per_drive
from lohan.units import format_bytes, format_rate

FORMAT_VERSION = 1

_RATE_EXAMPLE = '"7GB/s"'
_SIZE_EXAMPLE = '"24GiB"'
_FLOPS_EXAMPLE = "143e12"
_UPDATE_EXAMPLE = "2.5e9"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU.

    `flops_per_second` is what one block reaches in 16-bit compute inside a training step.
    `flops_per_second_by_dtype` adds the rates of other number formats as (name, rate) pairs.
    `is_processor` says that there is no GPU: the processor computes, in main memory.
    """

    name: str
    memory_bytes: int
    flops_per_second: float
    memory_bytes_per_second: float
    price_dollars: float
    flops_per_second_by_dtype: tuple[tuple[str, float], ...] = ()
    is_processor: bool = False

    def __post_init__(self) -> None:
        check_text(self.name, "gpu.name")
        check_bytes(self.memory_bytes, "gpu.memory_bytes", example=_SIZE_EXAMPLE)
        check_rate(self.flops_per_second, "gpu.flops_per_second", example=_FLOPS_EXAMPLE)
        check_rate(
            self.memory_bytes_per_second, "gpu.memory_bytes_per_second", example='"1008GB/s"'
        )
        check_dollars(self.price_dollars, "gpu.price_dollars")
        for dtype, rate in self.flops_per_second_by_dtype:
            where = f"gpu.flops_per_second_by_dtype.{dtype}"
            check_rate(rate, where, example=_FLOPS_EXAMPLE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ssd:
    """One drive. It writes at the rate it holds once its cache is full."""

    name: str
    read_bytes_per_second: float
    write_bytes_per_second: float
    capacity_bytes: int
    endurance_bytes: int
    """What may be written to it before it is worn out (the "TBW" of a data sheet)."""
    price_dollars: float
    life: LifeSource = LifeSource.STATED
    """Who says what `endurance_bytes` is."""
    used_share: float | None = None
    """Of its life, before the run, by the drive's own counter; None: not known."""

    def __post_init__(self) -> None:
        check_text(self.name, "ssd.name")
        check_rate(self.read_bytes_per_second, "ssd.read_bytes_per_second", example=_RATE_EXAMPLE)
        check_rate(self.write_bytes_per_second, "ssd.write_bytes_per_second", example='"1.7GB/s"')
        check_bytes(self.capacity_bytes, "ssd.capacity_bytes", example='"2TB"')
        check_bytes(self.endurance_bytes, "ssd.endurance_bytes", example='"1200TB"')
        check_dollars(self.price_dollars, "ssd.price_dollars")
        if self.used_share is not None:
            check_share(self.used_share, "ssd.used_share")


@dataclass(frozen=True, slots=True, kw_only=True)
class SsdPath:
    """What all drives share on the way to RAM.

    On a simplex path the drives together go in one direction at a time; on a duplex path reads and
    writes run side by side. On a pipelined path the ceilings bound the sum of the drives in each
    direction; on one that is not, the path works on a byte only after the drives have, so their
    times add up.
    """

    is_duplex: bool
    read_ceiling_bytes_per_second: float
    write_ceiling_bytes_per_second: float
    is_pipelined: bool = True

    def __post_init__(self) -> None:
        check_rate(
            self.read_ceiling_bytes_per_second,
            "ssd_path.read_ceiling_bytes_per_second",
            example=_RATE_EXAMPLE,
        )
        check_rate(
            self.write_ceiling_bytes_per_second,
            "ssd_path.write_ceiling_bytes_per_second",
            example=_RATE_EXAMPLE,
        )

    def combine(self, drives_per_second: float, ceiling_per_second: float) -> float:
        """Rate of drives and path together."""
        if self.is_pipelined:
            return min(drives_per_second, ceiling_per_second)
        return 1 / (1 / drives_per_second + 1 / ceiling_per_second)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One box of equal GPUs. The RAM-GPU rates are per GPU and hold both ways at once."""

    name: str
    gpu: Gpu
    num_gpus: int
    ram_bytes: int
    ram_to_gpu_bytes_per_second: float
    gpu_to_ram_bytes_per_second: float
    cpu_update_parameters_per_second: float
    ssds: tuple[Ssd, ...]
    ssd_path: SsdPath
    host_price_dollars: float

    def __post_init__(self) -> None:
        check_text(self.name, "machine.name")
        check_count(self.num_gpus, "machine.num_gpus")
        check_bytes(self.ram_bytes, "machine.ram_bytes", example='"64GiB"')
        for key in ("ram_to_gpu_bytes_per_second", "gpu_to_ram_bytes_per_second"):
            check_rate(getattr(self, key), f"machine.{key}", example='"21GB/s"')
        check_rate(
            self.cpu_update_parameters_per_second,
            "machine.cpu_update_parameters_per_second",
            example=_UPDATE_EXAMPLE,
        )
        check_dollars(self.host_price_dollars, "machine.host_price_dollars")
        if not self.ssds:
            raise ConfigError(
                "machine.ssds is empty",
                why="states that do not fit in RAM need at least one drive",
                remedy="list one drive or more",
            )

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
        check_count(count, "number of SSDs")
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
        gpu = _as_dict(self.gpu)
        gpu["flops_per_second_by_dtype"] = dict(self.gpu.flops_per_second_by_dtype)
        drives = [{"count": count, **_as_dict(ssd)} for ssd, count in _runs(self.ssds)]
        machine = {"version": FORMAT_VERSION, **_as_dict(self)}
        machine |= {"gpu": gpu, "ssds": drives, "ssd_path": _as_dict(self.ssd_path)}
        return json.dumps(machine, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str, *, where: str = "machine") -> Self:
        """Return the machine in a JSON text; `where` begins the paths in messages.

        Raises:
            ConfigError: for an unknown or missing key, a value that cannot be, another version.
        """
        fields = Fields(
            parse_object(text, where=where), where=where, known=("version", *_names_of(Machine))
        )
        check_version(fields, FORMAT_VERSION)
        return cls(
            name=fields.text("name"),
            gpu=_gpu_from(fields.value("gpu"), where=fields.path("gpu")),
            num_gpus=fields.count("num_gpus"),
            ram_bytes=fields.size_bytes("ram_bytes", example='"64GiB"'),
            ram_to_gpu_bytes_per_second=fields.bytes_per_second(
                "ram_to_gpu_bytes_per_second", example='"21GB/s"'
            ),
            gpu_to_ram_bytes_per_second=fields.bytes_per_second(
                "gpu_to_ram_bytes_per_second", example='"21GB/s"'
            ),
            cpu_update_parameters_per_second=fields.per_second(
                "cpu_update_parameters_per_second", example=_UPDATE_EXAMPLE
            ),
            ssds=_ssds_from(fields.objects("ssds"), where=fields.path("ssds")),
            ssd_path=_ssd_path_from(fields.value("ssd_path"), where=fields.path("ssd_path")),
            host_price_dollars=fields.dollars("host_price_dollars"),
        )

    @classmethod
    def load(cls, path: str | pathlib.Path) -> Self:
        """Return the machine in a JSON file.

        Raises:
            ConfigError: if the file cannot be read or is no machine.
        """
        try:
            text = pathlib.Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise ConfigError(
                f"the machine file {path} cannot be read",
                why=reason or str(error),
                remedy="give the path of a JSON file that describes a machine",
            ) from error
        return cls.from_json(text, where=str(path))


def _names_of(kind: type) -> tuple[str, ...]:
    return tuple(kind.__dataclass_fields__)  # type: ignore[attr-defined]


def _as_dict(record: Gpu | Ssd | SsdPath | Machine) -> dict[str, object]:
    return {name: getattr(record, name) for name in _names_of(type(record))}


def _runs(ssds: tuple[Ssd, ...]) -> list[tuple[Ssd, int]]:
    return [(ssd, len(list(same))) for ssd, same in groupby(ssds)]


def _gpu_from(found: object, *, where: str) -> Gpu:
    fields = Fields(found, where=where, known=_names_of(Gpu))
    by_dtype: list[tuple[str, float]] = []
    key = "flops_per_second_by_dtype"
    if fields.has(key):
        listed = fields.value(key)
        names = tuple(listed) if isinstance(listed, dict) else ("fp32",)
        rates = Fields(listed, where=fields.path(key), known=names)
        by_dtype = [(name, rates.per_second(name, example=_FLOPS_EXAMPLE)) for name in names]
    return Gpu(
        name=fields.text("name"),
        memory_bytes=fields.size_bytes("memory_bytes", example=_SIZE_EXAMPLE),
        flops_per_second=fields.per_second("flops_per_second", example=_FLOPS_EXAMPLE),
        memory_bytes_per_second=fields.bytes_per_second(
            "memory_bytes_per_second", example='"1008GB/s"'
        ),
        price_dollars=fields.dollars("price_dollars"),
        flops_per_second_by_dtype=tuple(by_dtype),
        is_processor=fields.truth("is_processor") if fields.has("is_processor") else False,
    )


def _ssds_from(found: list[object], *, where: str) -> tuple[Ssd, ...]:
    ssds: list[Ssd] = []
    for index, one in enumerate(found):
        fields = Fields(one, where=f"{where}[{index}]", known=("count", *_names_of(Ssd)))
        ssd = Ssd(
            name=fields.text("name"),
            read_bytes_per_second=fields.bytes_per_second(
                "read_bytes_per_second", example=_RATE_EXAMPLE
            ),
            write_bytes_per_second=fields.bytes_per_second(
                "write_bytes_per_second", example='"1.7GB/s"'
            ),
            capacity_bytes=fields.size_bytes("capacity_bytes", example='"2TB"'),
            endurance_bytes=fields.size_bytes("endurance_bytes", example='"1200TB"'),
            price_dollars=fields.dollars("price_dollars"),
            life=LifeSource(fields.one_of("life", tuple(LifeSource)))
            if fields.has("life")
            else LifeSource.STATED,
            used_share=fields.share("used_share")
            if fields.has("used_share") and fields.value("used_share") is not None
            else None,
        )
        ssds += [ssd] * (fields.count("count") if fields.has("count") else 1)
    return tuple(ssds)


def _ssd_path_from(found: object, *, where: str) -> SsdPath:
    fields = Fields(found, where=where, known=_names_of(SsdPath))
    return SsdPath(
        is_duplex=fields.truth("is_duplex"),
        read_ceiling_bytes_per_second=fields.bytes_per_second(
            "read_ceiling_bytes_per_second", example=_RATE_EXAMPLE
        ),
        write_ceiling_bytes_per_second=fields.bytes_per_second(
            "write_ceiling_bytes_per_second", example=_RATE_EXAMPLE
        ),
        is_pipelined=fields.truth("is_pipelined") if fields.has("is_pipelined") else True,
    )
