"""What a row means: the forms people have, and TRL's form of each.

Owns recognising a form by its columns and converting one row. Ambiguity and every value that
is not valid is an error that names the row and shows its columns. Called by `dataset`.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from lohan.errors import ConfigError, nearest_names
from lohan.train.data.row_files import Row, parse_json

_SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFormat:
    """One form: the columns that tell it, and how a row becomes TRL's columns."""

    name: str
    needs: tuple[str, ...]
    convert: Callable[[Row], dict[str, Any]]

    def fits(self, row: Row) -> bool:
        """Whether a row has the columns."""
        return all(column in row.fields for column in self.needs)


# TRL's own default: a saved configuration names it without anybody having asked for it.
_DEFAULT_TEXT_COLUMN = "text"


def recognise(row: Row, *, text_column: str | None = None, forms: str = "sft") -> RowFormat:
    """Tell the form of a file from its first row.

    Args:
        row: the first one.
        text_column: the column to train on as it is, when the user named one.
        forms: which of `FORMS` may be meant.

    Raises:
        ConfigError: no form fits, or more than one does.
    """
    columns = list(row.fields)
    if text_column is not None and text_column in row.fields:
        return _text_format(text_column)
    if text_column not in (None, _DEFAULT_TEXT_COLUMN):
        raise ConfigError(
            f'{row.place} has no column "{text_column}" (it has {", ".join(columns) or "none"})',
            why="dataset_text_field names it as the text to train on",
            remedy="correct dataset_text_field, or leave it out",
        )
    known = FORMS[forms]
    fitting = [form for form in known if form.fits(row)]
    shown = ", ".join(columns)
    if len(fitting) == 1 and not (fitting[0] is _PROMPTED and _is_judged(row)):
        return fitting[0]
    if len(fitting) == 1:
        raise ConfigError(
            f"{row.place} has the columns {shown}, and label is {row.fields['label']!r}",
            why="answers that are not liked would be learned like the others",
            remedy="train with --task kto; or delete the column label and the rows to leave out",
        )
    if fitting:
        names = " and ".join(form.name for form in fitting)
        raise ConfigError(
            f"{row.place} has the columns {shown}: both {names} fit",
            why="it cannot be told which columns are meant",
            remedy="delete the columns that are not meant, or name one with dataset_text_field",
        )
    wanted = "; ".join(f"{form.name}: {', '.join(form.needs)}" for form in known)
    is_text = forms in ("sft", "text")
    others = [task for task, form in _TASKS.items() if form not in known and form.fits(row)]
    raise ConfigError(
        f"{row.place} has the columns {shown or '(none)'}: no known form",
        why=f"known forms and their columns are {wanted}",
        remedy=f"such rows are trained on with --task {others[0]}"
        if others
        else "rename the columns, or name the one with the text with dataset_text_field"
        if is_text
        else "rename the columns, or train another task with --task",
    )


def convert(row: Row, form: RowFormat) -> dict[str, Any]:
    """One row in TRL's columns.

    Raises:
        ConfigError: the row is not of the form, or a value is not valid.
    """
    missing = [column for column in form.needs if column not in row.fields]
    if missing:
        raise ConfigError(
            f'{row.place} has no column "{missing[0]}" (it has {", ".join(row.fields)})',
            why=f"the first row is of the form {form.name}, so all rows must be",
            remedy="correct the row, or put rows of different forms into different files",
        )
    return form.convert(row)


def _from_messages(row: Row) -> dict[str, Any]:
    messages = _messages(row, "messages", row.fields["messages"])
    return {"messages": messages, **_tools(row)}


def _from_sharegpt(row: Row) -> dict[str, Any]:
    turns = _list(row, "conversations", row.fields["conversations"])
    messages = []
    if isinstance(row.fields.get("system"), str) and row.fields["system"]:
        messages.append({"role": "system", "content": row.fields["system"]})
    for number, turn in enumerate(turns, start=1):
        where = f"conversations[{number}]"
        if not isinstance(turn, Mapping):
            raise _wrong(row, where, turn, 'an object with "from" and "value"')
        if "role" in turn:
            messages.append(_message(row, where, turn))
            continue
        if "from" not in turn or "value" not in turn:
            raise _wrong(row, where, sorted(turn), 'an object with "from" and "value"')
        role = _SHAREGPT_ROLES.get(str(turn["from"]).lower())
        if role is None:
            raise ConfigError(
                f'{row.place}: {where} is from "{turn["from"]}"',
                why=f"known are {', '.join(_SHAREGPT_ROLES)}",
                remedy=nearest_names(str(turn["from"]), _SHAREGPT_ROLES),
            )
        messages.append({"role": role, "content": _text(row, where, turn["value"])})
    return {"messages": messages, **_tools(row)}


