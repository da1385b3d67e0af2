"""The test accelerator: builds it, loads it into this process, gives torch its device module.

A torch device of its own (tests/accelerator/device): streams are threads, kernels run later, freed
memory is poisoned, sides cannot be mixed. torch can be given one such device per process, and has
it as its accelerator from then on: tests that use it run in processes of their own, which
`tests/test_accelerator.py` starts with `LOADS` set in their environment.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import torch

LOADS = "LOHAN_TEST_ACCELERATOR"
"""Set in the environment of test processes that load it."""
NAME = "testgpu"
_SOURCES = Path(__file__).parents[1] / "accelerator" / "device"
_COMPUTE = 0
"""The default stream, which computes."""


def is_loaded() -> bool:
    return hasattr(torch, NAME)


def why_absent() -> str | None:
    """Why it cannot be built here, or None."""
    if _compiler() is None:
        return "there is no C++ compiler (c++, g++ or clang++) to build the test accelerator with"
    if not (_torch() / "include" / "ATen" / "ATen.h").exists():
        return "the installed torch has no C++ headers to build the test accelerator against"
    return None


def _compiler() -> str | None:
    return next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)


def _torch() -> Path:
    return Path(torch.__file__).parent


def built() -> Path:
    """The library, made if need be; kept for this torch, these sources and this compiler."""
    places = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(places) / "lohan-test-accelerator"
    folder.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256(f"{torch.__version__} {_compiler()}".encode())
    for path in sorted(_SOURCES.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    library = folder / f"{NAME}-torch-{torch.__version__}-{digest.hexdigest()[:16]}.so"
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of several test processes, one builds
        if not library.exists():
            for old in folder.glob(f"{NAME}-torch-{torch.__version__}-*.so"):
                old.unlink()
            _build(library)
    return library


def _build(library: Path) -> None:
    compiler, place = _compiler(), _torch()
    assert compiler is not None
    part = library.with_suffix(".part")
    subprocess.run(
        [
            *(compiler, "-O1", "-std=c++20", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread"),
            *("-o", part, _SOURCES / "device.cpp"),
            *("-isystem", place / "include"),
            *("-isystem", place / "include" / "torch" / "csrc" / "api" / "include"),
            f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
            *(f"-L{place / 'lib'}", "-ltorch_cpu", "-ltorch", "-lc10"),
            f"-Wl,-rpath,{place / 'lib'}",
        ],
        check=True,
    )
    part.rename(library)


def load() -> None:
    """Make it torch's accelerator in this process. Before the first backward pass."""
    if is_loaded():
        return
    torch.ops.load_library(built())
    torch.utils.rename_privateuse1_backend(NAME)
    calls().take_cpu_kernels()
    module = _device_module()
    torch._register_device_module(NAME, module)
    sys.modules[f"torch.{NAME}"] = module
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    # torch starts a thread for its backward passes in the first one, which nobody is to count.
    torch.ones((), device=NAME, requires_grad=True).backward()


def _device_module() -> types.ModuleType:
    own, common = calls(), torch.accelerator
    module = types.ModuleType(f"torch.{NAME}")

    def index_of(device: Any) -> Any:
        return device if device is None or isinstance(device, int) else device.index

    fraction = [1.0]

    def set_fraction(share: float, device: Any = None) -> None:
        fraction[0] = share
        own.set_limit(int(share * common.get_memory_info()[1]))

    given = {
        "_is_in_bad_fork": lambda: False,
        "current_device": common.current_device_index,
        "current_stream": common.current_stream,
        "device": lambda device: common.device_index(index_of(device)),
        "device_count": lambda: 1,
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
        "get_device_name": lambda device=None: "test accelerator",
        "get_rng_state": lambda device=None: own.rng_state(),
        "get_rng_state_all": lambda: [own.rng_state()],
        "host_register": own.host_register,
        "host_unregister": own.host_unregister,
        "is_available": lambda: True,
        "is_bf16_supported": lambda including_emulation=True: True,
        "is_initialized": lambda: True,
        "manual_seed": lambda seed: own.seed(seed & (2**63 - 1)),
        "manual_seed_all": lambda seed: own.seed(seed & (2**63 - 1)),
        "mem_get_info": common.get_memory_info,
        "get_per_process_memory_fraction": lambda device=None: fraction[0],
        "set_device": lambda device: None,
        "set_per_process_memory_fraction": set_fraction,
        "set_rng_state": lambda state, device=None: own.set_rng_state(state),
        "synchronize": common.synchronize,
    }
    for name, function in given.items():
        setattr(module, name, function)
    return module


def calls() -> Any:
    """What tests steer it with: `hold`, `let_go`, `set_delay`, `fail`, ... of device.cpp."""
    return getattr(torch.ops, NAME)


def reset() -> None:
    """As if new: no error, no delay of compute, no limit."""
    calls().let_go(_COMPUTE)
    calls().set_delay(_COMPUTE, 0)
    calls().clear_error()
    torch.accelerator.synchronize()
    calls().clear_error()
    calls().set_limit(torch.accelerator.get_memory_info()[1])
