"""Training rows from files to the table TRL takes.

Owns checking every row before anything is trained, the table's column types, finding the row a
chat template refuses, and the hash of rows as the model will see them, which tells on resume that
they are the same: it covers what a trainer gives to the model, in order, so another file,
tokenizer, chat template or length gives another hash. Reading files is in `row_files`, their
meaning in `row_formats`. Called by `fine_tune`, the trainers and the preview.
"""

import hashlib
import json
import os
import pathlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lohan.errors import ConfigError, LohanError
from lohan.train.data.row_files import Row, check_file, read_rows
from lohan.train.data.row_formats import RowFormat, convert, is_chat, recognise

_HASH_BYTES = 1 << 20
_OF_PLAIN_MESSAGES = ("role", "content")
_MOST_CHARACTERS = 16_000_000
"""Of a row: some books, and some seconds of a tokenizer."""
_COLUMNS = ("input_ids", "labels", "seq_lengths", "messages", "prompt", "completion", "text")
_BATCH_ROWS = 1000
_PICTURE_ROWS = 20
"""At a time of a table that holds files: they may be large."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRows:
    """A checked table."""

    table: Any
    """`datasets.Dataset` with TRL's columns."""
    format_name: str
    is_chat: bool
    files_hash: str
    """SHA-256 of the files, or of the name of a hub data set."""


def load_rows(
    paths: Sequence[str],
    *,
    cache: pathlib.Path | None = None,
    text_column: str | None = None,
    forms: str = "sft",
    is_streamed: bool = False,
) -> TrainingRows:
    """Read files, check every row and put them into one table.

    Args:
        paths: files, or the id of one data set on the hub.
        cache: folder for the table, which is read from disk; None keeps it in RAM.
        text_column: a column to train on as it is.
        forms: which forms of rows may be meant (`row_formats.FORMS`).
        is_streamed: read rows when they are needed, and check each one then.

    Raises:
        ConfigError: a file or row cannot be used; it is named.
    """
    import datasets

    if is_streamed:
        return _streamed(paths, text_column, forms)
    files_hash = _hash_files(paths)
    form, columns, first, is_plain = _check_rows(paths, text_column, forms)
    is_plain = is_plain and forms not in ("sft", "text")
    features = datasets.Features(
        {name: _feature(first.get(name, ""), datasets, is_plain) for name in columns}
    )

    place = ""

    def rows(_hash: str) -> Iterator[dict[str, Any]]:
        # The hash is an argument so that a changed file is not taken from an old table.
        nonlocal place
        for row in _all_rows(paths):
            place = row.place
            converted = convert(row, form)
            yield {name: converted.get(name) for name in columns}

    try:
        if cache is None:
            table = datasets.Dataset.from_list(list(rows(files_hash)), features=features)
        else:
            cache.mkdir(parents=True, exist_ok=True)
            table = datasets.Dataset.from_generator(
                rows,
                features=features,
                cache_dir=str(cache),
                gen_kwargs={"_hash": files_hash},
                fingerprint=files_hash[:16],
            )
    except (datasets.exceptions.DatasetGenerationError, ValueError, RecursionError) as error:
        cause = error.__cause__ or error
        if isinstance(cause, LohanError | OSError):
            raise cause from None
        raise ConfigError(
            f"a row cannot be put into a table, {place} at the latest",
            why=f"{type(cause).__name__}: {' '.join(str(cause).split())[:300]}",
            remedy="correct or delete the row",
        ) from error
    return TrainingRows(
        table=table,
        format_name=form.name,
        is_chat=is_chat(first),
        files_hash=files_hash,
    )


def _streamed(paths: Sequence[str], text_column: str | None, forms: str) -> TrainingRows:
    import datasets

    first = next(_all_rows(paths))
    form = recognise(first, text_column=text_column, forms=forms)
    converted = convert(first, form)

    def rows() -> Iterator[dict[str, Any]]:
        for row in _all_rows(paths):
            found = convert(row, form)
            _refuse_endless(row, found)
            yield found

    features = {name: _feature(value, datasets) for name, value in converted.items()}
    table = datasets.IterableDataset.from_generator(rows, features=datasets.Features(features))
    return TrainingRows(
        table=table, format_name=form.name, is_chat=is_chat(converted), files_hash=""
    )


