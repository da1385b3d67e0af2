"""Strict reading of JSON objects: every key known, every number with its meaning checked.

Owns turning a JSON object into checked values, and the wording of what is wrong with one: the
path of the field, the value found, what to write instead. Knows no particular format. Called by
whatever has a `from_json`, and by the checks of data made in code.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn, TypeVar, cast

from lohan.errors import ConfigError, nearest_names
from lohan.units import parse_bytes, parse_rate

T = TypeVar("T")
_MOST_BYTES = 2**63 - 1
_MOST_OF_ONE_THING = 4096
LEAST_RATE, MOST_RATE = 1e5, 1e21
"""No hardware does less or more of anything in a second."""
_MOST_DOLLARS = 1e12
_MOST_SHARE = 100


def check_text(value: str, where: str) -> None:
    """Refuse a name that is no text or is empty."""
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(
            f"{where} is {value!r}", why="a name is expected", remedy="give it a text in quotes"
        )


def check_rate(value: float, where: str, *, example: str) -> None:
    """Refuse a rate that is not a finite number above zero, or is beyond any hardware."""
    if not _is_number(value) or not math.isfinite(value) or value <= 0:
        raise ConfigError(
            f"{where} is {value!r}",
            why="a rate must be a finite number above zero: everything is timed by it",
            remedy=f"write what was measured, such as {example}",
        )
    if not LEAST_RATE <= value <= MOST_RATE:
        raise ConfigError(
            f"{where} is {_shown(value)}",
            why=f"no such hardware does less than {LEAST_RATE:,.0f} or more than {MOST_RATE:.0e} "
            "a second: the unit was probably left out",
            remedy=f"write what was measured, in full or with its unit, such as {example}",
        )


def check_bytes(value: int, where: str, *, example: str) -> None:
    """Refuse a size that is not a whole number of bytes above zero."""
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if not is_whole or not 0 < value <= _MOST_BYTES:
        raise ConfigError(
            f"{where} is {_shown(value)}",
            why="a size must be a whole number of bytes above zero and below 8 EiB",
            remedy=f"write a size, such as {example}",
        )


def check_count(value: int, where: str) -> None:
    """Refuse a count below one, or one beyond anything that can be meant."""
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if not is_whole or not 1 <= value <= _MOST_OF_ONE_THING:
        raise ConfigError(
            f"{where} is {_shown(value)}",
            why=f"a count is a whole number from 1 to {_MOST_OF_ONE_THING}",
            remedy="write 1, 2, 3 and so on",
        )


def check_dollars(value: float, where: str) -> None:
    """Refuse a price that is negative or not finite. Zero is a price: paid for elsewhere."""
    if not _is_number(value) or not 0 <= value <= _MOST_DOLLARS:
        raise ConfigError(
            f"{where} is {_shown(value)}",
            why=f"a price is a number of dollars from 0 to {_MOST_DOLLARS:.0e}",
            remedy="write the price, or 0 when it does not matter",
        )


def check_share(value: float, where: str) -> None:
    """Refuse a share that is negative or beyond any wear; 1 is all, and a drive may pass it."""
    if not _is_number(value) or not 0 <= value <= _MOST_SHARE:
        raise ConfigError(
            f"{where} is {_shown(value)}",
            why=f"a share between 0 and {_MOST_SHARE} is expected, 1 being all",
            remedy="write a number such as 0.12",
        )


def _shown(value: object) -> str:
    # Python refuses to print whole numbers of thousands of digits.
    is_huge = isinstance(value, int) and abs(value) >= 10**40
    return "a number of over 40 digits" if is_huge else repr(value)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def parse_object(text: str, *, where: str) -> dict[str, object]:
    """Return the JSON object in a text.

    Raises:
        ConfigError: if the text is no JSON, is no object, or has a key twice.
    """
    remedy = "correct it, or write it anew"
    try:
        found = json.loads(text, object_pairs_hook=lambda pairs: _without_repeats(pairs, where))
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{where} is not JSON, at line {error.lineno} column {error.colno}",
            why=error.msg[:1].lower() + error.msg[1:],
            remedy=remedy,
        ) from error
    except ValueError as error:  # a whole number of thousands of digits
        raise ConfigError(f"{where} is not read", why=str(error), remedy=remedy) from error
    except RecursionError as error:
        raise ConfigError(f"{where} is not read", why="it nests too deep", remedy=remedy) from error
    if not isinstance(found, dict):
        raise ConfigError(
            f"{where} is not a JSON object", why=f"it holds {_kind_of(found)}", remedy=remedy
        )
    return found


def _without_repeats(pairs: list[tuple[str, object]], where: str) -> dict[str, object]:
    found: dict[str, object] = {}
    for key, value in pairs:
        if key in found:
            raise ConfigError(
                f'{where} has the key "{key}" twice in one object',
                why="it cannot be told which value is meant",
                remedy="delete one of them",
            )
        found[key] = value
    return found


def check_version(fields: "Fields", version: int) -> None:
    """Refuse an object whose "version" is not the one this release reads."""
    found = fields.value("version")
    if found != version or isinstance(found, bool):
        raise ConfigError(
            f"{fields.path('version')} is {found!r}",
            why=f"this release reads version {version} of the format",
            remedy=f'write "version": {version} and the fields of that version',
        )


class Fields:
    """One JSON object, read field by field; `where` is its path in the file, for the messages."""

    def __init__(self, found: object, *, where: str, known: Sequence[str]) -> None:
        if not isinstance(found, Mapping):
            raise ConfigError(
                f"{where} holds {_kind_of(found)}",
                why="an object is expected",
                remedy="write " + "{" + ", ".join(f'"{key}": ...' for key in known) + "}",
            )
        self._found = cast(Mapping[str, object], found)
        self._where = where
        for key in found:
            if key not in known:
                raise ConfigError(
                    f'{where} has the unknown key "{key}"',
                    why="a key that is not known would be without effect",
                    remedy=nearest_names(key, known),
                )

    def path(self, key: str) -> str:
        """Return the path of a field, as messages name it."""
        return f"{self._where}.{key}"

    def has(self, key: str) -> bool:
        """Return whether the field is written."""
        return key in self._found

    def value(self, key: str) -> object:
        """Return a field as it stands; a missing one is refused."""
        if key not in self._found:
            raise ConfigError(
                f"{self.path(key)} is missing",
                why="it has no default",
                remedy=f'add "{key}" to {self._where}',
            )
        return self._found[key]

    def objects(self, key: str) -> list[object]:
        """Return a list."""
        value = self.value(key)
        if not isinstance(value, list):
            self._refuse(key, "a list")
        return value

    def text(self, key: str) -> str:
        """Return a name."""
        value = self.value(key)
        if not isinstance(value, str):
            self._refuse(key, "a text in quotes")
        check_text(value, self.path(key))
        return value

    def truth(self, key: str) -> bool:
        """Return a yes or no."""
        value = self.value(key)
        if not isinstance(value, bool):
            self._refuse(key, "true or false")
        return value

    def count(self, key: str) -> int:
        """Return a count of 1 or more."""
        value = self.value(key)
        if not isinstance(value, int) or isinstance(value, bool):
            self._refuse(key, "a whole number")
        check_count(value, self.path(key))
        return value

    def share(self, key: str) -> float:
        """Return a share of something."""
        value = self._number(key)
        check_share(value, self.path(key))
        return value

    def one_of(self, key: str, words: Sequence[str]) -> str:
        """Return one of some words."""
        value = self.text(key)
        if value not in words:
            self._refuse(key, f"one of {', '.join(words)}")
        return value

    def dollars(self, key: str) -> float:
        """Return a price."""
        value = self._number(key)
        check_dollars(value, self.path(key))
        return value

    def size_bytes(self, key: str, *, example: str) -> int:
        """Return a size from a whole number of bytes or a text such as `"24GiB"`."""
        value = self.value(key)
        if isinstance(value, str):
            value = self._parsed(key, value, parse_bytes)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not _is_number(value):
            self._refuse(key, f"a size, such as {example}")
        check_bytes(cast(int, value), self.path(key), example=example)
        return cast(int, value)

    def bytes_per_second(self, key: str, *, example: str) -> float:
        """Return a rate from a number of bytes per second or a text such as `"7GB/s"`."""
        value = self.value(key)
        if isinstance(value, str):
            return self._parsed(key, value, parse_rate)
        return self.per_second(key, example=example)

    def per_second(self, key: str, *, example: str) -> float:
        """Return a rate of something other than bytes, written as a number."""
        value = self._number(key)
        check_rate(value, self.path(key), example=example)
        return value

    def _number(self, key: str) -> float:
        value = self.value(key)
        if not _is_number(value):
            self._refuse(key, "a number")
        try:
            return float(cast(float, value))
        except OverflowError:
            return math.inf

    def _parsed(self, key: str, text: str, parse: Callable[[str], T]) -> T:
        try:
            return parse(text)
        except ConfigError as error:
            raise ConfigError(
                f"{self.path(key)}: {error.what}", why=error.why, remedy=error.remedy
            ) from error

    def _refuse(self, key: str, expected: str) -> NoReturn:
        value = self._found[key]
        shown = json.dumps(value) if not isinstance(value, int) else _shown(value).lower()
        raise ConfigError(
            f"{self.path(key)} is {shown if len(shown) <= 60 else _kind_of(value)}",
            why=f"{expected} is expected",
            remedy=f'correct "{key}" in {self._where}',
        )


def _kind_of(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, str):
        return "a text"
    if isinstance(value, int | float):
        return "a number"
    return "an object" if isinstance(value, Mapping) else "a list"
