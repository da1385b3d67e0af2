"""Tables of rows on disk that are whole, or made again.

Owns what `datasets` does not do for its files: flushing them, and telling a whole one from one that
a power cut left empty or short. Called by `fine_tune` around all that makes or reads such files.
"""

import contextlib
import pathlib
import shutil
from collections.abc import Iterator

from lohan.durable_files import sync_tree
from lohan.errors import CheckpointError, StorageError
from lohan.train.weights.file_list import (
    check_files,
    files_below,
    hash_files,
    read_list,
    write_list,
)

_LIST = "files-"
_LOCK_SUFFIX = ".lock"


@contextlib.contextmanager
def whole_tables(folder: pathlib.Path) -> Iterator[None]:
    """Within it tables are made and read; those there before have the bytes they were made with.

    New ones are flushed, and a list of their hashes is added: a run that is refused takes both
    back. A list that does not match, or none (older releases), has all tables made again: they are
    copies of rows whose files are there. Of a process that was killed nothing is listed. May
    block: yes, all tables are read.
    """
    known: dict[str, str] = {}
    try:
        for listed in _lists(folder):
            known |= read_list(listed)
        check_files(folder, known)
    except (CheckpointError, StorageError):
        known = {}
    for name in _tables(folder):
        if name not in known:
            (folder / name).unlink()
    if not known:
        for path in folder.iterdir():
            # What `datasets` finds of a table has to be all of it.
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    yield
    new = [name for name in _tables(folder) if name not in known]
    if new:
        sync_tree(folder)
        write_list(folder / f"{_LIST}{len(_lists(folder))}.json", hash_files(folder, new))


def _lists(folder: pathlib.Path) -> list[pathlib.Path]:
    return sorted(folder.glob(f"{_LIST}*.json"))


def _tables(folder: pathlib.Path) -> list[str]:
    lists = {path.name for path in _lists(folder)}
    return [n for n in files_below(folder) if n not in lists and not n.endswith(_LOCK_SUFFIX)]
