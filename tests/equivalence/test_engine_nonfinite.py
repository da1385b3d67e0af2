"""Gradients that are infinite or NaN: a step is skipped exactly, or fails itself; masters never see
them."""

import contextlib
import copy
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from lohan.errors import CheckpointError, NonFiniteGradients
from lohan.lanes.updates import Updates
from lohan.vocabulary import Choice
from support.engine_faults import States, assert_states, differing, states_of, undisturbed
from support.engine_runs import EngineCase, attach, batches_of, build, optimizer_for
from support.odd_runs import Batch, plain, start, states_in_memory

DEVICES = ["cpu", "emulated"]


def scaled_loss(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    batch = dict(batch)
    factor = batch.pop("factor")
    loss: torch.Tensor = model(**batch).loss * factor
    return loss


def with_factors(case: EngineCase, factors: Sequence[float]) -> list[list[Batch]]:
    return [
        [{**batch, "factor": torch.tensor(factor)} for batch in batches]
        for batches, factor in zip(batches_of(case), factors, strict=True)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device", "bad", "max_grad_norm"),
    [
        ("cpu", float("inf"), None),
        ("emulated", float("nan"), None),
        ("emulated", float("inf"), 1.0),
        ("cpu", float("nan"), 1.0),
    ],
)
def test_a_skipped_step_leaves_every_bit_and_does_not_count_for_bias_correction(
    device: str, bad: float, max_grad_norm: float | None, tmp_path: Path
) -> None:
    case = EngineCase(
        residents=False,
        spills=True,
        num_parts=2,
        choice=Choice.SWAP_TO_SSD,
        device=device,
        max_grad_norm=max_grad_norm,
        num_steps=5,
    )
    steps = with_factors(case, [1.0, bad, 1.0, bad, 1.0])
    model = build(case)
    twin = copy.deepcopy(model)
    options = {"loss_fn": scaled_loss, "nonfinite": "skip"}
    with start(case, model, optimizer_for(case, model), tmp_path, steps[0][0], **options) as engine:
        results = [engine.step(batches) for batches in steps[:2]]
        before = states_of(engine)
        engine.seal()
        results += [engine.step(steps[2]), engine.step(steps[3])]
        assert differing(states_of(engine), before)
        results.append(engine.step(steps[4]))
        assert [result.is_skipped for result in results] == [False, True, False, True, False]
        assert [result.step for result in results] == [1, 2, 3, 4, 5]
        assert engine.counters["num_updates"] == 3
        good = [steps[0], steps[2], steps[4]]
        expected = plain(case, engine, twin, good, scaled_loss)
        assert_states(states_of(engine), states_in_memory(expected))
        run_id = engine.run_id
    again = build(case)
    with start(
        case, again, optimizer_for(case, again), tmp_path, steps[0][0], run=run_id, **options
    ) as engine:
        assert engine.num_steps == 2
        assert_states(states_of(engine), before)
        for batches in steps[2:]:
            engine.step(batches)
        assert_states(states_of(engine), states_in_memory(expected))


def break_gradients(model: torch.nn.Module, path: str, at_step: int) -> None:
    """The gradient that leaves a module backward is infinite in one step from now on."""
    count = [0]

    def watch(_module: object, _inputs: object, output: torch.Tensor) -> None:
        def spoil(gradient: torch.Tensor) -> torch.Tensor:
            count[0] += 1
            return gradient * float("inf") if count[0] == at_step else gradient

        if output.requires_grad:
            output.register_hook(spoil)

    model.get_submodule(path).register_forward_hook(watch)


@contextlib.contextmanager
def updates_refuse_nonfinite() -> Iterator[None]:
    """Whatever reaches the arithmetic of an update must be finite."""
    real = Updates._step

    def look(self: Updates, block: Any, step: int, number: int, *rest: Any) -> None:
        begin, end = self._range(block, number)
        values = self._gradients.values(block, step, begin, end)
        assert values is None or bool(torch.isfinite(values).all()), "a bad gradient is applied"
        real(self, block, step, number, *rest)

    with mock.patch.object(Updates, "_step", look):
        yield


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("path", "block", "updated"),
    [
        ("model.embed_tokens", "embedding", [f"model.layers.{n}" for n in range(3)] + ["head"]),
        ("model.layers.1.mlp", "model.layers.1", ["model.layers.2", "head"]),
        ("lm_head", "head", []),
    ],
)
def test_without_clipping_stop_fails_the_step_itself_and_says_what_was_updated(
    device: str, path: str, block: str, updated: list[str], tmp_path: Path
) -> None:
    """The gradient of the first block leaves last, when the model has long ended."""
    case = EngineCase(residents=False, device=device, max_grad_norm=None, num_steps=3)
    expected = undisturbed(case, tmp_path)
    model = build(case)
    steps = batches_of(case)
    with attach(case, model, optimizer_for(case, model), tmp_path) as engine:
        engine.step(steps[0])
        engine.seal()
        break_gradients(model, path, 1)
        with (
            updates_refuse_nonfinite(),
            pytest.raises(NonFiniteGradients, match=f"in step 2 .*block {block} ") as caught,
        ):
            engine.step(steps[1])
        assert 'nonfinite="skip"' in str(caught.value)
        told = caught.value.__notes__[-1]
        # Blocks behind may have been updated by now, blocks in front cannot.
        names = told.rsplit(": ", 1)[-1].split(", ") if "finite gradients only" in told else []
        assert set(names) <= set(updated), told
        with pytest.raises(CheckpointError, match="goes on from step 1"):
            engine.step(steps[1])
        assert engine.num_steps == 1
    resume_and_judge(case, tmp_path, engine.run_id, expected)


