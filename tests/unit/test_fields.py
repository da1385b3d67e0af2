"""Strict reading of JSON, apart from any format."""

import json
import math
from dataclasses import dataclass, field
from typing import Any

import pytest

from lohan.errors import ConfigError
from lohan.fields import (
    Bytes,
    Count,
    Name,
    PerSecond,
    check_fields,
    check_version,
    convert,
    parse_object,
    read_json,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    name: Name
    sizes: tuple[int, ...] = ()
    rate_bytes_per_second: PerSecond = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    parts: tuple[Part, ...] = ()
    notes: dict[str, str] = field(default_factory=dict)
    num_parts: Count = 1
    used_bytes: Bytes = 1


def read(**found: Any) -> Whole:
    return read_json(
        json.dumps({"version": 1, **found}), Whole, where="file", version=1, has_units=True
    )


def test_an_object_is_parsed_and_anything_else_named() -> None:
    assert parse_object('{"a": {"b": [1]}}', where="file") == {"a": {"b": [1]}}
    for text, holds in (("1", "a number"), ('"x"', "a text"), ("null", "null"), ("true", "true")):
        with pytest.raises(ConfigError, match=f"file is not a JSON object: it holds {holds}"):
            parse_object(text, where="file")


def test_a_syntax_error_has_its_place() -> None:
    with pytest.raises(ConfigError, match="file is not JSON, at line 2 column 1"):
        parse_object('{"a": 1,\n}', where="file")


def test_a_repeated_key_is_refused_at_any_depth() -> None:
    with pytest.raises(ConfigError, match='has the key "b" twice'):
        parse_object('{"a": [{"b": 1, "b": 2}]}', where="file")


def test_an_unknown_key_gets_the_nearest_known_one_at_any_depth() -> None:
    with pytest.raises(ConfigError, match=r'file has the unknown key "part".*write "parts"'):
        read(part=[])
    with pytest.raises(ConfigError, match=r'file\.parts\[1\] has the unknown key "size".*"sizes"'):
        read(parts=[{"name": "a"}, {"name": "b", "size": []}])
    assert read(notes={"anything": "goes"}).notes == {"anything": "goes"}


def test_a_missing_field_says_where_to_add_it_and_what_may_be_meant_for_it() -> None:
    with pytest.raises(ConfigError, match=r'parts\[0\]\.name is missing.*add "name" to file') as e:
        read(parts=[{}])
    assert "if it is not there" not in str(e.value)
    with pytest.raises(ConfigError, match=r'add "name" to .*, if it is not there as "nam"'):
        read(parts=[{"nam": "x"}])


def test_a_complete_file_leaves_no_default_out() -> None:
    with pytest.raises(ConfigError, match=r"file\.notes is missing"):
        read_json('{"parts": []}', Whole, where="file", is_complete=True)


def test_sizes_and_rates_may_be_texts_with_units() -> None:
    found = read(
        parts=[{"name": "x", "sizes": [1], "rate_bytes_per_second": "7GB/s"}], used_bytes="2KiB"
    )
    assert found == Whole(
        parts=(Part(name="x", sizes=(1,), rate_bytes_per_second=7e9),), used_bytes=2048
    )
    assert read(used_bytes=2e3).used_bytes == 2000
    with pytest.raises(ConfigError, match=r"file\.used_bytes: '2 gigs' is not a size"):
        read(used_bytes="2 gigs")
    with pytest.raises(ConfigError, match=r'used_bytes is "2KiB"'):
        read_json('{"used_bytes": "2KiB"}', Whole, where="file")


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (0, "file.used_bytes is 0: a size is a whole number of bytes above zero and below 8 EiB"),
        (2**63, "below 8 EiB"),
        (1.5, "file.used_bytes is 1.5: a size"),
        (True, "file.used_bytes is true: a size"),
        (None, "file.used_bytes is null: a size"),
        (math.nan, "file.used_bytes is NaN: a size"),
        (10**400, "is a number of over 40 digits"),
        ([1], "file.used_bytes is [1]: expected a whole number, got a list"),
    ],
)
def test_a_value_that_does_not_fit_is_shown_with_its_path(value: object, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(used_bytes=value)
    assert says in str(caught.value)
    assert caught.value.remedy


def test_a_long_wrong_value_is_not_printed_whole() -> None:
    with pytest.raises(
        ConfigError, match=r"file\.parts\[0\]\.name is a list: expected a text"
    ) as e:
        read(parts=[{"name": ["x" * 10] * 100}])
    assert len(str(e.value)) < 200


def test_a_wrong_value_of_a_mapping_is_shown_with_the_mapping() -> None:
    with pytest.raises(ConfigError, match=r'file\.notes is \{"a": 1\}: expected a text'):
        read(notes={"a": 1})


def test_a_record_made_in_code_is_held_to_the_same() -> None:
    check_fields(Whole(parts=(Part(name="x"),)), "whole")
    with pytest.raises(ConfigError, match=r"whole\.num_parts is 0: expected a whole number >= 1"):
        check_fields(Whole(num_parts=0), "whole")
    with pytest.raises(ConfigError, match=r"part\.rate_bytes_per_second is 1.*unit left out"):
        check_fields(Part(name="x", rate_bytes_per_second=1), "part")


def test_unknown_keys_are_left_out_where_that_is_asked_for() -> None:
    assert convert({"name": "x", "more": 1}, Part, where="part") == Part(name="x")


@pytest.mark.parametrize("version", [0, 2, "1", True, None, 1.5])
def test_another_version_is_refused(version: object) -> None:
    with pytest.raises(ConfigError, match="this release reads version 1"):
        check_version({"version": version}, 1, where="file")
    with pytest.raises(ConfigError, match="version is missing"):
        check_version({}, 1, where="file")
    check_version({"version": 1}, 1, where="file")
