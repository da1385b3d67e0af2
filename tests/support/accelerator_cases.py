"""Cases of the engine on the test accelerator."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from support import accelerator
from support.engine_runs import EngineCase
from support.families import FAMILIES
from support.tiny_models import LOSS_FUNCTIONS, TINY_MODELS, TinyModel

# Attention with a mask, or with a bias of its own, leaves its seed and offset in main memory.
PADDED = ("llama", "gpt2", "qwen3", "t5")
PACKED = ("llama_packed", "gpt2_packed", "qwen3_packed")
# Experts take as many tokens as the router sends them; complex numbers turn queries and keys.
ODD_KERNELS = ("qwen3-moe", "z-image")


def _unmasked(model: str) -> Any:
    tiny = TINY_MODELS[model]

    def batch(seed: int, dtype: torch.dtype) -> dict[str, Any]:
        given = tiny.batch(seed, dtype)
        del given["attention_mask"]
        return given

    return replace(tiny, batch=batch)


for name in PACKED:
    TINY_MODELS[name] = _unmasked(name.removesuffix("_packed"))

for name in ODD_KERNELS:
    family = FAMILIES[name]
    TINY_MODELS[name] = TinyModel(
        build=lambda _, build=family.build: build(),
        batch=lambda seed, _, batch=family.batch: batch(seed),
        runs=[],
    )
    LOSS_FUNCTIONS[name] = family.loss_fn


def on_accelerator(**given: Any) -> EngineCase:
    return EngineCase(device=accelerator.NAME, residents=False, num_steps=3, **given)


def parameters(cases: list[EngineCase]) -> list[Any]:
    """For `parametrize`."""
    return [
        pytest.param(
            case,
            id=f"{case.model}-{case.choice}-{case.num_micro_batches}-{case.max_grad_norm}",
        )
        for case in cases
    ]


@contextmanager
def slow_compute(microseconds: int = 200) -> Iterator[None]:
    """Every kernel comes late: whoever does not wait for it is early for sure."""
    accelerator.calls().set_delay(0, microseconds)
    try:
        yield
    finally:
        accelerator.calls().set_delay(0, 0)
