"""The configuration reference, made from the settings themselves.

Owns the text of docs/configuration.md. What a training argument means is told by TRL and
transformers, whose documentation is named. Called by `write_configuration_reference` and its test.
"""

import dataclasses
import re
from typing import Any

from lohan.train.settings.adapter import FIELDS as ADAPTER_FIELDS
from lohan.train.settings.adapter import HELP as ADAPTER_HELP
from lohan.train.settings.arguments import HAVE_NO_EFFECT, REFUSED_ARGUMENTS
from lohan.train.settings.config import LOHAN_DEFAULTS, OWN_HELP, argument_fields
from lohan.train.settings.offload import SETTINGS as OFFLOAD
from lohan.train.settings.tasks import TASKS

_HEAD = """\
# Configuration

This page is made from the code by `scripts/write_configuration_reference`; do not edit it.

A run is described by a YAML file, by `--key value` on the command line, or by both; the command
line wins. `lohan train run.yaml --learning_rate 1e-5 --offload.ram 48GiB --print-config` prints
every setting with where it came from and trains nothing; the same text is saved as
`OUT/_lohan/lohan.yaml` and can be used as a file again.

A key that is not listed here is refused with the nearest name. Spellings of DeepSpeed, Axolotl
and LLaMA-Factory are known and answered with the name to write here.
"""


def reference_text() -> str:
    """The whole document."""
    parts = [_HEAD, _own_part(), _task_part(), _offload_part(), _adapter_part()]
    parts += [_argument_part(), _more_part(), _refused_part()]
    return "\n".join(parts)


def _own_part() -> str:
    lines = ["## What to train on what", "", "| key | meaning |", "|---|---|"]
    lines += [f"| `{name}` | {_cell(text)} |" for name, text in OWN_HELP.items()]
    return "\n".join(lines) + "\n"


def _task_part() -> str:
    lines = ["## Tasks", "", "| task | what it trains on | arguments of TRL |", "|---|---|---|"]
    for task in TASKS.values():
        defaults = ", ".join(f"`{name}: {_shown(one)}`" for name, one in task.defaults.items())
        arguments = f"`{task.arguments[1]}`" + (f" with {defaults}" if defaults else "")
        lines.append(f"| `{task.name}` | {_cell(task.meaning)} | {arguments} |")
    return "\n".join(lines) + "\n"


def _offload_part() -> str:
    lines = ["## The block `offload`", "", "| key | default | meaning |", "|---|---|---|"]
    for name, setting in OFFLOAD.items():
        default = {"ssd": "required", "trace": "`false`"}.get(name, "`null`")
        lines.append(f"| `offload.{name}` | {default} | {_cell(setting.metadata['meaning'])} |")
    return "\n".join(lines) + "\n"


def _adapter_part() -> str:
    lines = [
        "## An adapter instead of the whole model",
        "",
        "Names and defaults are those of TRL's `ModelConfig`; training.md says what is trained.",
        "",
        "| key | default | meaning |",
        "|---|---|---|",
    ]
    for name, text in ADAPTER_HELP.items():
        lines.append(f"| `{name}` | `{_shown(_default(ADAPTER_FIELDS[name]))}` | {_cell(text)} |")
    return "\n".join(lines) + "\n"


def _argument_part() -> str:
    lines = [
        "## Training arguments",
        "",
        "Every argument of TRL's `SFTConfig`, and so of transformers' `TrainingArguments`, under",
        "its own name; their documentation says what each one does. Defaults in bold are lohan's.",
        "",
        "| key | type | default |",
        "|---|---|---|",
    ]
    lines += [_argument_row(name, field) for name, field in argument_fields().items()]
    return "\n".join(lines) + "\n"


def _more_part() -> str:
    """What other tasks have besides, or with another default."""
    known = argument_fields()
    lines = [
        "## Arguments of other tasks",
        "",
        "What a task has besides those of `SFTConfig`, or with another default. Of those above it",
        "has not all: what is about packing and which tokens count is of `sft` and `pretrain`.",
        "",
        "| task | key | type | default |",
        "|---|---|---|---|",
    ]
    for task in TASKS.values():
        for name, field in argument_fields(task).items():
            if name not in known or _default(known[name]) != _default(field):
                lines.append(f"| `{task.name}` {_argument_row(name, field)}")
    return "\n".join(lines) + "\n"


def _argument_row(name: str, field: "dataclasses.Field[Any]") -> str:
    default = f"`{_shown(_default(field))}`"
    if name in LOHAN_DEFAULTS:
        default = f"**`{_shown(LOHAN_DEFAULTS[name])}`**"
    return f"| `{name}` | {_type(field)} | {default} |"


def _refused_part() -> str:
    lines = [
        "## Arguments that are refused",
        "",
        "They are known and cannot work here; setting one is an error with this reason.",
        "",
        "| key | why |",
        "|---|---|",
    ]
    lines += [f"| `{name}` | {_cell(why)} |" for name, why in REFUSED_ARGUMENTS.items()]
    lines += ["", "These may be set, with a warning, and have no effect.", ""]
    lines += ["| key | what happens instead |", "|---|---|"]
    lines += [f"| `{name}` | {_cell(what)} |" for name, what in HAVE_NO_EFFECT.items()]
    return "\n".join(lines) + "\n"


def _default(field: "dataclasses.Field[Any]") -> Any:
    if field.default is not dataclasses.MISSING:
        return getattr(field.default, "value", field.default)
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else None


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if value != "" else '""'


def _type(field: "dataclasses.Field[Any]") -> str:
    """What may be written, without the modules types come from."""
    kind = field.type
    text = kind.__name__ if isinstance(kind, type) else str(kind)
    text = re.sub(r"\b(?:\w+\.)+(\w+)", r"\1", text).replace("NoneType", "None")
    return "`" + text.replace("|", "or").replace("None", "null") + "`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