@pytest.mark.parametrize("device", DEVICES)
def test_with_clipping_stop_names_where_it_began_and_nothing_was_updated(
    device: str, tmp_path: Path
) -> None:
    case = EngineCase(residents=False, device=device, num_steps=3)
    expected = undisturbed(case, tmp_path)
    model = build(case)
    steps = batches_of(case)
    with attach(case, model, optimizer_for(case, model), tmp_path) as engine:
        engine.step(steps[0])
        engine.seal()
        break_gradients(model, "model.layers.1.mlp", 1)
        with (
            updates_refuse_nonfinite(),
            pytest.raises(
                NonFiniteGradients, match=r"step 2.*model\.layers\.1 .*earlier"
            ) as caught,
        ):
            engine.step(steps[1])
        assert caught.value.__notes__[-1] == "no block was updated in step 2"
    resume_and_judge(case, tmp_path, engine.run_id, expected)


def resume_and_judge(
    case: EngineCase, directory: Path, run_id: str, expected: list[States]
) -> None:
    """The seal after step 1 is whole, and training goes on from it."""
    again = build(case)
    with attach(case, again, optimizer_for(case, again), directory, run=run_id) as engine:
        assert_states(states_of(engine), expected[1])
        for batches in batches_of(case)[1:]:
            engine.step(batches)
        assert_states(states_of(engine), expected[-1])


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_an_overflow_in_fp16_skips_exactly_and_halves_the_scale(
    device: str, tmp_path: Path
) -> None:
    case = EngineCase(dtype=torch.float16, residents=False, num_parts=2, device=device, num_steps=6)
    steps = with_factors(case, [1e-3, 1e-3, 3e3, 1e-3, 3e3, 1e-3])
    model = build(case)
    twin = copy.deepcopy(model)
    with start(
        case, model, optimizer_for(case, model), tmp_path, steps[0][0], loss_fn=scaled_loss
    ) as engine:
        results = []
        for number, batches in enumerate(steps):
            results.append(engine.step(batches))
            if number == 3:
                engine.seal()
        expected = plain(case, engine, twin, steps, scaled_loss, 2.0**16)
        skipped = [result.is_skipped for result in results]
        assert any(skipped)
        assert not all(skipped)
        scales = [result.loss_scale for result in results]
        for now, after, was_skipped in zip(scales, scales[1:], skipped, strict=False):
            assert after == (now / 2 if was_skipped else now)
        assert_states(states_of(engine), states_in_memory(expected))
        run_id = engine.run_id
    again = build(case)
    with start(
        case,
        again,
        optimizer_for(case, again),
        tmp_path,
        steps[0][0],
        run=run_id,
        loss_fn=scaled_loss,
    ) as engine:
        resumed = [engine.step(batches) for batches in steps[4:]]
        assert [one.loss_scale for one in resumed] == scales[4:]
        assert_states(states_of(engine), states_in_memory(expected))
