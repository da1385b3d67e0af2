"""What is known of all rows before step 1: the largest micro-batch, and tokens no model has.

Owns looking through a prepared table. Called by the trainer; the engine plans for what is found.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from lohan.errors import ConfigError


def longest_rows(table: Any, num_rows: int) -> Any | None:
    """A table of the longest rows of a table of tokens; None where lengths are not known."""
    lengths = row_lengths(table)
    if lengths is None:
        return None
    longest = np.argsort(-lengths, kind="stable")[:num_rows]
    return table.select(longest)


def row_lengths(table: Any) -> "np.ndarray[Any, Any] | None":
    """Tokens of each row of a table, or None where they are not known."""
    chunks = _chunks_of(table)
    found = [chunk.value_lengths().to_numpy(zero_copy_only=False) for chunk in chunks or ()]
    return np.concatenate(found) if found else None


def refuse_unknown_tokens(table: Any, model: Any, *, what: str) -> None:
    """Refuse a table with tokens that the model's embedding does not have.

    Raises:
        ConfigError: naming the first such row.
    """
    embedding = getattr(model, "get_input_embeddings", lambda: None)()
    num_tokens = getattr(embedding, "num_embeddings", None)
    chunks = _chunks_of(table)
    if num_tokens is None or chunks is None:
        return
    # Those that stand for pictures or sounds may be outside: the model replaces them.
    fields = vars(getattr(model, "config", None) or object).items()
    marks = [value for name, value in fields if name.endswith(("_token_id", "_token_index"))]
    marks = [value for value in marks if isinstance(value, int)]
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


def _chunks_of(table: Any) -> Iterator[Any] | None:
    """Lists of tokens as Arrow has them, or None where rows cannot be looked at beforehand."""
    from datasets import Dataset

    if not isinstance(table, Dataset) or "input_ids" not in table.column_names:
        return None
    if table.format["type"] == "custom":
        # Rows are made by the user's own code when they are read; it may count, or draw.
        return None
    batches = table.select_columns(["input_ids"]).with_format("arrow").iter(batch_size=10_000)
    return (
        chunk
        for batch in batches
        for chunk in batch.column("input_ids").chunks
        if pa.types.is_list(chunk.type) and pa.types.is_integer(chunk.type.value_type)
    )
