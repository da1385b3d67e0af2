"""The random generators of Python, NumPy and PyTorch as JSON, and back. Never a pickle."""

import random
from typing import Any

import numpy as np
import torch


def random_state() -> dict[str, Any]:
    """The state of every generator a training run draws from."""
    version, internal, gauss = random.getstate()
    found: Any = np.random.get_state(legacy=False)
    state = {
        "python": {"version": version, "internal": list(internal), "gauss": gauss},
        "numpy": {
            "bit_generator": found["bit_generator"],
            "key": found["state"]["key"].tolist(),
            "pos": int(found["state"]["pos"]),
            "has_gauss": int(found["has_gauss"]),
            "gauss": float(found["gauss"]),
        },
        "torch_cpu": _to_hex(torch.random.get_rng_state()),
    }
    if torch.accelerator.is_available():
        gpus: Any = torch.get_device_module()
        state["torch_gpus"] = [_to_hex(one) for one in gpus.get_rng_state_all()]
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Put every generator back. GPUs that are not here any more are left out."""
    python = state["python"]
    random.setstate((python["version"], tuple(python["internal"]), python["gauss"]))
    numpy = state["numpy"]
    np.random.set_state(
        {
            "bit_generator": numpy["bit_generator"],
            "state": {"key": np.array(numpy["key"], dtype=np.uint32), "pos": numpy["pos"]},
            "has_gauss": numpy["has_gauss"],
            "gauss": numpy["gauss"],
        }
    )
    torch.random.set_rng_state(_from_hex(state["torch_cpu"]))
    if torch.accelerator.is_available():
        gpus: Any = torch.get_device_module()
        saved = state.get("torch_gpus", [])[: torch.accelerator.device_count()]
        for index, one in enumerate(saved):
            gpus.set_rng_state(_from_hex(one), index)


def _to_hex(state: torch.Tensor) -> str:
    return bytes(state.cpu().numpy()).hex()


def _from_hex(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
