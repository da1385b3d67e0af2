"""The `offload:` block: the few settings that are lohan's own.

Owns their names, meanings, checks and how they reach the engine. Everything else about a run is an
argument of TRL or transformers, under its own name. Used by `config` and by the trainers.
"""

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from lohan.errors import ConfigError, nearest_names
from lohan.units import parse_bytes

# A bare number below this was meant in another unit than bytes.
_LEAST_BARE_BYTES = 2**16


def _name(found: Any, where: str, *, example: str) -> str | None:
    if not isinstance(found, str | None):
        raise ConfigError(
            f"{where} is {found!r}",
            why=f"a {where.rpartition('.')[2]} is named by a text",
            remedy=f"write {example}, or leave it out",
        )
    return found


def _directories(found: Any, where: str) -> tuple[str, ...]:
    if isinstance(found, str | os.PathLike):
        found = [found]
    is_list = isinstance(found, Sequence) and all(isinstance(d, str | os.PathLike) for d in found)
    if not is_list or not found:
        raise ConfigError(
            f"{where} is missing" if not found else f"{where} is {found!r}",
            why="the states of the model live there: 12 bytes per parameter and more",
            remedy="give a directory on an SSD with --ssd DIR, once for each drive",
        )
    paths = tuple(os.path.abspath(os.path.expanduser(os.fspath(directory))) for directory in found)
    for number, path in enumerate(paths):
        if path in paths[:number]:
            raise ConfigError(
                f"{where} names {path} twice",
                why="striping over one directory twice only splits its files",
                remedy="give each drive once",
            )
    return paths


def size_bytes(found: Any, where: str, *, unit: str = "GiB") -> int | None:
    """A size as it is written. Raises ConfigError."""
    if found is None:
        return None
    given = str(found).strip()
    if given.isdigit() and 0 < int(given) < _LEAST_BARE_BYTES:
        raise ConfigError(
            f"{where} is {given}, without a unit",
            why="that would be bytes, and nothing can be trained with so few",
            remedy=f"write the unit: {given}{unit}",
        )
    if isinstance(found, str):
        try:
            found = parse_bytes(found)
        except ConfigError as error:
            raise ConfigError(
                f"{where}: {error.what}", why=error.why, remedy=error.remedy
            ) from error
    if isinstance(found, bool) or not isinstance(found, int) or found <= 0:
        raise ConfigError(
            f"{where} is {found!r}",
            why="a size is a whole number of bytes above zero, or a text with a unit",
            remedy="write a size such as 48GiB",
        )
    return found


def read_lives(found: Any, where: str) -> tuple[int, ...] | None:
    """Rated lives in bytes, of one drive or of several; None where none is written.

    Raises:
        ConfigError: one is not valid.
    """
    listed = found if isinstance(found, list | tuple) else [found]
    lives = [size_bytes(one, where, unit="TB") for one in listed]
    return tuple(one for one in lives if one is not None) or None


def _count(found: Any, where: str, *, what: str = "optimizer steps") -> int | None:
    if found is None:
        return None
    if isinstance(found, str) and found.strip().isdigit():
        found = int(found)
    if isinstance(found, bool) or not isinstance(found, int) or found < 1:
        raise ConfigError(
            f"{where} is {found!r}",
            why=f"a number of {what} is a whole number above zero",
            remedy="write a number such as 500, or leave it out",
        )
    return found


def truth(found: Any, where: str) -> bool:
    """A setting that is on or off. Raises ConfigError."""
    if found is None or isinstance(found, bool):
        return bool(found)
    if isinstance(found, str) and found.lower() in ("true", "false"):
        return found.lower() == "true"
    raise ConfigError(f"{where} is {found!r}", why="it is on or off", remedy="write true or false")


