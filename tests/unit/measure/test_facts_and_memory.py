"""What hardware this is, and how main memory is shared with a device that has none."""

import dataclasses
import os
import pathlib

import pytest

from lohan.device import CpuDevice, EmulatedDevice, EmulatedRates
from lohan.errors import DoesNotFit
from lohan.hardware import AvailableRam
from lohan.measure.as_machine import memory_to_plan_with
from lohan.measure.facts import machine_facts
from lohan.ssd import check_directories
from lohan.units import GIB, MIB

AVAILABLE = AvailableRam(bytes=20 * GIB, reason="20 GiB are free")


def fake_root(root: pathlib.Path) -> pathlib.Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/cpuinfo").write_text("processor\t: 0\nmodel name\t: Fast  One\n")
    (root / "proc/meminfo").write_text("MemTotal:  1024 kB\n")
    (root / "proc/self/mountinfo").write_text(
        "1 0 8:1 / / rw - ext4 /dev/other rw\n2 0 259:3 / /mnt rw shared:1 - xfs /dev/drive0p3 rw\n"
    )
    drive = root / "sys/devices/drive0"
    (drive / "device").mkdir(parents=True)
    (drive / "device/model").write_text("Very Fast SSD    \n")
    (drive / "drive0p3").mkdir()
    blocks = root / "sys/dev/block"
    blocks.mkdir(parents=True)
    (blocks / "259:3").symlink_to("../../devices/drive0/drive0p3")
    return root


def test_facts_name_processor_memory_device_and_drives(tmp_path: pathlib.Path) -> None:
    (report,) = check_directories([tmp_path])
    report = dataclasses.replace(report, device=os.makedev(259, 3), filesystem="xfs", total_bytes=5)
    with CpuDevice() as device:
        facts = machine_facts(device, [report], root=fake_root(tmp_path / "root"))
    assert facts.cpu_model == "Fast  One"
    assert facts.ram_total_bytes == MIB
    assert facts.device == "cpu"
    assert facts.device_hardware == "Fast  One"
    (drive,) = facts.drives
    assert (drive.device, drive.model, drive.total_bytes) == ("/dev/drive0p3", "Very Fast SSD", 5)
    assert drive.name == "Very Fast SSD"


def test_facts_of_a_system_that_says_little_are_still_facts(tmp_path: pathlib.Path) -> None:
    reports = check_directories([tmp_path])
    with CpuDevice() as device:
        facts = machine_facts(device, reports, root=tmp_path / "nothing")
    assert facts.cpu_model
    assert facts.drives[0].name
    assert facts.ram_total_bytes == 0


def test_emulated_devices_of_other_rates_are_other_hardware(tmp_path: pathlib.Path) -> None:
    reports, names = check_directories([tmp_path]), []
    for rates in (
        EmulatedRates(),
        EmulatedRates(flops_per_second=1e12),
        EmulatedRates(flops_per_second=2e12),
        EmulatedRates(gpu_to_ram_bytes_per_second=2e12),
    ):
        with EmulatedDevice(rates=rates) as device:
            names.append(machine_facts(device, reports).device_hardware)
    assert len(set(names)) == 4
    assert names[1] == "emulation at - - 1e+12 -"


def test_this_machine_has_facts(tmp_path: pathlib.Path) -> None:
    with CpuDevice() as device:
        facts = machine_facts(device, check_directories([tmp_path]))
    assert facts.num_cores >= 1
    assert facts.ram_total_bytes > 0


def test_a_device_without_memory_of_its_own_takes_half() -> None:
    with CpuDevice() as device:
        ram, gpu, why = memory_to_plan_with(device, None, None, available=AVAILABLE)
    assert (ram, gpu) == (10 * GIB, 10 * GIB)
    assert "20 GiB are free" in why
    assert "stand in for GPU memory" in why


def test_budgets_that_were_given_are_kept() -> None:
    with CpuDevice() as device:
        assert memory_to_plan_with(device, 6 * GIB, None, available=AVAILABLE)[:2] == (
            6 * GIB,
            14 * GIB,
        )
        assert memory_to_plan_with(device, None, 5 * GIB, available=AVAILABLE)[:2] == (
            15 * GIB,
            5 * GIB,
        )
        both = memory_to_plan_with(device, 6 * GIB, 5 * GIB, available=AVAILABLE)
    assert both == (6 * GIB, 5 * GIB, "as asked for")


def test_a_device_with_a_budget_leaves_the_rest() -> None:
    with EmulatedDevice(memory_bytes=GIB) as device:
        assert memory_to_plan_with(device, None, None, available=AVAILABLE)[:2] == (19 * GIB, GIB)


def test_too_little_memory_is_refused_with_its_reason() -> None:
    with CpuDevice() as device:
        for available, gpu_bytes in ((100 * MIB, None), (20 * GIB, 20 * GIB)):
            left = AvailableRam(bytes=available, reason="the cgroup says so")
            with pytest.raises(DoesNotFit, match="the cgroup says so"):
                memory_to_plan_with(device, None, gpu_bytes, available=left)


def test_without_an_answer_the_system_is_asked() -> None:
    with CpuDevice() as device:
        ram, gpu, why = memory_to_plan_with(device, None, None)
    assert ram > 0
    assert gpu > 0
    assert why
