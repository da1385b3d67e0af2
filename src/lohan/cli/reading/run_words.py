"""`lohan plan` in the words of `lohan train`: a run's file, or its settings as --key value.

Owns what of a run's settings a plan needs, and how each is read without TRL. What a run would
really do with its rows is `lohan train --dry-run`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lohan.cli.reading.free_words import read_words
from lohan.errors import ConfigError
from lohan.train.settings.config import Setting, written_settings

_FILE_ENDINGS = (".yaml", ".yml")
# What TRL takes where nothing is written.
_DEFAULT_BATCH = 8
_DEFAULT_SEQUENCE = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class RunWords:
    """What is written about a run; None: nothing is."""

    model: str
    batch: int
    sequence: int | None
    clip: bool | None
    ram: str | None
    gpu: str | None
    ssd: tuple[str, ...]
    machine: str | None
    num_steps: int | None


def run_words(first: str | None, model: str | None, extra_args: list[str]) -> RunWords:
    """Read a model or a run's file, and what stands behind it.

    Raises:
        ConfigError: no model is named, or a setting is unknown or none.
    """
    path = first if first is not None and first.endswith(_FILE_ENDINGS) else None
    stray, overrides = read_words(extra_args)
    if stray is not None:
        raise ConfigError(
            f'"{stray}" stands alone',
            why="one model or one file of a run is planned at a time",
            remedy="put --key before it, or leave it out",
        )
    written = written_settings(path, overrides)
    named = model or (first if path is None else None) or _value(written, "model")
    if not named:
        raise ConfigError(
            "no model is given",
            why="a plan is made for a model",
            remedy="name one: lohan plan llama-3.1-8b, lohan plan --model DIR, lohan plan run.yaml",
        )
    micro_batch = _count(written, "per_device_train_batch_size") or _DEFAULT_BATCH
    sequence = _count(written, "max_length")
    if sequence is None and path is not None:
        sequence = _DEFAULT_SEQUENCE
    norm = _value(written, "max_grad_norm")
    return RunWords(
        model=str(named),
        batch=micro_batch * (_count(written, "gradient_accumulation_steps") or 1),
        sequence=sequence,
        clip=None if norm is None else float(norm) > 0,
        ram=_size(written, "offload.ram"),
        gpu=_size(written, "offload.gpu"),
        ssd=_texts(written, "offload.ssd"),
        machine=_value(written, "offload.machine"),
        num_steps=_count(written, "max_steps"),
    )


def _value(written: Mapping[str, Setting], key: str) -> Any:
    return written[key].value if key in written else None


def _count(written: Mapping[str, Setting], key: str) -> int | None:
    """A whole number; none where none is written, or one that means "not set"."""
    value = _value(written, key)
    if value is None:
        return None
    try:
        number = int(str(value))
    except ValueError:
        raise ConfigError(
            f"{key} is {value!r} ({written[key].origin})",
            why="a whole number is expected",
            remedy="correct it",
        ) from None
    return number if number > 0 else None


def _size(written: Mapping[str, Setting], key: str) -> str | None:
    value = _value(written, key)
    return f"{value}B" if isinstance(value, int) else value


def _texts(written: Mapping[str, Setting], key: str) -> tuple[str, ...]:
    value = _value(written, key)
    if value is None:
        return ()
    return tuple(map(str, value)) if isinstance(value, list | tuple) else (str(value),)
