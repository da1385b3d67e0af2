"""The configuration of a run: one YAML file, `--key value` overrides, and where each value is from.

Owns checking and saving it. The names are TRL's and transformers' own, taken from the class of
arguments of the task, plus `OWN_HELP` and the block `offload`. Building the arguments object and
running are not its business (`arguments`, `fine_tune`).
"""

import dataclasses
import os
import pathlib
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lohan.errors import ConfigError, nearest_names
from lohan.train.settings import adapter
from lohan.train.settings.adapter import AdapterSettings, adapter_asked
from lohan.train.settings.key_aliases import our_name_for
from lohan.train.settings.offload import SETTINGS, OffloadConfig, read_offload
from lohan.train.settings.prompts import Prompt, read_prompts
from lohan.train.settings.tasks import TASKS, Task, argument_names, task_named

OWN_HELP = {
    "task": "What to train: " + ", ".join(TASKS) + ". Left out: sft.",
    "model": "Folder of a Hugging Face model, or its id on the hub. Required.",
    "data": "File of training rows: .jsonl, .json, .csv, .parquet or .txt; or a list of files. "
    "Required.",
    "eval_data": "File of rows to evaluate on; eval_strategy says when.",
    "out": "Folder for checkpoints, logs and the fine-tuned model. Required.",
    "streaming": "Read rows when they are needed, for data larger than the disk has room to copy; "
    "max_steps is then needed. For sft and pretrain.",
    "sample_prompts": "Prompts answered before and after training: texts, or a file of lines.",
}
REQUIRED = ("model", "data", "out")
# What suits runs whose steps take seconds to minutes, and logs that hide nothing.
LOHAN_DEFAULTS: dict[str, Any] = {
    "logging_steps": 1,
    "logging_first_step": True,
    "logging_nan_inf_filter": False,
    "gradient_checkpointing": False,
    "dataloader_pin_memory": False,
    "disable_tqdm": True,
}
# Arguments of SFTConfig that are ours to set, so they are no keys of the file.
_TAKEN_OVER = ("output_dir", "resume_from_checkpoint", "use_cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One value and its origin: `default`, `lohan default`, a file's name or `command line`."""

    value: Any
    origin: str


_LEFT_OUT = Setting(value=None, origin="default")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """A checked configuration."""

    model: str
    data: tuple[str, ...]
    eval_data: tuple[str, ...]
    out: str
    offload: OffloadConfig
    arguments: Mapping[str, Any]
    """Arguments of the task's class that are not its defaults."""
    sample_prompts: tuple[Prompt, ...] = ()
    task: Task = TASKS["sft"]
    is_streamed: bool = False
    adapter: AdapterSettings | None = None
    settings: Mapping[str, Setting]
    """Every setting by its dotted name, in the order of the reference."""

    def to_text(self) -> str:
        """YAML that gives the same run again, from any folder; origins stand behind the values.

        Defaults are comments: written out they would be choices, such as that of a column.
        """
        return _text_of(self.settings)


def argument_fields(task: Task = TASKS["sft"]) -> dict[str, "dataclasses.Field[Any]"]:
    """Fields of TRL's arguments of a task that may be written, by name."""
    return {
        field.name: field
        for field in dataclasses.fields(task.arguments_class())
        if field.init and field.name not in _TAKEN_OVER
    }


def load_config(
    path: str | os.PathLike[str] | None, overrides: Sequence[tuple[str, Any]] = ()
) -> TrainConfig:
    """Read a file and put the overrides over it; names may be dotted (`offload.ram`).

    Raises:
        ConfigError: the file cannot be read, or a name or value is not valid.
    """
    return checked_config(read_settings(path, overrides))


def read_settings(
    path: str | os.PathLike[str] | None, overrides: Sequence[tuple[str, Any]] = ()
) -> dict[str, Setting]:
    """What is written about a run, complete as far as can be told without TRL, and so at once.

    Raises:
        ConfigError: the file cannot be read, a name is unknown or missing, a size is none.
    """
    written = written_settings(path, overrides)
    for key in REQUIRED:
        if key not in written or written[key].value in (None, "", []):
            raise ConfigError(
                f'"{key}" is missing',
                why=OWN_HELP[key].removesuffix(" Required."),
                remedy=f"give it with --{key}, or write {key}: ... in the file",
            )
    _offload_of(written)
    return written


def written_settings(
    path: str | os.PathLike[str] | None, overrides: Sequence[tuple[str, Any]] = ()
) -> dict[str, Setting]:
    """What is written in a file and, over it, on the command line; no more and no less.

    Raises:
        ConfigError: the file cannot be read, or a name is unknown.
    """
    from_file = {} if path is None else _read_file(pathlib.Path(path))
    origin = "" if path is None else str(path)
    written: dict[str, Setting] = {}
    for key, value in _flat(from_file, origin or "the configuration"):
        written[key] = Setting(value=value, origin=origin)
    for key, value in overrides:
        written[key] = Setting(value=value, origin="command line")
    _refuse_unknown(written)
    return written


def _read_file(path: pathlib.Path) -> dict[str, Any]:
    """What is written in a file, by key.

    Raises:
        ConfigError: it cannot be read, or is not YAML.
    """
    import yaml

    remedy = "correct the file, or leave it out and give everything with --key value"
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(
            f"there is no file {path}", why="the configuration is read from it", remedy=remedy
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read", why=str(error), remedy=remedy) from error
    try:
        found = yaml.load(text, Loader=_strict_loader())
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigError(
            f"{path} is not YAML", why=" ".join(str(error).split()), remedy=remedy
        ) from error
    if found is None:
        return {}
    if not isinstance(found, dict):
        why = "lines of the form key: value are expected"
        raise ConfigError(f"{path} holds no settings", why=why, remedy=remedy)
    return found


def _strict_loader() -> Any:
    """YAML without Python objects, and without a key that silently wins over its twin."""
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            own = (key for key, _ in node.value if not key.tag.endswith(":merge"))
            keys = [self.construct_object(key, deep=True) for key in own]
            for key in keys:
                if keys.count(key) > 1:
                    raise yaml.constructor.ConstructorError(
                        None, None, f'the key "{key}" is written twice', node.start_mark
                    )
            found: dict[Any, Any] = super().construct_mapping(node, deep)
            return found

    return Loader


def check_places(written: Mapping[str, Setting]) -> None:
    """Refuse paths that lead nowhere before anything long is imported; nothing is made or kept.

    Raises:
        ConfigError: there is no such model or file of rows.
        StorageError: an SSD directory cannot be used.
    """
    from lohan.ssd import check_directories
    from lohan.train.data.row_files import check_file, refuse_other_bytes
    from lohan.train.weights.model_places import local_place

    ssd = _offload_of(written).ssd
    for path in (_text(written["model"], "model"), _text(written["out"], "out"), *ssd):
        refuse_other_bytes(path)
    local_place(_text(written["model"], "model"))
    for key in ("data", "eval_data"):
        for path in _paths(written[key], key) if key in written else ():
            check_file(pathlib.Path(path))
    check_directories(ssd)


def checked_config(written: Mapping[str, Setting]) -> TrainConfig:
    """The configuration that was written, each value brought to its type, with all defaults.

    Raises:
        ConfigError: a value is not valid.
    """
    task = _task_of(written)
    fields = argument_fields(task)
    own_defaults = {**LOHAN_DEFAULTS, **task.defaults}
    arguments = {}
    settings: dict[str, Setting] = {}
    for key in OWN_HELP:
        settings[key] = written.get(key, _LEFT_OUT)
        settings[key] = settings[key] if key == "task" else _placed(settings[key])
    places = _offload_of(written)
    for key, place in SETTINGS.items():
        value = getattr(places, place.name)
        value = list(value) if isinstance(value, tuple) else value
        name = f"offload.{key}"
        found = written[name].origin if name in written else "default"
        settings[name] = Setting(value=value, origin=found)
    for name, field in {**adapter.FIELDS, **fields}.items():
        if name in written:
            value = _coerced(name, written[name], field.type)
            settings[name] = Setting(value=value, origin=written[name].origin)
            arguments[name] = value
        elif name == "per_device_eval_batch_size":
            # The plan is made for training batches; larger ones might not fit.
            arguments[name] = arguments.get("per_device_train_batch_size", _default_of(field))
            settings[name] = Setting(value=arguments[name], origin="as per_device_train_batch_size")
        elif name in own_defaults:
            arguments[name] = own_defaults[name]
            settings[name] = Setting(value=own_defaults[name], origin="lohan default")
        else:
            settings[name] = Setting(value=_default_of(field), origin="default")
    return TrainConfig(
        model=_text(written["model"], "model"),
        data=_paths(written["data"], "data"),
        eval_data=_paths(written["eval_data"], "eval_data") if "eval_data" in written else (),
        out=os.path.abspath(os.path.expanduser(_text(written["out"], "out"))),
        offload=places,
        arguments={name: one for name, one in arguments.items() if name in fields},
        adapter=adapter_asked(arguments),
        sample_prompts=read_prompts(settings["sample_prompts"].value),
        task=task,
        is_streamed=bool(_coerced("streaming", settings["streaming"], bool | None)),
        settings=settings,
    )


def written_adapter(written: Mapping[str, Setting]) -> AdapterSettings | None:
    """The adapter that is written, for plans, which are made without TRL's arguments.

    Raises:
        ConfigError: a value is not valid.
    """
    given = {name: written[name] for name in adapter.FIELDS if name in written}
    return adapter_asked({k: _coerced(k, one, adapter.FIELDS[k].type) for k, one in given.items()})


def _placed(setting: Setting) -> Setting:
    """A setting whose paths lead there from any folder; hub ids and what is not there stay."""
    value = setting.value
    if isinstance(value, list | tuple):
        inner = [_placed(Setting(value=one, origin="")).value for one in value]
        return Setting(value=inner, origin=setting.origin)
    place = os.path.expanduser(value) if isinstance(value, str | os.PathLike) else ""
    return (
        Setting(value=os.path.abspath(place), origin=setting.origin)
        if os.path.exists(place)
        else setting
    )


def _task_of(written: Mapping[str, Setting]) -> Task:
    found = written.get("task", _LEFT_OUT)
    return TASKS["sft"] if found.value is None else task_named(found.value, found.origin)


def _offload_of(written: Mapping[str, Setting]) -> OffloadConfig:
    block = {
        key.removeprefix("offload."): one.value
        for key, one in written.items()
        if key.startswith("offload.")
    }
    return read_offload(block, where="offload")


def _flat(found: Mapping[str, Any], where: str) -> list[tuple[str, Any]]:
    flat: list[tuple[str, Any]] = []
    for key, value in found.items():
        if key != "offload":
            flat.append((str(key), value))
            continue
        if not isinstance(value, Mapping):
            read_offload(value, where=f"{where}: offload")
        flat.extend((f"offload.{inner}", one) for inner, one in value.items())
    return flat


def _refuse_unknown(written: Mapping[str, Setting]) -> None:
    if not written:
        return  # so that no package is looked for that planning does without
    task = _task_of(written)
    names = argument_names(*task.arguments) or argument_fields(task).keys()
    arguments = sorted(names - set(_TAKEN_OVER))
    known = [*OWN_HELP, *adapter.FIELDS, *arguments, *(f"offload.{key}" for key in SETTINGS)]
    for key, setting in written.items():
        if key in known:
            continue
        hint, near = our_name_for(key.removeprefix("offload.")), nearest_names(key, known)
        raise ConfigError(
            f'unknown key "{key}" ({setting.origin})',
            why="a key that is not known would be without effect",
            remedy=_told(hint) if hint else near if not near.startswith("write one of")
            else "see docs/configuration.md for every key",
        )  # fmt: skip


def _told(hint: str) -> str:
    is_nothing, _, reason = hint.partition("nothing: ")
    return f"leave it out: {reason}" if not is_nothing and reason else f"write {hint}"


def _coerced(name: str, setting: Setting, kind: Any) -> Any:
    """Bring a value to the type of its field: YAML reads 2e-5 as a text, the command line all."""
    from pydantic import PydanticUserError, TypeAdapter, ValidationError

    value = setting.value
    can_stand_alone = kind is bool or bool in typing.get_args(kind)
    if value is True and setting.origin == "command line" and not can_stand_alone:
        raise ConfigError(
            f"--{name} has no value",
            why=f"{_kind_name(kind)} is expected; only what is on or off can stand alone",
            remedy=f"write --{name} and its value",
        )
    if setting.origin == "command line" and isinstance(value, str):
        value = _as_yaml(value)
    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        reasons = dict.fromkeys(str(one["msg"]) for one in error.errors())
        raise ConfigError(
            f"{name} is {setting.value!r} ({setting.origin})",
            why="; or ".join(reasons).lower(),
            remedy=f"correct it: {_kind_name(kind)} is expected",
        ) from error
    except PydanticUserError:  # a type of another library, such as a parallelism plan
        return value


def _as_yaml(text: str) -> Any:
    import yaml

    try:
        found = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError):
        return text
    # Only what a text cannot say by itself; numbers and truths are read by their field's type.
    return found if isinstance(found, dict | list) or found is None else text


def _kind_name(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) else str(kind).replace("typing.", "")


def _default_of(field: "dataclasses.Field[Any]") -> Any:
    if field.default is not dataclasses.MISSING:
        return getattr(field.default, "value", field.default)
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else None


def _text(setting: Setting, key: str) -> str:
    if not isinstance(setting.value, str | os.PathLike):
        raise ConfigError(
            f"{key} is {setting.value!r} ({setting.origin})",
            why="a text is expected",
            remedy=f"write one path or name for {key}",
        )
    return os.fspath(setting.value)


def _paths(setting: Setting, key: str) -> tuple[str, ...]:
    value = setting.value
    if value is None:
        return ()
    found = list(value) if isinstance(value, list | tuple) else [value]
    return tuple(_text(Setting(value=one, origin=setting.origin), key) for one in found)


def _text_of(settings: Mapping[str, Setting]) -> str:
    import yaml

    lines = []
    is_in_block = False
    for name, setting in settings.items():
        if name.startswith("offload.") and not is_in_block:
            lines.append("offload:")
            is_in_block = True
        value = getattr(setting.value, "value", setting.value)
        origin = setting.origin
        if name == "hub_token" and value:
            value, origin = None, f"{origin}, hidden"
        shown = yaml.safe_dump(value, default_flow_style=True, width=10**6).strip()
        shown = shown.removesuffix("...").strip()
        indent = "  " if name.startswith("offload.") else ""
        mark = "# " if origin == "default" else ""
        lines.append(f"{indent}{mark}{name.removeprefix('offload.')}: {shown}  # {origin}")
    return "\n".join(lines) + "\n"
