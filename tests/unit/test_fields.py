"""Strict reading of JSON objects, apart from any format."""

import pytest

from lohan.errors import ConfigError
from lohan.fields import Fields, check_version, parse_object

KNOWN = ("version", "name", "sizes", "rate_bytes_per_second")


def fields(**found: object) -> Fields:
    return Fields(found, where="file.part", known=KNOWN)


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


def test_an_unknown_key_gets_the_nearest_known_one() -> None:
    with pytest.raises(ConfigError, match=r'file\.part has the unknown key "nam".*write "name"'):
        fields(nam="x")


def test_what_is_no_object_is_refused_with_the_keys_it_should_have() -> None:
    with pytest.raises(ConfigError, match=r'holds a list: an object is expected.*"name": \.\.\.'):
        Fields([1], where="file.part", known=KNOWN)


def test_fields_are_read_by_kind() -> None:
    found = fields(name="x", sizes=[1], rate_bytes_per_second="7GB/s")
    assert found.text("name") == "x"
    assert found.objects("sizes") == [1]
    assert found.bytes_per_second("rate_bytes_per_second", example='"1GB/s"') == 7e9
    assert found.has("name")
    assert not found.has("version")


def test_a_missing_field_says_where_to_add_it() -> None:
    with pytest.raises(ConfigError, match=r'file\.part\.name is missing.*add "name" to file\.part'):
        fields().text("name")


def test_a_long_wrong_value_is_not_printed_whole() -> None:
    with pytest.raises(ConfigError, match=r"file\.part\.name is a list: a text") as caught:
        fields(name=["x" * 10] * 100).text("name")
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("version", [0, 2, "1", True, None, 1.5])
def test_another_version_is_refused(version: object) -> None:
    with pytest.raises(ConfigError, match="this release reads version 1"):
        check_version(fields(version=version), 1)
    check_version(fields(version=1), 1)
