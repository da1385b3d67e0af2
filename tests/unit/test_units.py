"""Sizes, rates, durations and counts: parsing, printing, and the way back."""

import math
import re
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lohan import units
from lohan.errors import ConfigError
from lohan.units import (
    format_bytes,
    format_bytes_decimal,
    format_count,
    format_rate,
    format_seconds,
    parse_bytes,
    parse_rate,
)

SCALES = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "PB": 10**15,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
    "PiB": 2**50,
}


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("8GiB", 8 * 2**30),
        ("64GB", 64 * 10**9),
        ("64 gb", 64 * 10**9),
        ("  512 mib ", 512 * 2**20),
        ("1.5TB", 1_500_000_000_000),
        ("0", 0),
        ("4096", 4096),
        ("1e3 KB", 10**6),
        ("2.5e+3MB", 2_500_000_000),
        (12345, 12345),
        (0, 0),
    ],
)
def test_sizes_are_read_as_people_write_them(text: str | int, size_bytes: int) -> None:
    assert parse_bytes(text) == size_bytes


@pytest.mark.parametrize(
    "wrong",
    [
        *("", " ", "GiB", "8 giga", "-8GiB", "8GiB/s", "8,5GB", "0x10", "nan", "inf", "8 G B"),
        *(
            "1e999",
            "1e999999999GB",
            "9" * 5000,
            "\u0668GB",
            "8 \u00b5B",
            "--8",
            "1.GB",
            ".5GB",
            "1_000",
        ),
        *(-1, True, None, math.nan, math.inf, -1.5, [8]),
    ],
)
def test_what_is_no_size_is_refused_with_what_was_written(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=re.escape(repr(wrong))) as caught:
        parse_bytes(wrong)
    assert caught.value.remedy


@pytest.mark.parametrize("text", ["8Gb", "8Kb", "8Mib", "8 Tb"])
def test_bits_are_not_taken_for_bytes(text: str) -> None:
    with pytest.raises(ConfigError, match="small b means bits"):
        parse_bytes(text)
    with pytest.raises(ConfigError, match="small b means bits"):
        parse_rate(f"{text}/s")


@pytest.mark.parametrize(
    ("rate", "bytes_per_second"),
    [
        ("7GB/s", 7e9),
        ("900 MB/s", 9e8),
        ("1.7gb/sec", 1.7e9),
        ("2GiB / second", 2.0 * 2**30),
        (7e9, 7e9),
        (5, 5.0),
    ],
)
def test_rates_are_read_as_people_write_them(rate: str | float, bytes_per_second: float) -> None:
    assert parse_rate(rate) == bytes_per_second


@pytest.mark.parametrize(
    "wrong",
    [
        *("", "7GB", "7GB/h", "/s", "GB/s", "0GB/s", "-7GB/s", "7GB/s/s", "1e400B/s", "fast/s"),
        *(0, -1, math.nan, math.inf, 10**400, -(10**400), True, None),
    ],
)
def test_what_is_no_rate_is_refused_with_what_was_written(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=re.escape(repr(wrong))) as caught:
        parse_rate(wrong)
    assert "7GB/s" in caught.value.remedy


@given(st.integers(0, 10**24), st.sampled_from(sorted(SCALES)))
def test_whole_numbers_are_exact_at_any_size(number: int, unit: str) -> None:
    assert parse_bytes(f"{number}{unit}") == number * SCALES[unit]
    assert parse_bytes(f" {number} {unit.lower()}") == number * SCALES[unit]


@given(st.integers(0, 10**12), st.integers(0, 999_999), st.sampled_from(sorted(SCALES)))
def test_fractions_are_rounded_once_to_the_nearest_byte(whole: int, part: int, unit: str) -> None:
    text = f"{whole}.{part:06d}"
    assert parse_bytes(text + unit) == round(Fraction(text) * SCALES[unit])


@given(st.text(max_size=20))
def test_any_text_is_a_size_or_a_config_error(text: str) -> None:
    for parse in (parse_bytes, parse_rate):
        try:
            said = parse(text)
        except ConfigError as error:
            said = str(error)
        assert repr(text) in said if isinstance(said, str) else said >= 0


def last_digit(text: str) -> float:
    """The value of half a unit in the last printed digit: what printing may round away."""
    number, unit = text.removesuffix("/s").split(" ")
    return SCALES[unit] * (0.05 if "." in number else 0.5)


SIZES = st.one_of(st.integers(0, 2**20), st.integers(0, 2**62), st.floats(1, 1e18))


