"""Mixtures of experts whose loss reads what the routers in their blocks gave, as transformers
collects it: as in memory to the bit, however the blocks go backward."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from lohan.vocabulary import Choice
from support.engine_faults import assert_states, states_of
from support.engine_runs import EngineCase, optimizer_for
from support.odd_runs import plain, start, states_in_memory
from support.tiny_models import VOCABULARY, tokens_of

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "num_experts_per_tok": 2,
    "router_aux_loss_coef": 0.5,
}


def mixtral() -> torch.nn.Module:
    config = transformers.MixtralConfig(**SIZES, num_local_experts=4, output_router_logits=True)
    return transformers.MixtralForCausalLM(config)


def qwen3_moe() -> torch.nn.Module:
    config = transformers.Qwen3MoeConfig(
        **SIZES, head_dim=4, num_experts=4, moe_intermediate_size=8, output_router_logits=True
    )
    return transformers.Qwen3MoeForCausalLM(config)


def steps_of(is_padded: bool) -> list[list[dict[str, torch.Tensor]]]:
    """A mask makes transformers count the experts' tokens in another way."""
    batches = []
    for seed in range(4):
        batch = {"input_ids": tokens_of(seed), "labels": tokens_of(seed)}
        if is_padded:
            batch["attention_mask"] = torch.ones_like(batch["input_ids"])
            batch["attention_mask"][0, -2:] = 0
        batches.append(batch)
    return [batches[:2], batches[2:]]


@pytest.mark.parametrize(
    ("make", "is_padded", "device", "choice"),
    [
        (mixtral, False, "cpu", Choice.KEEP),
        (mixtral, True, "cpu", Choice.RECOMPUTE),
        (qwen3_moe, False, "emulated", Choice.SWAP_TO_SSD),
    ],
)
def test_a_loss_on_router_logits_is_that_of_plain_training(
    make: Any, is_padded: bool, device: str, choice: Choice, tmp_path: Path
) -> None:
    case = EngineCase(choice=choice, device=device, residents=False, num_micro_batches=2)
    torch.manual_seed(3)
    model, steps = make().to(torch.bfloat16).train(), steps_of(is_padded)
    twin = copy.deepcopy(model)
    with start(case, model, optimizer_for(case, model), tmp_path, steps[0][0]) as engine:
        losses = [list(engine.step(batches).losses) for batches in steps]
        expected = plain(case, engine, twin, steps)
        assert losses == expected.losses
        assert_states(states_of(engine), states_in_memory(expected))


@pytest.mark.parametrize("num_micro_batches", [1, 2])
def test_what_is_collected_is_what_the_model_returns(
    num_micro_batches: int, tmp_path: Path
) -> None:
    """Twice the number of layers, or none, would be a wrong loss without a word. Of two
    micro-batches, one is run beforehand to count what it draws."""
    case = EngineCase(choice=Choice.RECOMPUTE, residents=False, num_micro_batches=num_micro_batches)
    model, steps = mixtral().to(torch.bfloat16), steps_of(False)
    found: list[int] = []

    def loss_fn(model: torch.nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        output = model(**batch, output_hidden_states=True)
        found.append(len(output.router_logits) * 10 + len(output.hidden_states))
        return output.loss

    with start(
        case, model, optimizer_for(case, model), tmp_path, steps[0][0], loss_fn=loss_fn
    ) as engine:
        found.clear()
        engine.step(steps[0][:1])
    assert set(found) == {34}
