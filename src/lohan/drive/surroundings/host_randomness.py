"""Python's and numpy's global random generators, treated as torch's: same numbers in a re-run.

Owns their states as values that can be compared and put back, and how far a forward moved them:
both count in 32-bit words, so a later micro-batch can start behind the words of an earlier one.
Used by `randomness`; generators that a model made for itself are not known here.
"""

import contextlib
import ctypes
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

_WORD_BITS = 32
_MT_BYTES = 4 * (624 + 1)
"""Key and position of a Mersenne Twister, which both are."""
_MOST_WORDS = 1 << 22
"""A forward that draws more from Python or numpy is not followed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostState:
    """Where both generators are. Equal states give equal numbers."""

    python: Any
    numpy: Any
    numpy_fields: Any = field(compare=False, repr=False)

    @classmethod
    def now(cls) -> "HostState":
        """A copy of the states."""
        return _SEEN.now()

    def put_back(self) -> None:
        """Continue from here."""
        now = HostState.now()
        if now.python != self.python:
            random.setstate(self.python)
        if now.numpy != self.numpy:
            np.random.set_state(self.numpy_fields)
            _SEEN.forget()


class _LastSeen:
    """The states as last read. Reading them takes 0.1 ms, and most models never move them, so the
    generators' memory is compared first, where it is known how it is laid out."""

    def __init__(self) -> None:
        self._state: HostState | None = None
        self._memory: tuple[Any, ...] | None = None
        self._python_address = _python_address()

    def now(self) -> HostState:
        memory = self._read_memory()
        if memory is None or memory != self._memory or self._state is None:
            fields: Any = np.random.get_state(legacy=False)
            self._state = HostState(
                python=random.getstate(), numpy=_comparable(fields), numpy_fields=fields
            )
            # The second of two normal numbers lies elsewhere: while there is one, look closer.
            self._memory = None if fields["has_gauss"] else memory
        return self._state

    def forget(self) -> None:
        """Read again next time."""
        self._memory = None

    def _read_memory(self) -> tuple[Any, ...] | None:
        generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
        if self._python_address is None or type(generator) is not np.random.MT19937:
            return None
        return (
            ctypes.string_at(self._python_address, _MT_BYTES),
            _python_generator().gauss_next,
            generator.ctypes.state_address,
            ctypes.string_at(generator.ctypes.state_address, _MT_BYTES),
        )


def _python_generator() -> Any:
    return random.random.__self__  # type: ignore[attr-defined]


def _python_address() -> int | None:
    """Where Python's generator keeps its position and key; None if that is not where CPython does,
    which is found out by looking."""
    generator = _python_generator()
    head_bytes = object.__basicsize__
    if type(generator).__basicsize__ < head_bytes + _MT_BYTES:
        return None
    address = id(generator) + head_bytes
    position, *key = np.frombuffer(ctypes.string_at(address, _MT_BYTES), dtype=np.uint32).tolist()
    return address if random.getstate()[1] == (*key, position) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class HostDraw:
    """Words that a forward drew from each generator."""

    num_python_words: int
    num_numpy_words: int

    def repeat(self) -> None:
        """Move the generators as the forward did."""
        if self.num_python_words:
            random.getrandbits(_WORD_BITS * self.num_python_words)
        if self.num_numpy_words:
            np.random.bytes(4 * self.num_numpy_words)


def draws_between(before: HostState, after: HostState) -> list[HostDraw | None]:
    """What was drawn between two states: nothing, some words, or an unknown amount (None)."""
    if before == after:
        return []
    python = _python_words(before.python, after.python)
    numpy = _numpy_words(before, after)
    if python is None or numpy is None:
        return [None]
    return [HostDraw(num_python_words=python, num_numpy_words=numpy)]


@contextlib.contextmanager
def host_state_kept() -> Iterator[None]:
    """Whatever is drawn inside, the generators are left as they are now."""
    before = HostState.now()
    try:
        yield
    finally:
        before.put_back()


_SEEN = _LastSeen()


def _comparable(fields: Any) -> Any:
    if fields["bit_generator"] != "MT19937":
        return repr(fields)
    state = fields["state"]
    return state["key"].tobytes(), int(state["pos"]), fields["has_gauss"], fields["gauss"]


def _python_words(before: Any, after: Any) -> int | None:
    # The second of two normal numbers is kept for later: then words are not all there is.
    if before[2] is not None or after[2] is not None:
        return 0 if before == after else None
    walker = random.Random()
    walker.setstate(before)
    num_words = 0
    while num_words <= _MOST_WORDS:
        *key, position = walker.getstate()[1]
        *wanted, target = after[1]
        if key == wanted and position <= target:
            return int(num_words + target - position)
        step = len(key) - position + 1  # to the first word of the next key
        walker.getrandbits(_WORD_BITS * step)
        num_words += step
    return None


def _numpy_words(before: HostState, after: HostState) -> int | None:
    if before.numpy == after.numpy:
        return 0
    if isinstance(before.numpy, str) or isinstance(after.numpy, str):
        return None
    if before.numpy[2] or after.numpy[2]:
        return None
    walker = np.random.RandomState()
    walker.set_state(before.numpy_fields)
    wanted, target = after.numpy[:2]
    num_words = 0
    while num_words <= _MOST_WORDS:
        key, position = _comparable(walker.get_state(legacy=False))[:2]
        if key == wanted and position <= target:
            return int(num_words + target - position)
        step = len(key) // 4 - position + 1
        walker.bytes(4 * step)
        num_words += step
    return None