def _from_alpaca(row: Row) -> dict[str, Any]:
    fields = row.fields
    asked = _text(row, "instruction", fields["instruction"])
    if fields.get("input"):
        asked = f"{asked}\n\n{_text(row, 'input', fields['input'])}"
    prompt = []
    if fields.get("system"):
        prompt.append({"role": "system", "content": _text(row, "system", fields["system"])})
    for number, turn in enumerate(fields.get("history") or [], start=1):
        if not isinstance(turn, list | tuple) or len(turn) != 2:
            raise _wrong(row, f"history[{number}]", turn, "a pair of question and answer")
        for role, text in zip(("user", "assistant"), turn, strict=True):
            content = _text(row, f"history[{number}]", text)
            prompt.append({"role": role, "content": content})
    prompt.append({"role": "user", "content": asked})
    answer = _filled(row, "output", _text(row, "output", fields["output"]))
    return {"prompt": prompt, "completion": [{"role": "assistant", "content": answer}]}


def _from_prompt(row: Row) -> dict[str, Any]:
    prompt, completion = row.fields["prompt"], row.fields["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        return {"prompt": prompt, "completion": _filled(row, "completion", completion)}
    if isinstance(prompt, str) or isinstance(completion, str):
        raise ConfigError(
            f"{row.place}: prompt and completion are not of one kind",
            why="both are texts, or both are lists of messages",
            remedy="write both in the same way",
        )
    return {
        "prompt": _messages(row, "prompt", prompt),
        "completion": _messages(row, "completion", completion),
        **_tools(row),
    }


def _from_pair(row: Row) -> dict[str, Any]:
    names = [name for name in ("prompt", "chosen", "rejected") if row.fields.get(name) is not None]
    found = _of_one_kind(row, names)
    if found["chosen"] == found["rejected"]:
        raise ConfigError(
            f"{row.place}: chosen and rejected are the same",
            why="nothing can be learned from a pair of equal answers",
            remedy="correct or delete the row",
        )
    margin = row.fields.get("margin")
    if margin is None:
        return found
    try:
        return {**found, "margin": float(margin)}
    except (TypeError, ValueError):
        raise _wrong(row, "margin", margin, "a number") from None


def _from_judged(row: Row) -> dict[str, Any]:
    label = row.fields["label"]
    if not _is_judged(row):
        raise _wrong(row, "label", label, "true or false")
    answer = _of_one_kind(row, ["prompt", "completion"])
    return {**answer, "label": _LABELS[str(label).strip().lower()]}


_LABELS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}


def _is_judged(row: Row) -> bool:
    """Whether a row says that its answer is liked, or not."""
    return str(row.fields.get("label")).strip().lower() in _LABELS


def _of_one_kind(row: Row, names: list[str]) -> dict[str, Any]:
    """Columns that are all texts, or all lists of messages."""
    for name in ("chosen", "rejected", "completion"):
        if name in row.fields and row.fields[name] is None:
            raise _wrong(row, name, None, "a text, or a list of messages")
    are_texts = [isinstance(row.fields[name], str) for name in names]
    if all(are_texts):
        texts = {name: _text(row, name, row.fields[name]) for name in names}
        return {
            name: one if name == "prompt" else _filled(row, name, one)
            for name, one in texts.items()
        }
    if any(are_texts) and not all(str(row.fields[name]).lstrip().startswith("[") for name in names):
        raise ConfigError(
            f"{row.place}: {', '.join(names)} are not of one kind",
            why="all are texts, or all are lists of messages",
            remedy="write all in the same way",
        )
    found = {name: _messages(row, name, row.fields[name]) for name in names}
    return {**found, **_tools(row)}


