import pytest
import torch

from lohan.device import CpuDevice, EmulatedDevice, open_device
from lohan.device.open import _own_index
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


@pytest.fixture
def three_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 3)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)


@pytest.mark.usefixtures("three_gpus")
@pytest.mark.parametrize(
    ("place", "num_here", "memory_bytes", "expected"),
    [(0, 1, None, None), (0, 3, None, 0), (2, 3, None, 2), (4, 6, 1 << 30, 1)],
)
def test_ranks_of_a_machine_have_a_gpu_each(
    place: int, num_here: int, memory_bytes: int | None, expected: int | None
) -> None:
    assert _own_index(place, num_here, memory_bytes) == expected


@pytest.mark.usefixtures("three_gpus")
def test_ranks_that_share_a_gpu_must_say_how_much_each_may_use() -> None:
    with pytest.raises(ConfigError, match=r"4 ranks on this machine have 3 GPU\(s\)"):
        _own_index(0, 4, None)


@pytest.mark.usefixtures("three_gpus")
def test_a_gpu_that_torch_was_told_to_use_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)
    assert _own_index(2, 3, None) is None
