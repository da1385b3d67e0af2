"""Strict reading of JSON: msgspec checks every value, and this says what is wrong with one.

Owns the kinds of numbers that files hold, turning JSON into records, and the wording of what does
not fit: the path of the field, the value found, what to write instead. Knows no particular format.
Called by whatever has a `from_json`, and by records made in code.
"""

import functools
import json
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar, get_type_hints

import msgspec
from msgspec import Meta

from lohan.errors import ConfigError, nearest_names
from lohan.units import parse_bytes, parse_rate

T = TypeVar("T")
LEAST_RATE, MOST_RATE = 1e5, 1e21
"""No hardware does less or more of anything in a second."""
_MOST_BYTES = 2**63 - 1
_MOST_OF_ONE_THING = 4096
_MOST_DOLLARS = 1e12
_MOST_SHARE = 100
_WHY = {
    "_per_second": "a rate must be a finite number above zero, and no hardware does less than "
    f"{LEAST_RATE:,.0f} or more than {MOST_RATE:.0e} a second (was its unit left out?)",
    "_bytes": "a size is a whole number of bytes above zero and below 8 EiB",
    "_dollars": f"a price is a number of dollars from 0 to {_MOST_DOLLARS:.0e}",
    "_seconds": "a time is a number of seconds above 0, and at most one",
    "_share": f"a share is a number from 0 to {_MOST_SHARE}, 1 being all",
    ".life": 'it is one of "stated", "wear counter" and "assumed"',
    "name": "a name is a text in quotes that is not empty",
}
_EXAMPLES = {"_bytes_per_second": '"7GB/s"', "_per_second": "2.5e9", "_bytes": '"24GiB"'}
"""By the ends of names: names carry the unit of what they hold. The first that fits counts."""
_WITH_UNIT: dict[str, Callable[[str], float]] = {
    "_bytes_per_second": parse_rate,
    "_bytes": parse_bytes,
}
_WORDS = {
    "`str`": "a text in quotes",
    "`bool`": "true or false",
    "`int`": "a whole number",
    "`float`": "a number",
    "`array`": "a list",
    "`object`": "an object",
}

Name = Annotated[str, Meta(pattern=r"\S", description=_WHY["name"])]
Bytes = Annotated[int, Meta(ge=1, le=_MOST_BYTES, description=_WHY["_bytes"])]
PerSecond = Annotated[float, Meta(ge=LEAST_RATE, le=MOST_RATE, description=_WHY["_per_second"])]
Count = Annotated[int, Meta(ge=1, le=_MOST_OF_ONE_THING)]
Dollars = Annotated[float, Meta(ge=0, le=_MOST_DOLLARS, description=_WHY["_dollars"])]
Seconds = Annotated[float, Meta(gt=0, le=1, description=_WHY["_seconds"])]
Share = Annotated[float, Meta(ge=0, le=_MOST_SHARE, description=_WHY["_share"])]


def read_json(
    text: str,
    kind: type[T],
    *,
    where: str,
    version: int | None = None,
    has_units: bool = False,
    is_complete: bool = False,
) -> T:
    """Return the record in a JSON text; `where` begins the paths in messages.

    Args:
        version: what the object's "version" must be, where it has one.
        has_units: sizes and rates may be texts such as "24GiB" and "7GB/s".
        is_complete: fields that have a default are not left out either.

    Raises:
        ConfigError: it is no JSON, has a key twice or an unknown one, or a value does not fit.
    """
    found = parse_object(text, where=where)
    if version is not None:
        check_version(found, version, where=where)
        del found["version"]
    record = convert(_with_numbers(found, where) if has_units else found, kind, where=where)
    _refuse_other_keys(found, msgspec.to_builtins(record, str_keys=True), where, is_complete)
    return record


