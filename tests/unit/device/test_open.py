import pytest
import torch

from lohan.device import CpuDevice, EmulatedDevice, open_device
from lohan.errors import ConfigError, HardwareError


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: None)


def test_cpu_and_emulated_are_opened_by_name() -> None:
    with open_device("cpu", memory_bytes=1000) as device:
        assert isinstance(device, CpuDevice)
        assert device.memory_bytes == 1000
        assert device.reason == "'cpu' was asked for"
    with open_device(" Emulated ", memory_bytes=2000) as device:
        assert isinstance(device, EmulatedDevice)
        assert device.memory_bytes == 2000


@pytest.mark.usefixtures("without_gpu")
def test_without_a_gpu_the_cpu_is_chosen_and_the_reason_given() -> None:
    with open_device() as device:
        assert device.name == "cpu"
        assert "built without GPU support" in device.reason


@pytest.mark.usefixtures("without_gpu")
def test_asking_for_a_missing_gpu_says_why_and_what_to_do() -> None:
    with pytest.raises(HardwareError, match="built without GPU support") as caught:
        open_device("cuda:1")
    assert "GPU 1" in caught.value.what
    assert '"cpu"' in caught.value.remedy


def test_a_missing_driver_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    found = torch.device("xpu")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: found)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    with pytest.raises(HardwareError, match="no driver"):
        open_device("xpu")
    with pytest.raises(HardwareError, match="is built for xpu"):
        open_device("cuda:0")


@pytest.mark.parametrize("text", ["gpu", "cud", "cuda:", "cuda:-1", "cuda:x", "", "cpu:0"])
def test_unknown_names_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a device"):
        open_device(text)


def test_a_near_miss_names_the_known_word() -> None:
    with pytest.raises(ConfigError) as caught:
        open_device("emulate")
    assert caught.value.remedy.startswith('write "emulated"')


@pytest.mark.parametrize("memory_bytes", [0, -1])
def test_a_budget_of_nothing_is_refused(memory_bytes: int) -> None:
    with pytest.raises(ConfigError, match="budget"):
        open_device("cpu", memory_bytes=memory_bytes)
