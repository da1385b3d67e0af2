"""Runs within the least budgets there are: a refusal names them, and they change no bit."""

import copy
import re
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import transformers

from lohan.engine.attach import attach_engine
from lohan.engine.engine import Engine
from lohan.engine.options import Options
from lohan.errors import DoesNotFit
from lohan.optimizer.torch_optimizer import AdamW
from lohan.units import KIB, MIB, parse_bytes
from support.in_memory_training import plain_end
from support.small_machines import small_machine

NUM_STEPS = 3


def build(*, is_tied: bool) -> torch.nn.Module:
    """Some blocks large enough to be updated in many pieces."""
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=6144,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=is_tied,
    )
    return transformers.LlamaForCausalLM(config).to(torch.bfloat16).train()


def batches(step: int) -> list[dict[str, torch.Tensor]]:
    found = []
    for number in range(2):
        generator = torch.Generator().manual_seed(10 * step + number)
        tokens = torch.randint(0, 6144, (1, 16), generator=generator)
        found.append({"input_ids": tokens, "labels": tokens})
    return found


def attach(
    model: torch.nn.Module,
    directory: Path,
    *,
    ram_bytes: int,
    gpu_bytes: int | None,
    device: str,
    max_grad_norm: float | None = 1.0,
) -> Engine:
    optimizer = AdamW(model.parameters(), lr=1e-3, max_grad_norm=max_grad_norm)
    return attach_engine(
        model,
        optimizer,
        Options(
            ssd=[directory],
            ram_bytes=ram_bytes,
            gpu_bytes=gpu_bytes,
            machine=small_machine(),
            device=device,
            largest_step=batches(0),
            num_threads=1,
        ),
    )


def named_least(refusal: DoesNotFit) -> dict[str, int]:
    found = re.findall(r'(ram|gpu)="([^"]+)"', refusal.remedy)
    assert found, refusal
    return {f"{name}_bytes": parse_bytes(text) for name, text in found}


def least_of(model: torch.nn.Module, directory: Path, **options: Any) -> dict[str, int | None]:
    with pytest.raises(DoesNotFit) as refused:
        attach(model, directory, **options)
    return {"gpu_bytes": None, **named_least(refused.value)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device", "gpu_bytes"), [("cpu", None), ("cpu", 64 * KIB), ("emulated", 64 * KIB)]
)
@pytest.mark.parametrize(("is_tied", "max_grad_norm"), [(True, 1.0), (False, None), (True, None)])
def test_the_least_budgets_train_without_changing_a_bit(
    device: str, gpu_bytes: int | None, is_tied: bool, max_grad_norm: float | None, tmp_path: Path
) -> None:
    model = build(is_tied=is_tied)
    twin = copy.deepcopy(model)
    options: dict[str, Any] = {"device": device, "max_grad_norm": max_grad_norm}
    least = least_of(model, tmp_path, ram_bytes=64 * KIB, gpu_bytes=gpu_bytes, **options)
    with attach(model, tmp_path, **least, **options) as engine:  # type: ignore[arg-type]
        losses = [list(engine.step(batches(step)).losses) for step in range(NUM_STEPS)]
        assert engine.plan is not None
        assert engine.plan.num_update_parts > 8
        assert engine.plan.system.num_ring_slots == 1
        masters = {name: master.clone() for name, master in engine.weights()}
        expected = plain_end(
            twin,
            AdamW(twin.parameters(), lr=1e-3, max_grad_norm=max_grad_norm),
            [batches(step) for step in range(NUM_STEPS)],
            layout=engine.store.layout,
            loss_fn=None,
        )
        engine.close(should_delete=True)
    assert losses == expected.losses
    for name, master in expected.masters.items():
        assert torch.equal(masters[name].view(torch.int32), master.view(torch.int32)), name


@pytest.mark.parametrize(("device", "gpu_bytes"), [("cpu", None), ("emulated", 64 * KIB)])
def test_less_than_the_least_is_refused(device: str, gpu_bytes: int | None, tmp_path: Path) -> None:
    model = build(is_tied=False)
    least = least_of(model, tmp_path, ram_bytes=64 * KIB, gpu_bytes=gpu_bytes, device=device)
    for name, nbytes in least.items():
        if nbytes is not None:
            less = {**least, name: int(nbytes * 0.95)}
            again = least_of(model, tmp_path, device=device, **less)
            assert again[name] is not None
            assert abs(again[name] - nbytes) <= nbytes / 32, "another least than before"
    assert not any(tmp_path.iterdir()), "a refusal writes nothing"


@pytest.mark.slow
def test_more_than_the_least_fits_too(tmp_path: Path) -> None:
    # Whether another block of state lives in RAM changes what all the others need.
    model = diffusers.DiTTransformer2DModel(
        num_attention_heads=4,
        attention_head_dim=16,
        num_layers=6,
        in_channels=4,
        out_channels=8,
        sample_size=8,
        num_embeds_ada_norm=10,
    )
    batch = {
        "hidden_states": torch.zeros(8, 4, 8, 8, dtype=torch.bfloat16),
        "timestep": torch.zeros(8, dtype=torch.long),
        "class_labels": torch.zeros(8, dtype=torch.long),
    }

    def loss_fn(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return model(**batch).sample.float().pow(2).mean()

    def attach_with(ram_bytes: int) -> None:
        twin = copy.deepcopy(model).to(torch.bfloat16)
        attach_engine(
            twin,
            AdamW(twin.parameters(), lr=1e-3),
            Options(
                ssd=[tmp_path],
                ram_bytes=ram_bytes,
                gpu_bytes=None,
                machine=small_machine(),
                device="cpu",
                largest_step=[batch],
                loss_fn=loss_fn,
            ),
        ).close(should_delete=True)

    with pytest.raises(DoesNotFit) as refused:
        attach_with(MIB)
    least = named_least(refused.value)["ram_bytes"]
    for part in range(0, 16, 3):
        attach_with(least + least * part // 16)
