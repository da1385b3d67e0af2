"""The loss in chunks, without logits: the bits of the whole, and of the plain loop."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.nn import functional

from lohan.drive.chunked_loss import chunked_cross_entropy, loss_in_chunks
from lohan.engine.attach import attach_engine
from lohan.engine.engine import Engine
from lohan.engine.options import Options
from lohan.errors import ConfigError, DoesNotFit
from lohan.optimizer.torch_optimizer import AdamW
from lohan.vocabulary import Tier
from support.in_memory_training import plain_end
from support.small_machines import small_machine

MIB = 1 << 20
VOCABULARY = 4096
SEQUENCE = 512


def whole(
    hidden: torch.Tensor, weight: torch.Tensor, bias: Any, targets: torch.Tensor, **how: Any
) -> torch.Tensor:
    logits = functional.linear(hidden[None], weight, bias).float()
    return functional.cross_entropy(logits.flatten(0, 1), targets, **how)


def row_by_row(
    hidden: torch.Tensor, weight: torch.Tensor, bias: Any, targets: torch.Tensor, size: int
) -> torch.Tensor:
    """The obvious loop: every few rows with a product of their own, left to autograd."""
    total = hidden.new_zeros((), dtype=torch.float32)
    for begin in range(0, len(hidden), size):
        logits = functional.linear(hidden[begin : begin + size], weight, bias).float()
        part = targets[begin : begin + size]
        total = total + functional.cross_entropy(logits, part, reduction="sum")
    return total / (targets != -100).sum()


def drawn(
    shape: tuple[int, int, int], dtype: torch.dtype, has_bias: bool
) -> tuple[list[torch.Tensor | None], torch.Tensor]:
    num_rows, width, num_words = shape
    torch.manual_seed(num_rows)
    hidden = torch.randn(num_rows, width).to(dtype)
    weight = (torch.randn(num_words, width) * width**-0.5).to(dtype)
    bias = torch.randn(num_words).to(dtype).requires_grad_() if has_bias else None
    targets = torch.randint(0, num_words, (num_rows,))
    targets[::7] = -100
    return [hidden.requires_grad_(), weight.requires_grad_(), bias], targets


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "shape", [(256, 64, 1000), (500, 128, 3001), (193, 64, 151), (130, 48, 5025), (63, 48, 257)]
)
@pytest.mark.parametrize(("reduction", "has_bias"), [("mean", False), ("sum", True)])
@pytest.mark.parametrize("num_chunks", [1, 2, 3, 7, 64])
def test_chunks_have_the_bits_of_the_whole(
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    reduction: str,
    has_bias: bool,
    num_chunks: int,
) -> None:
    given, targets = drawn(shape, dtype, has_bias)
    leaves = [one for one in given if one is not None]
    hidden, weight, bias = given
    assert hidden is not None
    assert weight is not None
    # Multiplied afterwards by what rounds, as a step's share and a scale are.
    expected = whole(hidden, weight, bias, targets, reduction=reduction) * 0.37
    found = 0.37 * chunked_cross_entropy(
        hidden, weight, bias, targets, num_chunks, reduction=reduction
    )
    assert torch.equal(found, expected)
    both = zip(
        torch.autograd.grad(found, leaves), torch.autograd.grad(expected, leaves), strict=True
    )
    assert all(torch.equal(one, other) for one, other in both)


@pytest.mark.parametrize("num_chunks", [2, 5])
def test_chunks_and_the_obvious_loop_of_rows_agree(num_chunks: int) -> None:
    (hidden, weight, bias), targets = drawn((512, 64, 1000), torch.float32, True)
    assert hidden is not None
    assert weight is not None
    assert bias is not None
    leaves = [hidden, weight, bias]
    found = chunked_cross_entropy(hidden, weight, bias, targets, num_chunks)
    expected = row_by_row(hidden, weight, bias, targets, 32)
    # The loop adds losses, and gradients of the weight, up in fp32 in the order of its rows: 16
    # roundings of 2**-24 at most, relative to the largest sums.
    torch.testing.assert_close(found, expected, rtol=2**-20, atol=0)
    for one, other in zip(
        torch.autograd.grad(found, leaves), torch.autograd.grad(expected, leaves), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=0, atol=float(other.abs().max()) * 2**-20)


def test_a_frozen_head_has_no_gradient() -> None:
    (hidden, weight, _), targets = drawn((256, 64, 1000), torch.bfloat16, False)
    assert hidden is not None
    assert weight is not None
    weight.requires_grad_(False)
    found = torch.autograd.grad(chunked_cross_entropy(hidden, weight, None, targets, 4), hidden)
    expected = torch.autograd.grad(whole(hidden, weight, None, targets), hidden)
    assert torch.equal(found[0], expected[0])


def llama(is_tied: bool = False, **settings: Any) -> torch.nn.Module:
    torch.manual_seed(7)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=is_tied,
        **settings,
    )
    return transformers.LlamaForCausalLM(config).to(torch.bfloat16).train()


def batch(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCABULARY, (1, SEQUENCE), generator=generator)
    return {"input_ids": tokens, "labels": tokens.masked_fill(tokens % 5 == 0, -100)}


STEPS = [[batch(10 * step + part) for part in range(2)] for step in range(3)]


def start(model: torch.nn.Module, directory: Path, **options: Any) -> Engine:
    given: dict[str, Any] = {"should_chunk_loss": True, "device": "cpu", "gpu_bytes": 64 * MIB}
    return attach_engine(
        model,
        optimizer_for(model),
        Options(
            ssd=[directory],
            ram_bytes=64 * MIB,
            machine=small_machine(1),
            num_threads=1,
            largest_step=STEPS[0],
            **{**given, **options},
        ),
    )


def optimizer_for(model: torch.nn.Module) -> AdamW:
    return AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, max_grad_norm=1.0)


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_run_in_chunks_has_the_bits_of_the_plain_loop(is_tied: bool, tmp_path: Path) -> None:
    model = llama(is_tied)
    twin = copy.deepcopy(model)
    with start(model, tmp_path) as engine:
        results = [engine.step(batches) for batches in STEPS]
        assert engine.plan is not None
        assert engine.plan.loss_chunks > 1
        expected = plain_end(
            twin, optimizer_for(twin), STEPS, layout=engine.store.layout, loss_fn=None
        )
        assert [list(one.losses) for one in results] == expected.losses
        assert [one.grad_norm for one in results] == expected.norms
        masters = dict(engine.weights())
        assert masters.keys() == expected.masters.keys()
        assert all(torch.equal(masters[name], one) for name, one in expected.masters.items())
        model.eval()
        assert len(engine.evaluate([batch(99)])) == 1
        engine.close(should_delete=True)
    assert "forward" not in vars(model.get_submodule("lm_head"))


def test_a_step_whose_logits_do_not_fit_runs_in_chunks_within_its_budget(tmp_path: Path) -> None:
    """A Llama with a long sequence, scaled down: with whole logits its head needs 24 MiB."""
    asked: dict[str, Any] = {"device": "emulated", "gpu_bytes": 11 * MIB}
    with pytest.raises(DoesNotFit):
        start(llama(), tmp_path, should_chunk_loss=False, **asked)
    with start(llama(), tmp_path, **asked) as engine:
        for batches in STEPS:
            engine.step(batches)
        peak, plan = engine.gpu_peak_bytes, engine.plan
        assert plan is not None
        assert peak is not None
        assert plan.loss_chunks > 1
        assert 0 < peak <= min(plan.ledger.total(Tier.GPU), asked["gpu_bytes"])
        engine.close(should_delete=True)


def reads_logits(model: torch.nn.Module, given: dict[str, torch.Tensor]) -> torch.Tensor:
    found = model(**given)
    loss: torch.Tensor = found.loss + found.logits.float().square().mean()
    return loss


def smoothed(model: torch.nn.Module, given: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = model(input_ids=given["input_ids"]).logits.float().flatten(0, 1)
    labels = given["labels"].flatten()
    return functional.cross_entropy(logits, labels, label_smoothing=0.1)


@pytest.mark.parametrize(
    ("loss_fn", "why"), [(reads_logits, "the logits are read by"), (smoothed, "by")]
)
def test_a_loss_that_needs_logits_is_told_and_computed_whole(
    loss_fn: Any, why: str, tmp_path: Path
) -> None:
    said: list[str] = []
    with start(llama(), tmp_path, loss_fn=loss_fn, progress=said.append) as engine:
        assert [one for one in said if "its logits as a whole" in one and why in one], said
        engine.step(STEPS[0])
        assert engine.plan is not None
        assert engine.plan.loss_chunks == 1
        engine.close(should_delete=True)


def test_a_head_with_hooks_is_told_and_computed_whole(tmp_path: Path) -> None:
    said: list[str] = []
    model = llama()
    model.get_submodule("lm_head").register_forward_hook(lambda *_: None)
    with start(model, tmp_path, progress=said.append) as engine:
        assert [one for one in said if "lm_head has hooks" in one]
        engine.close(should_delete=True)


def test_another_loss_of_a_step_that_reads_logits_is_refused(tmp_path: Path) -> None:
    with start(llama(), tmp_path) as engine, pytest.raises(ConfigError, match="logits are read by"):
        engine.step(STEPS[0], reads_logits)


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x[..., -1],
        lambda x: 2 * x,
        lambda x: x.to("meta"),
        lambda x: x.to("cpu").to(torch.float32),
    ],
)
def test_what_is_absent_is_computed_where_no_gradient_is_wanted(read: Any) -> None:
    model = llama().eval()
    given = {"input_ids": torch.arange(256)[None]}
    with torch.no_grad():
        expected = read(model(**given).logits)
        with loss_in_chunks(model.get_submodule("lm_head"), 4):  # type: ignore[arg-type]
            found = read(model(**given).logits)
    assert found.shape == expected.shape
    assert found.device == expected.device
    assert found.is_meta or torch.equal(found, expected)
