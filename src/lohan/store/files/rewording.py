"""An error of a drive, told again with what the store knows about it.

Owns nothing but the copying: path, offset, errno and byte counts of the error stay as they are.
"""

import copy
from typing import TypeVar

from lohan.errors import StorageError

E = TypeVar("E", bound=StorageError)


def named_error(error: E, what: str) -> E:
    """The same error with block and part in front."""
    return _copied(error, f"{what}: {error.what}", error.why, error.remedy)


def explained_error(error: E, *, why: str, remedy: str) -> E:
    """The same error with another reason and remedy."""
    return _copied(error, error.what, why, remedy)


def _copied(error: E, what: str, why: str, remedy: str) -> E:
    told = copy.copy(error)
    told.what, told.why, told.remedy = what, why, remedy
    told.args = (f"{what}: {why}. To fix it: {remedy}.",)
    return told
