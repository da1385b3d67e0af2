"""Profiles: JSON there and back, kept and found again, and every reason not to use one."""

import json
import pathlib
from dataclasses import replace
from datetime import timedelta

import pytest

from lohan.errors import ConfigError
from lohan.measure import (
    MOST_AGE,
    MeasuredMachine,
    cache_directory,
    load_profile,
    profile_path,
    save_profile,
)
from support.profiles import MEASURED_AT, drive, profile

NOW = MEASURED_AT + timedelta(days=1)


def test_a_profile_survives_json() -> None:
    assert MeasuredMachine.from_json(profile().to_json()) == profile()


def test_a_drives_weight_is_its_rate_there_and_back_at_what_it_holds() -> None:
    assert drive("/a", read=4e9, write=2e9, lasting=1e9).weight == pytest.approx(0.8e9)
    assert drive("/a", read=4e9, write=1e9, lasting=3e9).weight == pytest.approx(0.8e9)
    assert profile().weights == tuple(one.weight for one in profile().drives)
    assert profile().settings == tuple(one.settings for one in profile().drives)


def test_a_kept_profile_is_found_again(tmp_path: pathlib.Path) -> None:
    directory = tmp_path / "cache" / "lohan"
    path = save_profile(profile(), directory=directory)
    assert path.parent == directory
    assert path.parent.stat().st_mode & 0o077 == 0
    found = load_profile(profile().facts, directory=directory, now=NOW)
    assert found.profile == profile()
    assert str(path) in found.reason
    assert [one.name for one in directory.iterdir()] == [path.name]


def test_other_hardware_is_not_measured_yet(tmp_path: pathlib.Path) -> None:
    save_profile(profile(), directory=tmp_path)
    facts = profile().facts
    others = [
        replace(facts, cpu_model="Slow One"),
        replace(facts, num_cores=4),
        replace(facts, ram_total_bytes=1),
        replace(facts, device_hardware="Small GPU"),
        replace(facts, drives=facts.drives[:1]),
        replace(facts, drives=(facts.drives[0], replace(facts.drives[1], device="/dev/b"))),
    ]
    for other in others:
        found = load_profile(other, directory=tmp_path, now=NOW)
        assert found.profile is None
        assert found.reason == "this hardware has not been measured yet (1 of other hardware)"
    assert "yet" in load_profile(facts, directory=tmp_path / "none", now=NOW).reason


def test_an_old_profile_is_not_used(tmp_path: pathlib.Path) -> None:
    save_profile(profile(), directory=tmp_path)
    facts = profile().facts
    assert load_profile(facts, directory=tmp_path, now=MEASURED_AT + MOST_AGE).profile
    late = load_profile(facts, directory=tmp_path, now=MEASURED_AT + MOST_AGE + timedelta(hours=30))
    assert late.profile is None
    assert "31 days old" in late.reason
    early = load_profile(facts, directory=tmp_path, now=MEASURED_AT - timedelta(days=2))
    assert early.profile is None
    assert "still to come" in early.reason


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"version": 2}',
        '{"version": 1}',
        "null",
        "\ud83d".encode("utf-8", "surrogatepass"),
    ],
)
def test_a_damaged_profile_is_not_used_and_said(tmp_path: pathlib.Path, text: str | bytes) -> None:
    path = profile_path(profile().facts, directory=tmp_path)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    found = load_profile(profile().facts, directory=tmp_path, now=NOW)
    assert found.profile is None
    assert str(path) in found.reason


def damaged() -> list[dict[str, object]]:
    """Every field of a profile missing once, and once holding something else."""
    found = []
    whole = json.loads(profile().to_json())
    for key in whole:
        without = {name: value for name, value in whole.items() if name != key}
        found += [without, {**whole, key: [[]]}]
        if key != "sustained_seconds":  # None where long writes were not asked for
            found.append({**whole, key: None})
    found.append({**whole, "updates": {"samples": []}})
    found.append({**whole, "updates": {"samples": [0.0]}})
    found.append({**whole, "updates": {"samples": [float("nan")]}})
    return found


@pytest.mark.parametrize("fields", damaged())
def test_a_missing_or_wrong_field_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        MeasuredMachine.from_json(json.dumps(fields), where="file")


def test_a_file_moved_from_other_hardware_is_not_used(tmp_path: pathlib.Path) -> None:
    moved = replace(profile(), facts=replace(profile().facts, num_cores=3))
    path = save_profile(moved, directory=tmp_path)
    path.rename(profile_path(profile().facts, directory=tmp_path))
    found = load_profile(profile().facts, directory=tmp_path, now=NOW)
    assert found.profile is None
    assert "other hardware" in found.reason


def test_a_place_that_cannot_be_read_or_written_is_said(tmp_path: pathlib.Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    with pytest.raises(ConfigError, match="cannot be kept"):
        save_profile(profile(), directory=blocked)
    assert load_profile(profile().facts, directory=blocked).profile is None
    profile_path(profile().facts, directory=tmp_path).mkdir()
    assert "cannot be read" in load_profile(profile().facts, directory=tmp_path).reason
    with pytest.raises(ConfigError, match="cannot be kept"):
        save_profile(profile(), directory=tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


def test_profiles_lie_where_caches_lie(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_directory() == tmp_path / "lohan"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_directory() == tmp_path / "home" / ".cache" / "lohan"


def test_a_user_without_a_home_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> pathlib.Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(pathlib.Path, "home", refuse)
    with pytest.raises(ConfigError, match="no place for profiles"):
        cache_directory()
    assert "no place" in load_profile(profile().facts).reason
