"""The largest micro-batch a run can meet, so that the plan made before step 1 holds to its end.

Owns the lengths of the rows of a prepared table. Called by the trainer; the engine plans for it.
"""

from typing import Any

import numpy as np


def longest_rows(table: Any, num_rows: int) -> Any | None:
    """A table of the longest rows of a table of tokens; None where lengths are not known."""
    lengths = row_lengths(table)
    if lengths is None:
        return None
    longest = np.argsort(-lengths, kind="stable")[:num_rows]
    return table.select(longest)


def row_lengths(table: Any) -> "np.ndarray[Any, Any] | None":
    """Tokens of each row of a table, or None where they are not known."""
    from datasets import Dataset

    if not isinstance(table, Dataset) or "input_ids" not in table.column_names:
        return None
    if table.format["type"] == "custom":
        # Rows are made by the user's own code when they are read; it may count, or draw.
        return None
    return np.concatenate(
        [
            chunk.value_lengths().to_numpy(zero_copy_only=False)
            for batch in table.select_columns(["input_ids"])
            .with_format("arrow")
            .iter(batch_size=10_000)
            for chunk in batch.column("input_ids").chunks
        ]
    )