def _setting(
    read: Callable[[Any, str], Any], meaning: str, *, key: str | None = None, default: Any = None
) -> Any:
    """A setting: how what is written is checked (it, and where it stands), and what it means.

    Args:
        key: what it is called where it is written, if not as the field.
    """
    facts = {"read": read, "meaning": meaning, "key": key}
    return dataclasses.field(default=default, metadata=facts)


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadConfig:
    """Where states go and how much of the machine may be used; sizes are in bytes."""

    ssd: tuple[str, ...] = _setting(
        _directories,
        "SSD directory, or a list of them: the states are striped over all. Required.",
        default=dataclasses.MISSING,
    )
    ram: int | None = _setting(
        size_bytes, "Budget of main memory, such as 48GiB. Left out: what is free."
    )
    gpu: int | None = _setting(
        size_bytes, "Budget of GPU memory, such as 20GiB. Left out: what is free."
    )
    device: str | None = _setting(
        partial(_name, example="cuda, cuda:0, cpu or emulated"),
        "cuda, cuda:0, cpu or emulated. Left out: a GPU if there is one.",
    )
    machine: str | None = _setting(
        partial(_name, example="workstation-4090 or machine.json"),
        "Rates to plan with: a preset (lohan machines) or a file (lohan profile --out). "
        "Nothing is then measured. Left out: this machine, measured once and remembered; its "
        "drives only if steps use them, with 2 GiB of writes at most.",
    )
    write_budget: int | None = _setting(
        size_bytes,
        "Most the whole run may write to the SSDs, such as 300TB. The plan keeps to it, or the "
        "run is refused with the numbers before anything is written; a run that writes more than "
        "predicted seals and stops before it passes it. Left out: no limit.",
    )
    ssd_rated_bytes: tuple[int, ...] | None = _setting(
        read_lives,
        "What a drive may be written with by its data sheet (TBW), such as 1200TB, or a list with "
        "one per directory. Shares of the drives' life are of this. Left out: worked out from the "
        "drive's own wear counter where it can be read, else 600 times what it holds, and then "
        "called assumed.",
        key="ssd_rated_tbw",
    )
    archive_steps: int | None = _setting(
        _count,
        "Optimizer steps between complete copies (weights, masters and moments) in "
        "OUT/checkpoint-N, from which another machine can resume. Left out: none.",
    )
    save_model_steps: int | None = _setting(
        _count,
        "Optimizer steps between models, or adapters, that stay in OUT/checkpoint-N for "
        "from_pretrained, as many as save_total_limit says. Left out: none.",
    )
    reduction_groups: int | None = _setting(
        partial(_count, what="reduction groups"),
        "Groups that a step's micro-batches are dealt to, whose gradients are added in fp32. "
        "Results depend on this number and not on that of ranks (docs/ranks.md). Left out: one "
        "per rank, or as the run was started with.",
    )
    should_chunk_loss: bool = _setting(
        truth,
        "Compute the loss of a language model in chunks where its logits would need most of the "
        "GPU's memory. Equal bits on the processor; on a GPU last bits may differ. Left out: "
        "logits as a whole.",
        key="chunked_loss",
        default=False,
    )
    is_tracing: bool = _setting(
        truth,
        "Record the lanes of the last steps in OUT/_lohan/trace.json, for Perfetto and the report.",
        key="trace",
        default=False,
    )


SETTINGS = {one.metadata["key"] or one.name: one for one in dataclasses.fields(OffloadConfig)}
"""The fields by the keys that are written for them."""


def read_offload(found: Mapping[str, Any] | OffloadConfig, *, where: str) -> OffloadConfig:
    """Check an `offload` block as written in a file, on the command line or in code.

    Raises:
        ConfigError: a key is unknown, a value is not valid, or `ssd` is missing.
    """
    if isinstance(found, OffloadConfig):
        return found
    if not isinstance(found, Mapping):
        raise ConfigError(
            f"{where} is {found!r}",
            why="a block of settings is expected",
            remedy="write offload: and below it, indented, ssd: DIRECTORY",
        )
    for key in found:
        if key not in SETTINGS:
            raise ConfigError(
                f'{where} has the unknown key "{key}"',
                why="a key that is not known would be without effect",
                remedy=nearest_names(str(key), SETTINGS),
            )
    values = {
        one.name: one.metadata["read"](found.get(key), f"{where}.{key}")
        for key, one in SETTINGS.items()
    }
    return OffloadConfig(**values)
