"""A hash of training rows as the model will see them, to tell on resume that they are the same.

Owns the hash only. It covers what a trainer gives to the model, in order, so another file,
tokenizer, chat template or length gives another hash.
"""

import hashlib
import json
from collections.abc import Collection
from typing import Any

_COLUMNS = ("input_ids", "labels", "seq_lengths", "messages", "prompt", "completion", "text")
_BATCH_ROWS = 1000
_PICTURE_ROWS = 20
"""At a time of a table that holds files: they may be large."""


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
