"""The rows of the table of vendors, on a stand-in for the runtime library of CUDA."""

import ast
import pathlib
import re

import pytest
import torch

from lohan.device import vendors
from lohan.device.vendors import vendor_of
from lohan.errors import HardwareError

SOURCE = pathlib.Path(__file__).parents[3] / "src" / "lohan"
CPU = torch.device("cpu")


class Runtime:
    """What is used of it."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.refusal = 0

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        if not self.refusal:
            self.registered[address] = nbytes
        return self.refusal

    def cudaHostUnregister(self, address: int) -> int:
        return 0 if self.registered.pop(address, None) else 713

    def cudaGetErrorString(self, error: int) -> str:
        return "out of memory" if error == 2 else "not registered"


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    return runtime


def test_cuda_pins_exactly_what_is_asked_and_says_why_it_does_not(runtime: Runtime) -> None:
    cuda = vendor_of("cuda")
    cuda.lock_range(CPU, 4096, 12345)
    assert runtime.registered == {4096: 12345}
    cuda.unlock_range(CPU, 4096)
    with pytest.raises(HardwareError, match=r"unpinning 0x1000 .* not registered \(error 713\)"):
        cuda.unlock_range(CPU, 4096)
    runtime.refusal = 2
    with pytest.raises(HardwareError, match=r"4\.0 KiB .* out of memory \(error 2\)"):
        cuda.lock_range(CPU, 4096, 4096)
    assert runtime.registered == {}


def test_waiting_for_cuda_does_not_spin() -> None:
    assert vendor_of("cuda").event_settings == {"blocking": True}


def test_the_allocator_is_set_unless_the_user_has(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", given.append)
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    vendor_of("cuda").set_allocator()
    vendor_of("xpu").set_allocator()
    assert given == ["expandable_segments:True"]
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
    vendor_of("cuda").set_allocator()
    assert len(given) == 1


def test_a_card_keeps_a_reserve_for_what_torch_does_not_allocate() -> None:
    assert vendor_of("cuda").reserve_bytes >= 600_000_000
    assert vendor_of("xpu").reserve_bytes >= 600_000_000


def test_a_kind_whose_module_cannot_pin_says_so() -> None:
    with pytest.raises(HardwareError, match="no call that pins memory in place for cpu"):
        vendor_of("unheard_of").lock_range(CPU, 4096, 4096)
    assert vendors.KINDS == ("cuda", "xpu")


def named_in_code(path: pathlib.Path) -> list[str]:
    """Return identifiers and short strings of a file that name CUDA; prose is free to."""
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Name):
            names.append(node.id)
        elif isinstance(node, ast.Attribute):
            names.append(node.attr)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names += [alias.name for alias in node.names]
            names.append(getattr(node, "module", None) or "")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names += re.findall(r"^\s*cuda(?::\d+)?\s*$", node.value)
    return [name for name in names if "cuda" in name.lower()]


@pytest.mark.parametrize(
    "path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE))
)
def test_cuda_is_named_in_one_file_only(path: pathlib.Path) -> None:
    if path != SOURCE / "device" / "vendors.py":
        assert not named_in_code(path), "ask the device instead"


def test_native_code_does_not_name_cuda() -> None:
    native = SOURCE.parents[1] / "native"
    for path in native.rglob("*"):
        if path.suffix in (".cpp", ".h", ".hpp", ".cu"):
            assert not re.search(r"#include\s*[<\"]cuda", path.read_text()), path