def _feature(value: Any, datasets: Any, is_plain: bool = False) -> Any:
    if isinstance(value, bool | float):
        return datasets.Value("bool" if isinstance(value, bool) else "float64")
    if isinstance(value, list) and is_plain:
        # TRL writes texts over them, which JSON would take apart.
        return datasets.List({name: datasets.Value("string") for name in _OF_PLAIN_MESSAGES})
    # Messages of one table may have different keys (tool calls), so each is kept as JSON.
    return datasets.List(datasets.Json()) if isinstance(value, list) else datasets.Value("string")


def _check_rows(
    paths: Sequence[str], text_column: str | None, forms: str
) -> tuple[RowFormat, list[str], dict[str, Any], bool]:
    """Convert every row once: the form, the columns that occur, the first converted row, and
    whether messages have a role and a content and nothing else."""
    form: RowFormat | None = None
    is_plain = True
    columns: dict[str, None] = {}
    first: dict[str, Any] = {}
    for row in _all_rows(paths):
        if form is None:
            form = recognise(row, text_column=text_column, forms=forms)
        converted = convert(row, form)
        _refuse_endless(row, converted)
        first = first or converted
        if is_chat(converted) != is_chat(first):
            raise ConfigError(
                f"{row.place} is text where the rows before are messages, or the other way round",
                why="one table holds rows of one kind",
                remedy="put rows of different kinds into different files",
            )
        columns.update(dict.fromkeys(converted))
        lists = [value for value in converted.values() if isinstance(value, list)]
        is_plain = is_plain and all(
            set(message) == set(_OF_PLAIN_MESSAGES) for messages in lists for message in messages
        )
    assert form is not None, "read_rows refuses a file without rows"
    return form, list(columns), first, is_plain


def _refuse_endless(row: Row, converted: Mapping[str, Any]) -> None:
    texts = [text for text in converted.values() if isinstance(text, str)]
    for messages in converted.values():
        if isinstance(messages, list):
            texts += [str(message.get("content", "")) for message in messages]
    num_characters = sum(map(len, texts))
    if num_characters > _MOST_CHARACTERS:
        raise ConfigError(
            f"{row.place} has {num_characters:,} characters",
            why=f"a row is made into tokens in one piece, which takes minutes and gigabytes where "
            f"it has more than {_MOST_CHARACTERS:,}; max_length cuts it off only then",
            remedy="cut it into several rows",
        )


def _all_rows(paths: Sequence[str]) -> Iterator[Row]:
    for path in paths:
        if _is_hub_id(path):
            yield from _hub_rows(path)
        else:
            yield from read_rows(pathlib.Path(os.path.expanduser(path)))


def _is_hub_id(path: str) -> bool:
    is_path = os.path.exists(os.path.expanduser(path)) or pathlib.Path(path).suffix != ""
    return not is_path and path.count("/") == 1 and not path.startswith((".", "/", "~"))


def _hub_rows(name: str) -> Iterator[Row]:
    import datasets

    try:
        table = datasets.load_dataset(name, split="train")
    except Exception as error:  # the hub's client has many
        raise ConfigError(
            f"the data set {name} cannot be loaded",
            why=" ".join(str(error).split())[:300],
            remedy="check the name and the network, or give a file",
        ) from error
    for number, fields in enumerate(table, start=1):
        yield Row(place=f"{name} row {number}", fields=dict(fields))