def is_chat(converted: Mapping[str, Any]) -> bool:
    """Whether a converted row has messages, and so needs a chat template."""
    return any(isinstance(value, list) for value in converted.values())


def _text_format(column: str) -> RowFormat:
    return RowFormat(
        name=column,
        needs=(column,),
        convert=lambda row: {column: _filled(row, column, _text(row, column, row.fields[column]))},
    )


_PROMPTED = RowFormat(
    name="prompt and completion", needs=("prompt", "completion"), convert=_from_prompt
)
FORMATS = (
    RowFormat(name="messages", needs=("messages",), convert=_from_messages),
    RowFormat(name="ShareGPT", needs=("conversations",), convert=_from_sharegpt),
    RowFormat(name="alpaca", needs=("instruction", "output"), convert=_from_alpaca),
    _PROMPTED,
    _text_format("text"),
)
_PAIRS = RowFormat(name="pairs", needs=("chosen", "rejected"), convert=_from_pair)
_JUDGED = RowFormat(
    name="judged answers", needs=("prompt", "completion", "label"), convert=_from_judged
)
_TASKS = {"dpo": _PAIRS, "kto": _JUDGED}
FORMS: dict[str, tuple[RowFormat, ...]] = {
    "sft": FORMATS,
    "text": FORMATS[-1:],
    "pairs": (_PAIRS,),
    "judged": (_JUDGED, _PAIRS),
}
"""By what is trained."""


def _messages(row: Row, column: str, found: Any) -> list[dict[str, Any]]:
    turns = _list(row, column, found)
    return [
        _message(row, f"{column}[{number}]", turn) for number, turn in enumerate(turns, start=1)
    ]


def _message(row: Row, where: str, found: Any) -> dict[str, Any]:
    if not isinstance(found, Mapping) or not isinstance(found.get("role"), str):
        raise _wrong(row, where, found, 'an object with "role" and "content"')
    message = {key: value for key, value in found.items() if value is not None}
    if "content" not in message and not message.get("tool_calls"):
        raise _wrong(row, f"{where}.content", None, "a text")
    if "content" in message:
        message["content"] = _content(row, f"{where}.content", message["content"])
    return message


def _content(row: Row, where: str, found: Any) -> str:
    """A text; parts of type text are put together, other parts are refused."""
    if not isinstance(found, list):
        return _text(row, where, found)
    texts = []
    for part in found:
        if not isinstance(part, Mapping) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, Mapping) else part
            raise _wrong(row, where, kind, "text parts only: images and audio are not trained on")
        texts.append(_text(row, where, part.get("text")))
    return "".join(texts)


def _tools(row: Row) -> dict[str, str]:
    """TRL takes tools as JSON text, so that rows with different tools fit into one table."""
    tools = row.fields.get("tools")
    if not tools:
        return {}
    if not isinstance(tools, str):
        return {"tools": json.dumps(tools)}
    try:
        parse_json(tools, f"{row.place}: tools")
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{row.place}: tools is not JSON ({error})",
            why="tools are a list of JSON schemas",
            remedy="write them as JSON",
        ) from error
    return {"tools": tools}


def _list(row: Row, column: str, found: Any) -> list[Any]:
    if isinstance(found, str):
        try:
            found = parse_json(found, f"{row.place}: {column}")  # a column of a .csv file
        except json.JSONDecodeError:
            raise _wrong(row, column, found, "a list of messages") from None
    if not isinstance(found, Iterable) or isinstance(found, Mapping) or not list(found):
        raise _wrong(row, column, found, "a list with at least one message")
    return list(found)


def _text(row: Row, where: str, found: Any) -> str:
    if not isinstance(found, str):
        raise _wrong(row, where, found, "a text")
    return found


def _filled(row: Row, where: str, text: str) -> str:
    if not text.strip():
        raise _wrong(row, where, text, "a text with something to learn")
    return text


def _wrong(row: Row, where: str, found: Any, expected: str) -> ConfigError:
    shown = repr(found)
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    return ConfigError(
        f"{row.place}: {where} is {shown}",
        why=f"{expected} is expected (columns: {', '.join(row.fields)})",
        remedy="correct or delete the row",
    )