def convert(found: object, kind: type[T], *, where: str) -> T:
    """Return plain values as a record; keys it does not know are left out.

    Raises:
        ConfigError: a value is missing or does not fit.
    """
    try:
        return msgspec.convert(found, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise _refusal(str(error), found, where) from None


def check_fields(record: Any, where: str) -> None:
    """Refuse a record made in code with a value that its file may not hold either."""
    # The type checker does not see that classes can be hashed.
    for name, kind in _hints_of(type(record)).items():  # type: ignore[arg-type]
        convert(getattr(record, name), kind, where=f"{where}.{name}")


def read_text(path: str | pathlib.Path, what: str, *, remedy: str) -> str:
    """Return a file's text; `what` begins the message if it cannot be read."""
    try:
        return pathlib.Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(
            f"{what} {path} cannot be read", why=reason or str(error), remedy=remedy
        ) from error


def parse_object(text: str, *, where: str) -> dict[str, Any]:
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


def check_version(found: Mapping[str, object], version: int, *, where: str) -> None:
    """Refuse an object whose "version" is not the one this release reads."""
    one = found.get("version")
    if one != version or isinstance(one, bool):
        raise ConfigError(
            f"{where}.version is {shown(one) if 'version' in found else 'missing'}",
            why=f"this release reads version {version} of the format",
            remedy=f'write "version": {version} and the fields of that version',
        )


def _with_numbers(found: Any, where: str) -> Any:
    """Return plain values with the texts of sizes and rates read."""
    if isinstance(found, list):
        return [_with_numbers(one, f"{where}[{index}]") for index, one in enumerate(found)]
    if not isinstance(found, dict):
        return found
    read = {}
    for key, value in found.items():
        path = f"{where}.{key}"
        unit = _by_ending(_WITH_UNIT, key)
        if unit is not None and isinstance(value, str):
            try:
                value = unit(value)
            except ConfigError as error:
                raise ConfigError(
                    f"{path}: {error.what}", why=error.why, remedy=error.remedy
                ) from error
        elif unit is parse_bytes and isinstance(value, float) and value.is_integer():
            value = int(value)
        read[key] = _with_numbers(value, path)
    return read


def _refuse_other_keys(found: object, known: object, where: str, is_complete: bool) -> None:
    """Compare what was found with what was understood: every known key is in the latter."""
    if isinstance(found, dict) and isinstance(known, dict):
        for key, value in found.items():
            if key not in known:
                raise ConfigError(
                    f'{where} has the unknown key "{key}"',
                    why="a key that is not known would be without effect",
                    remedy=nearest_names(key, known),
                )
            _refuse_other_keys(value, known[key], f"{where}.{key}", is_complete)
        if is_complete and known.keys() - found.keys():
            raise _missing(min(known.keys() - found.keys()), found, where)
    elif isinstance(found, list) and isinstance(known, list | tuple) and found != known:
        for index, (one, other) in enumerate(zip(found, known, strict=False)):
            _refuse_other_keys(one, other, f"{where}[{index}]", is_complete)


def _missing(key: str, found: Mapping[str, object], where: str) -> ConfigError:
    remedy = f'add "{key}" to {where}'
    near = nearest_names(key, found)
    if near.startswith('write "'):  # there is one that may be meant for it
        remedy += f", if it is not there as {near.removeprefix('write ')}"
    return ConfigError(f"{where}.{key} is missing", why="it has no default", remedy=remedy)


def _refusal(says: str, found: Any, where: str) -> ConfigError:
    """Say msgspec's refusal in our words; it ends with a path, as in "- at `$.ssds[1].name`"."""
    says, _, path = says.partition(" - at ")
    for key, index in re.findall(r"\.(\w+)|\[(\d+)\]", path):
        found = found[key] if key else found[int(index)]
        where += f".{key}" if key else f"[{index}]"
    lacking = re.match(r"Object missing required field `(\w+)`", says)
    if lacking:
        return _missing(lacking[1], found, where)
    for theirs, ours in _WORDS.items():
        says = says.replace(theirs, ours)
    why = _by_ending(_WHY, where) if isinstance(found, str | int | float | None) else None
    example = _by_ending(_EXAMPLES, where)
    return ConfigError(
        f"{where} is {shown(found)}",
        why=why or says[:1].lower() + says[1:],
        remedy=f"write {example}, for example"
        if why and example
        else f"correct {where.rpartition('.')[2]}",
    )


def _by_ending(words: Mapping[str, T], name: str) -> T | None:
    return next((one for end, one in words.items() if name.endswith(end)), None)


@functools.cache
def _hints_of(kind: type) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def shown(value: object) -> str:
    """Print a wrong value as it stands in a file; of a long one only what it is."""
    # Python refuses to print whole numbers of thousands of digits.
    if isinstance(value, int) and abs(value) >= 10**40:
        return "a number of over 40 digits"
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= 60 else _kind_of(value)


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
