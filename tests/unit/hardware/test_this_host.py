"""The machine this runs on, as it was measured: found without torch."""

import json
import pathlib

import pytest

from lohan.errors import ConfigError
from lohan.hardware import machine_named
from lohan.hardware.this_host import cpu_model, kept_machine, ram_total_bytes


@pytest.fixture
def cache(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "lohan").mkdir()
    return tmp_path / "lohan"


def keep(cache: pathlib.Path, name: str, day: int, num_drives: int = 1, **facts: object) -> None:
    machine = json.loads(machine_named(name).to_json())
    here = {"cpu_model": cpu_model(), "ram_total_bytes": ram_total_bytes()}
    kept = {
        "machine": machine,
        "measured_at": f"2026-05-{day:02}T00:00:00+00:00",
        "facts": {**here, "drives": [{}] * num_drives, **facts},
    }
    (cache / f"profile-{name}-{day}.json").write_text(json.dumps(kept))


def test_the_newest_profile_of_this_host_is_taken(cache: pathlib.Path) -> None:
    keep(cache, "desktop-4090", 1)
    keep(cache, "workstation-4090", 2, num_drives=2)
    keep(cache, "dgx-a100", 3, cpu_model="another")
    (cache / "profile-damaged.json").write_text("{")
    assert kept_machine().machine.name == "workstation-4090"
    assert kept_machine().measured_at.startswith("2026-05-02")
    assert kept_machine(1).machine.name == "desktop-4090"


def test_a_machine_that_was_not_measured_is_said_to_be(cache: pathlib.Path) -> None:
    keep(cache, "dgx-a100", 3, ram_total_bytes=1)
    with pytest.raises(ConfigError, match="has not been measured") as raised:
        kept_machine()
    assert "lohan profile --ssd DIR" in raised.value.remedy