def _hash_files(paths: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        if _is_hub_id(path):
            digest.update(path.encode())
            continue
        place = pathlib.Path(os.path.expanduser(path))
        check_file(place)
        try:
            with open(place, "rb") as file:
                while piece := file.read(_HASH_BYTES):
                    digest.update(piece)
        except OSError as error:
            raise ConfigError(
                f"{place} cannot be read",
                why=str(error.strerror),
                remedy="check its permissions and the drive",
            ) from error
    return digest.hexdigest()


def another_template(args: Any) -> str:
    """How a run is given another chat template, in words; not every task has an argument for it."""
    if hasattr(args, "chat_template_path"):
        return "give another template with chat_template_path (a .jinja file or another model)"
    return "put another template into the tokenizer (chat_template.jinja in the model's folder)"


def refuse_missing_template(rows: TrainingRows, tokenizer: Any, model: str, args: Any) -> None:
    """Refuse chat rows for a model whose tokenizer cannot render them.

    Raises:
        ConfigError: there is no chat template.
    """
    if rows.is_chat and not getattr(tokenizer, "chat_template", None):
        raise ConfigError(
            f"the tokenizer of {model} has no chat template",
            why=f"rows of the form {rows.format_name} are conversations",
            remedy=f"{another_template(args).replace('another', 'a', 1)}, or give rows of text",
        )


def find_refused_row(
    rows: TrainingRows,
    tokenizer: Any,
    template: str | None = None,
    *,
    needs_answers: bool = False,
) -> tuple[int, str] | None:
    """The first row the chat template refuses, counted from 1, and what it said.

    Used when preparing the table failed: rendering row by row tells which one it was.

    Args:
        rows: chats.
        tokenizer: theirs.
        template: what they are rendered with instead of the tokenizer's own.
        needs_answers: a row without one is refused too.
    """
    for number, row in enumerate(rows.table, start=1):
        tools = json.loads(row.get("tools") or "null")
        for messages in _conversations(row):
            try:
                tokenizer.apply_chat_template(
                    messages, tools=tools, chat_template=template, tokenize=False
                )
            except Exception as error:  # whatever a template raises
                return number, f"{' '.join(str(error).split())} ({_roles(messages)})"
            if needs_answers and not any(one.get("role") == "assistant" for one in messages):
                return number, f"no message is the assistant's ({_roles(messages)})"
    return None


def _conversations(row: Mapping[str, Any]) -> Iterator[list[dict[str, Any]]]:
    """What of a row is rendered: a conversation, or one for each of two answers."""
    if row.get("messages"):
        yield row["messages"]
        return
    for name in ("completion", "chosen", "rejected"):
        if name in row:
            yield [*(row.get("prompt") or []), *(row[name] or [])]


def _roles(messages: Sequence[Mapping[str, Any]]) -> str:
    return f"roles: {', '.join(str(message.get('role')) for message in messages)}"


def hash_rows(dataset: Any, columns: Collection[str] | None) -> str | None:
    """SHA-256 of the rows, or None for a stream, whose rows cannot be read twice.

    Args:
        columns: those that count besides the usual ones; None: all of them.
    """
    from datasets import Dataset

    if not isinstance(dataset, Dataset):
        return None
    known = dataset.column_names
    more = set(known if columns is None else columns).difference(_COLUMNS)
    names = [name for name in (*_COLUMNS, *sorted(more)) if name in known] or known
    digest = hashlib.sha256(json.dumps([len(dataset), names]).encode())
    chosen = dataset.select_columns(names)
    has_files = "binary" in str(chosen.data.schema)
    num_rows = _PICTURE_ROWS if has_files else _BATCH_ROWS
    for batch in chosen.with_format("arrow").iter(batch_size=num_rows):
        for name in names:
            for chunk in batch.column(name).chunks:
                _update(digest, chunk)
    return digest.hexdigest()


def _update(digest: Any, chunk: Any) -> None:
    import pyarrow as pa

    if pa.types.is_list(chunk.type) and pa.types.is_integer(chunk.type.value_type):
        digest.update(chunk.value_lengths().to_numpy(zero_copy_only=False).tobytes())
        values = chunk.flatten().to_numpy(zero_copy_only=False)
        digest.update(values.astype("int64").tobytes())
    else:
        digest.update(json.dumps(chunk.to_pylist(), default=_in_words).encode())


def _in_words(value: Any) -> str:
    return hashlib.sha256(value).hexdigest() if isinstance(value, bytes) else str(value)
