"""What drives count about themselves, and what life follows from it."""

import json
from typing import Any

import pytest

from lohan.hardware.drive_life import DriveWear, LifeSource, life_of, read_wear, wear_in
from lohan.units import TB


def smartctl(percent: Any, units: Any) -> str:
    """As smartctl 7.4 prints it, shortened."""
    return json.dumps(
        {
            "json_format_version": [1, 0],
            "smartctl": {"version": [7, 4], "exit_status": 0},
            "device": {"name": "/dev/nvme0n1", "type": "nvme", "protocol": "NVMe"},
            "model_name": "Some Drive 2TB",
            "nvme_smart_health_information_log": {
                "critical_warning": 0,
                "available_spare": 100,
                "percentage_used": percent,
                "data_units_read": 99887766,
                "data_units_written": units,
            },
        }
    )


def test_wear_is_read_and_a_life_follows_from_it() -> None:
    wear = wear_in(smartctl(12, 281_250_000))  # in units of 512,000 bytes
    assert wear == DriveWear(written_bytes=144 * TB, used_share=0.12)
    assert wear.life_bytes == 1200 * TB
    assert life_of(2 * TB, wear) == (1200 * TB, LifeSource.WEAR_COUNTER)


@pytest.mark.parametrize(("percent", "units"), [(4, 10**8), (0, 10**8), (50, 0)])
def test_a_counter_that_says_too_little_leaves_the_life_assumed(percent: int, units: int) -> None:
    wear = wear_in(smartctl(percent, units))
    assert wear is not None
    assert wear.life_bytes is None
    assert life_of(2 * TB, wear) == (1200 * TB, LifeSource.ASSUMED)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Smartctl open device: /dev/nvme0 failed: Permission denied",
        "[]",
        "null",
        json.dumps({"smartctl": {"exit_status": 2}}),
        json.dumps({"nvme_smart_health_information_log": None}),
        smartctl("12", 5),
        smartctl(12, -5),
        smartctl(True, 5),
        smartctl(12, 1.5),
    ],
)
def test_what_is_not_there_is_not_known(text: str) -> None:
    assert wear_in(text) is None
    assert life_of(1 * TB, wear_in(text)) == (600 * TB, LifeSource.ASSUMED)


def test_a_partition_asks_its_drive_and_what_is_no_device_nobody() -> None:
    asked: list[str] = []

    def ask(device: str) -> str:
        asked.append(device)
        return smartctl(10, 1000)

    assert read_wear("/dev/nvme1n1p3", ask) is not None
    assert read_wear("/dev/nvme0n1", ask) is not None
    assert read_wear("/dev/sda2", ask) is not None
    assert read_wear("tmpfs", ask) is None
    assert asked == ["/dev/nvme1n1", "/dev/nvme0n1", "/dev/sda2"]


def test_a_program_that_cannot_read_the_drive_is_no_error(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert read_wear("/dev/nvme0n1") is None  # it is not installed
    program = tmp_path / "smartctl"
    program.write_text("#!/bin/sh\necho 'Permission denied'\nexit 2\n")
    program.chmod(0o755)
    assert read_wear("/dev/nvme0n1") is None
    (tmp_path / "answer.json").write_text(smartctl(25, 1000))
    # Bit 6 of its exit code: the drive's log has old errors.
    program.write_text(f'#!/bin/sh\nread -r line < {tmp_path}/answer.json; echo "$line"; exit 64\n')
    found = read_wear("/dev/nvme0n1")
    assert found == DriveWear(written_bytes=512_000_000, used_share=0.25)