@given(SIZES)
def test_a_printed_size_reads_back_within_its_last_digit(size: float) -> None:
    for printed in (format_bytes(size), format_bytes_decimal(size)):
        assert abs(parse_bytes(printed) - size) <= last_digit(printed) * 1.001 + 0.5
        number = float(printed.split(" ")[0])
        assert number < 1024 or printed.endswith(("PiB", "PB"))


@given(st.floats(1, 1e18))
def test_a_printed_rate_reads_back_within_its_last_digit(rate: float) -> None:
    printed = format_rate(rate)
    assert abs(parse_rate(printed) - rate) <= last_digit(printed) * 1.001


@given(st.integers(0, 1023))
def test_bytes_below_a_kilobyte_are_printed_exactly(size: int) -> None:
    assert format_bytes(size) == f"{size} B"
    assert parse_bytes(format_bytes(size)) == size


@pytest.mark.parametrize(
    ("size_bytes", "binary", "decimal"),
    [
        (0, "0 B", "0 B"),
        (1023, "1023 B", "1.0 KB"),
        (1024, "1.0 KiB", "1.0 KB"),
        (999_949, "976.5 KiB", "999.9 KB"),
        (999_950, "976.5 KiB", "1.0 MB"),
        (2**20 - 1, "1.0 MiB", "1.0 MB"),
        (153_760_829_850, "143.2 GiB", "153.8 GB"),
        (3_840_000_000_000, "3.5 TiB", "3.8 TB"),
        (5 * 10**18, "4440.9 PiB", "5000.0 PB"),
        (-(2**31), "-2.0 GiB", "-2.1 GB"),
        (0.5, "0.5 B", "0.5 B"),
        (math.inf, "inf B", "inf B"),
        (math.nan, "nan B", "nan B"),
    ],
)
def test_sizes_are_printed_with_one_digit(size_bytes: float, binary: str, decimal: str) -> None:
    assert format_bytes(size_bytes) == binary
    assert format_bytes_decimal(size_bytes) == decimal
    assert format_rate(size_bytes) == f"{decimal}/s"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (3e-9, "3 ns"),
        (0.9994e-6, "999 ns"),
        (0.9996e-6, "1.0 us"),
        (6.46e-6, "6.5 us"),
        (840e-6, "840 us"),
        (0.9996e-3, "1.0 ms"),
        (3.2e-3, "3.2 ms"),
        (0.99994, "999.9 ms"),
        (0.99996, "1.0 s"),
        (12.44, "12.4 s"),
        (119.94, "119.9 s"),
        (119.96, "2m 00s"),
        (150, "2m 30s"),
        (3599.4, "59m 59s"),
        (3599.6, "1h 00m"),
        (3900, "1h 05m"),
        (48 * 3600 - 31, "47h 59m"),
        (48 * 3600 - 29, "2d 00h"),
        (76 * 3600, "3d 04h"),
        (-1.5, "-1.5 s"),
        (math.inf, "inf s"),
        (math.nan, "nan s"),
    ],
)
def test_durations_are_printed_in_the_unit_people_think_in(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


SECONDS_OF = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60, "h": 3600, "d": 86400}


@given(st.floats(1e-9, 1e8))
def test_a_printed_duration_is_right_within_a_few_percent(seconds: float) -> None:
    pieces = re.findall(r"([\d.]+) ?(ns|us|ms|s|m|h|d)", format_seconds(seconds))
    printed = sum(float(number) * SECONDS_OF[unit] for number, unit in pieces)
    # Few digits only where nanoseconds end; above a microsecond at most half a unit of 1000.
    assert printed == pytest.approx(seconds, rel=0.5 if seconds < 1e-7 else 0.05)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0"),
        (999, "999"),
        (999.5, "1K"),
        (1234, "1.23K"),
        (99_949, "99.9K"),
        (99_951, "100K"),
        (135e6, "135M"),
        (12.85e9, "12.8B"),
        (174.59e9, "175B"),
        (999.6e9, "1T"),
        (1.2e12, "1.2T"),
        (5e15, "5000T"),
        (-135e6, "-135M"),
        (-999_400, "-999K"),
        (math.inf, "inf"),
    ],
)
def test_counts_are_printed_with_three_digits(count: float, text: str) -> None:
    assert format_count(count) == text


def test_constants_agree_with_what_is_parsed() -> None:
    for unit, scale in SCALES.items():
        if unit != "B":
            assert getattr(units, unit.upper()) == scale == parse_bytes(f"1{unit}")
