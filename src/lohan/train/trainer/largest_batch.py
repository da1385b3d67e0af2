"""What is known of all rows before step 1: the largest micro-batch, and tokens no model has.

Owns looking through a prepared table. Called by the trainer; the engine plans for what is found.
"""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import numpy as np
import pyarrow as pa

from lohan.errors import ConfigError

Columns = Sequence[Sequence[str]]
"""Names of columns with tokens: those of one sequence in order, each way."""
_TOKENS: Columns = (("input_ids",),)


def longest_rows(table: Any, num_rows: int, columns: Columns = _TOKENS) -> Any | None:
    """A table of the longest rows of a table of tokens, or of those with most pictures where
    texts become tokens with them; None where neither is known."""
    lengths = row_lengths(table, columns)
    if lengths is None:
        lengths = _num_pictures(table)
    if lengths is None:
        return None
    longest = np.argsort(-lengths, kind="stable")[:num_rows]
    return table.select(longest)


def row_lengths(table: Any, columns: Columns = _TOKENS) -> "np.ndarray[Any, Any] | None":
    """Tokens of each row of a table, or None where they are not known."""
    found = {}
    for name in {name for sequence in columns for name in sequence}:
        chunks = _chunks_of(table, name)
        parts = [chunk.value_lengths().to_numpy(zero_copy_only=False) for chunk in chunks or ()]
        if parts:
            found[name] = np.concatenate(parts)
    ways = [sequence for sequence in columns if all(name in found for name in sequence)]
    if not ways:
        return None
    lengths = [np.sum([found[name] for name in sequence], axis=0) for sequence in ways]
    return cast("np.ndarray[Any, Any]", np.max(lengths, axis=0))


def _num_pictures(table: Any) -> "np.ndarray[Any, Any] | None":
    """Pictures of each row, without reading any."""
    from datasets import Dataset

    if not isinstance(table, Dataset) or table.format["type"] == "custom":
        return None
    if "images" not in table.column_names:
        # One each, where that is what the column holds.
        return np.ones(len(table)) if "image" in table.column_names else None
    chunks = table.data.column("images").chunks
    counts = np.concatenate([chunk.value_lengths().fill_null(0).to_numpy() for chunk in chunks])
    indices = table._indices  # of a table that was shuffled, or is a part of another
    return counts if indices is None else counts[indices.column(0).to_numpy()]


def refuse_unknown_tokens(table: Any, model: Any, columns: Columns = _TOKENS, *, what: str) -> None:
    """Refuse a table with tokens that the model's embedding does not have.

    Raises:
        ConfigError: naming the first such row.
    """
    embedding = None
    with contextlib.suppress(NotImplementedError):  # transformers': a model without one
        embedding = getattr(model, "get_input_embeddings", lambda: None)()
    num_tokens = getattr(embedding, "num_embeddings", None)
    if num_tokens is None:
        return
    # Those that stand for pictures or sounds may be outside: the model replaces them.
    fields = vars(getattr(model, "config", None) or object).items()
    marks = [value for name, value in fields if name.endswith(("_token_id", "_token_index"))]
    marks = [value for value in marks if isinstance(value, int)]
    for name in dict.fromkeys(name for sequence in columns for name in sequence):
        _refuse_unknown(_chunks_of(table, name) or (), num_tokens, marks, what)


def _refuse_unknown(chunks: Iterable[Any], num_tokens: int, marks: list[Any], what: str) -> None:
    row = 0
    for chunk in chunks:
        tokens = chunk.flatten().to_numpy(zero_copy_only=False)
        wrong = np.flatnonzero((tokens >= num_tokens) | (tokens < 0))
        wrong = wrong[~np.isin(tokens[wrong], marks)]
        if len(wrong):
            ends = np.cumsum(chunk.value_lengths().to_numpy(zero_copy_only=False))
            row += int(np.searchsorted(ends, wrong[0], side="right"))
            raise ConfigError(
                f"row {row + 1} of the {what} rows has the token {tokens[wrong[0]]}",
                why=f"the model's embedding has {num_tokens} tokens, from 0 on",
                remedy="give the model its own tokenizer; tokens added to one need rows in the "
                "embedding too (resize_token_embeddings, then save_pretrained)",
            )
        row += len(chunk)


def _chunks_of(table: Any, column: str) -> Iterator[Any] | None:
    """Lists of tokens as Arrow has them, or None where rows cannot be looked at beforehand."""
    from datasets import Dataset

    if not isinstance(table, Dataset) or column not in table.column_names:
        return None
    if table.format["type"] == "custom":
        # Rows are made by the user's own code when they are read; it may count, or draw.
        return None
    batches = table.select_columns([column]).with_format("arrow").iter(batch_size=10_000)
    return (
        chunk
        for batch in batches
        for chunk in batch.column(column).chunks
        if pa.types.is_list(chunk.type) and pa.types.is_integer(chunk.type.value_type)
    )
