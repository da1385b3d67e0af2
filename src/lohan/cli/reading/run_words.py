"""`lohan plan` in the words of `lohan train`: a run's file, or its settings as --key value.

Owns what of a run's settings a plan needs, how each is read without TRL, and what of a run lies on
drives of this machine. What a run would
really do with its rows is `lohan train --dry-run`.
"""

import os
import pathlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from lohan.cli.reading.extra_args import read_extra_args
from lohan.engine.planning.write_limit import WriteLimit
from lohan.errors import ConfigError
from lohan.plan.plan import Plan
from lohan.plan.run_room import DriveRoom, drive_rooms, parts_of, states_uses
from lohan.train.run.disk_reservation import model_uses, out_uses
from lohan.train.run.writes import seals_in
from lohan.train.settings.adapter import AdapterSettings
from lohan.train.settings.config import Setting, written_adapter, written_settings
from lohan.train.settings.offload import read_lives, size_bytes, truth
from lohan.train.weights.model_places import local_place

_N = TypeVar("_N", int, float)
_FILE_ENDINGS = (".yaml", ".yml")
# What TRL takes where nothing is written.
_DEFAULT_BATCH = 8
_DEFAULT_SEQUENCE = 1024
_DEFAULT_SAVE_STEPS = 500
_DEFAULT_EPOCHS = 3


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
    rated_lives_bytes: tuple[int, ...] | None
    num_steps: int | None
    out: str | None
    archive_steps: int | None
    save_model_steps: int | None
    save_total_limit: int | None
    adapter: AdapterSettings | None
    write_budget_bytes: int | None
    should_chunk_loss: bool
    save_strategy: str
    save_steps: float
    num_train_epochs: float


def run_words(first: str | None, model: str | None, extra_args: list[str]) -> RunWords:
    """Read a model or a run's file, and what stands behind it.

    Raises:
        ConfigError: no model is named, or a setting is unknown or none.
    """
    path = first if first is not None and first.endswith(_FILE_ENDINGS) else None
    stray, overrides = read_extra_args(extra_args)
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
        rated_lives_bytes=read_lives(
            _value(written, "offload.ssd_rated_tbw"), "offload.ssd_rated_tbw"
        ),
        num_steps=_count(written, "max_steps"),
        out=_value(written, "out"),
        archive_steps=_count(written, "offload.archive_steps"),
        save_model_steps=_count(written, "offload.save_model_steps"),
        save_total_limit=_count(written, "save_total_limit"),
        adapter=written_adapter(written),
        write_budget_bytes=size_bytes(
            _value(written, "offload.write_budget"), "offload.write_budget"
        ),
        should_chunk_loss=truth(_value(written, "offload.chunked_loss"), "offload.chunked_loss"),
        save_strategy=str(_value(written, "save_strategy") or "steps"),
        save_steps=_number(written, "save_steps", float) or _DEFAULT_SAVE_STEPS,
        num_train_epochs=_number(written, "num_train_epochs", float) or _DEFAULT_EPOCHS,
    )


def write_limit_of(words: RunWords, num_steps: int) -> WriteLimit | None:
    """What a run of so many steps may write; None without a budget."""
    if words.write_budget_bytes is None:
        return None
    return WriteLimit(
        budget_bytes=words.write_budget_bytes,
        num_steps=num_steps,
        num_seals=seals_in(
            num_steps,
            save_strategy=words.save_strategy,
            save_steps=words.save_steps,
            num_train_epochs=words.num_train_epochs,
            others=(words.archive_steps, words.save_model_steps),
        ),
    )


def rooms_of(words: RunWords, plan: Plan) -> list[DriveRoom]:
    """What a run takes of the filesystems of this machine; nothing where its folders are not on it.

    A model on the hub is counted by `lohan train --dry-run`, which knows where it would lie.
    """
    if not words.ssd or not all(map(os.path.isdir, words.ssd)):
        return []
    uses = states_uses(parts_of(plan), words.ssd)
    path = pathlib.Path(words.model).expanduser()
    if path.is_dir():
        place = local_place(path)
        assert place is not None, "it is a directory"
        uses += model_uses(place.directory, place.gguf_file)
    if words.out is not None:
        uses += out_uses(
            str(pathlib.Path(words.out).expanduser()),
            # An adapter is written in fp32, a model in 16 bits.
            plan.shape.num_parameters
            if words.adapter is None
            else 2 * plan.shape.num_trained_parameters,
            num_steps=words.num_steps or 0,
            archive_steps=words.archive_steps,
            save_model_steps=words.save_model_steps,
            save_total_limit=words.save_total_limit,
        )
    return drive_rooms(uses)


def _value(written: Mapping[str, Setting], key: str) -> Any:
    return written[key].value if key in written else None


def _count(written: Mapping[str, Setting], key: str) -> int | None:
    """A whole number; none where none is written, or one that means "not set"."""
    number = _number(written, key, int)
    return number if number is not None and number > 0 else None


def _number(written: Mapping[str, Setting], key: str, kind: Callable[[str], _N]) -> _N | None:
    value = _value(written, key)
    if value is None:
        return None
    try:
        return kind(str(value))
    except ValueError:
        raise ConfigError(
            f"{key} is {value!r} ({written[key].origin})",
            why="a whole number is expected" if kind is int else "a number is expected",
            remedy="correct it",
        ) from None


def _size(written: Mapping[str, Setting], key: str) -> str | None:
    value = _value(written, key)
    return f"{value}B" if isinstance(value, int) else value


def _texts(written: Mapping[str, Setting], key: str) -> tuple[str, ...]:
    value = _value(written, key)
    if value is None:
        return ()
    return tuple(map(str, value)) if isinstance(value, list | tuple) else (str(value),)
