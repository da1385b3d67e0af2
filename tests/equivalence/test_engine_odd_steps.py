"""Steps that are not like the others: of other sizes, without some gradients, evaluated, resumed.

The judge is the plain loop in memory, as everywhere.
"""

import collections
import copy
from pathlib import Path

import pytest
import torch

from lohan.errors import ConfigError
from lohan.vocabulary import Choice
from support.engine_faults import assert_states, states_of, undisturbed
from support.engine_runs import EngineCase, attach, batches_of, build, optimizer_for, run_case
from support.odd_runs import Batch, plain, start, states_in_memory
from support.tiny_models import VOCABULARY

DEVICES = ["cpu", "emulated"]


# Parameters that get no gradient in some steps ----------------------------------------------------


class SometimesBlock(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(8, 16)
        self.down = torch.nn.Linear(16, 8)
        self.gate = torch.nn.Parameter(torch.randn(8))

    def forward(self, x: torch.Tensor, is_gated: bool) -> torch.Tensor:
        y = self.down(torch.tanh(self.up(x)))
        return x + (y * self.gate if is_gated else y)


class Sometimes(torch.nn.Module):
    """Gates in blocks, and a bias behind them, take part only in some steps."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = torch.nn.Linear(4, 8)
        self.blocks = torch.nn.ModuleList(SometimesBlock() for _ in range(3))
        self.leave = torch.nn.Linear(8, 1)
        self.bias = torch.nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor, is_gated: bool) -> dict[str, torch.Tensor]:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x, is_gated)
        out = self.leave(x)
        return {"loss": ((out + self.bias) if is_gated else out).square().mean()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device", "max_grad_norm", "num_micro_batches"),
    [("cpu", None, 1), ("cpu", 0.5, 2), ("emulated", None, 2), ("emulated", 0.5, 1)],
)
def test_a_parameter_without_a_gradient_keeps_its_states_and_its_count(
    device: str, max_grad_norm: float | None, num_micro_batches: int, tmp_path: Path
) -> None:
    """As in torch: no decay, no momentum, no step counted where `.grad` is None."""
    case = EngineCase(
        residents=False,
        num_parts=2,
        choice=Choice.RECOMPUTE,
        device=device,
        max_grad_norm=max_grad_norm,
    )
    torch.manual_seed(3)
    model = Sometimes().to(torch.bfloat16)
    twin = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(5)
    gated = [True, False, False, True, False, True]
    steps = [
        [
            {
                "x": torch.randn(3, 4, generator=generator).to(torch.bfloat16),
                # In a step of two micro-batches one of them is enough for a gradient.
                "is_gated": is_gated and number == 0,
            }
            for number in range(num_micro_batches)
        ]
        for is_gated in gated
    ]
    with start(case, model, optimizer_for(case, model), tmp_path, steps[0][0]) as engine:
        for number, batches in enumerate(steps):
            engine.step(batches)
            if number == 3:
                engine.seal()
        expected = plain(case, engine, twin, steps)
        assert_states(states_of(engine), states_in_memory(expected))
        assert engine.counters["missed"]["bias"] == 3
        assert engine.counters["missed"]["blocks.1.gate"] == 3
        assert "leave.weight" not in engine.counters["missed"]
        run_id = engine.run_id
    torch.manual_seed(3)
    again = Sometimes().to(torch.bfloat16)
    with start(
        case, again, optimizer_for(case, again), tmp_path, steps[0][0], run=run_id
    ) as engine:
        for batches in steps[4:]:
            engine.step(batches)
        assert_states(states_of(engine), states_in_memory(expected))


# Batches of other sizes ---------------------------------------------------------------------------


def tokens(seed: int, rows: int, columns: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, VOCABULARY, (rows, columns), generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device", "residents"),
    [
        ("cpu", None),
        ("emulated", False),
        pytest.param("cpu", False, marks=pytest.mark.long),
        pytest.param("emulated", None, marks=pytest.mark.long),
    ],
)
def test_steps_of_other_sizes_give_the_same_bits(
    device: str, residents: bool | None, tmp_path: Path
) -> None:
    """Longer, more of them, wider, a smaller last one: plans change, bits do not."""
    case = EngineCase(device=device, residents=residents)
    sizes = [
        [(2, 7)],
        [(2, 19)],
        [(2, 7), (1, 5)],
        [(3, 11), (2, 7), (2, 23)],
        [(1, 3)],
        [(5, 9), (5, 9)],
        [(2, 7)],
    ]
    steps = [
        [tokens(10 * step + number, *size) for number, size in enumerate(of_step)]
        for step, of_step in enumerate(sizes)
    ]
    model = build(case)
    twin = copy.deepcopy(model)
    with start(case, model, optimizer_for(case, model), tmp_path, steps[0][0]) as engine:
        losses = [list(engine.step(batches).losses) for batches in steps]
        expected = plain(case, engine, twin, steps)
        assert losses == expected.losses
        assert_states(states_of(engine), states_in_memory(expected))


# What micro-batches count for ---------------------------------------------------------------------


def loss_of_ids(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
    return loss


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_one_batch_given_twice_counts_with_each_of_its_weights(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    """A tensor as batch stays the same object to the end."""
    case = EngineCase(device="emulated", dtype=dtype, max_grad_norm=None)
    one, other = tokens(1, 2, 7)["labels"], tokens(2, 1, 5)["labels"]
    steps = [[one, other, one], [one, one], [other]]
    weights = [[0.125, 0.25, 0.625], [1.0, 0.5], [0.75]]
    model = build(case)
    twin = copy.deepcopy(model)
    with start(case, model, optimizer_for(case, model), tmp_path, None) as engine:
        losses = [
            list(engine.step(batches, loss_of_ids, weights=given).losses)
            for batches, given in zip(steps, weights, strict=True)
        ]
        left = iter(weights)
        expected = plain(case, engine, twin, steps, loss_of_ids, weights=lambda _: next(left))
        assert losses == expected.losses
        assert_states(states_of(engine), states_in_memory(expected))


class Encoded(collections.UserDict[str, torch.Tensor]):
    """A batch as tokenizers make them: a mapping, but no dictionary."""


def test_a_batch_may_be_any_mapping(tmp_path: Path) -> None:
    case = EngineCase(num_micro_batches=2, num_steps=2)
    expected = undisturbed(case, tmp_path)[-1]
    model = build(case)
    example = Encoded(batches_of(case)[0][0])
    with start(case, model, optimizer_for(case, model), tmp_path, example) as engine:
        for batches in batches_of(case):
            engine.step([Encoded(batch) for batch in batches])
        assert_states(states_of(engine), expected)


@pytest.mark.parametrize("device", DEVICES)
def test_a_micro_batch_without_a_token_that_counts_counts_for_nothing(
    device: str, tmp_path: Path
) -> None:
    """Its loss is NaN, the mean over no token; that of the step is the mean over the others."""
    case = EngineCase(device=device)
    silent = tokens(3, 2, 7)
    silent["labels"].fill_(-100)
    model = build(case)
    twin = copy.deepcopy(model)
    steps = [[tokens(1, 2, 7), silent], [silent, tokens(2, 2, 7)]]
    with start(case, model, optimizer_for(case, model), tmp_path, silent) as engine:
        results = [engine.step(batches) for batches in steps]
        with pytest.raises(ConfigError, match="no token of the step"):
            engine.step([silent])
        expected = plain(case, engine, twin, [[steps[0][0]], [steps[1][1]]])
        assert [result.loss for result in results] == [sum(one) for one in expected.losses]
        assert results[0].losses[1] == results[1].losses[0] == 0.0
        assert_states(states_of(engine), states_in_memory(expected))
        with pytest.raises(ConfigError, match="no micro-batch"):
            engine.step([])
        assert engine.num_steps == 2


# Between steps ------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("device", "residents"), [("cpu", True), ("emulated", False)])
def test_evaluating_between_steps_changes_nothing_in_training(
    device: str, residents: bool, tmp_path: Path
) -> None:
    case = EngineCase(device=device, residents=residents, num_micro_batches=2, dropout=0.1)
    model = build(case)
    torch.manual_seed(11)
    with attach(case, model, optimizer_for(case, model), tmp_path) as engine:
        for batches in batches_of(case):
            engine.step(batches)
        expected, state = states_of(engine), torch.get_rng_state()
    again = build(case)
    torch.manual_seed(11)
    with attach(case, again, optimizer_for(case, again), tmp_path) as engine:
        losses = []
        for number, batches in enumerate(batches_of(case)):
            again.eval()
            losses.append(engine.evaluate([tokens(7, 2, 7), tokens(8, 3, 13), tokens(9, 1, 2)]))
            again.train()
            engine.step(batches)
            if number == 1:
                with pytest.raises(ConfigError, match="no micro-batch"):
                    engine.evaluate([])
        assert_states(states_of(engine), expected)
        assert torch.equal(torch.get_rng_state(), state)
    assert len({tuple(one) for one in losses}) == len(losses)


@pytest.mark.slow
@pytest.mark.parametrize(("device", "residents"), [("cpu", False), ("emulated", True)])
def test_sealing_and_resuming_at_every_step_gives_the_bits_of_one_run(
    device: str, residents: bool, tmp_path: Path
) -> None:
    """Clipping puts updates off into the next step: a seal must wait for them."""
    case = EngineCase(
        device=device, residents=residents, num_parts=2, num_micro_batches=2, num_steps=5
    )
    expected = undisturbed(case, tmp_path)
    run_id = None
    for number, batches in enumerate(batches_of(case)):
        model = build(case)
        with attach(case, model, optimizer_for(case, model), tmp_path, run=run_id) as engine:
            assert engine.num_steps == number
            assert_states(states_of(engine), expected[number])
            assert engine.step(batches).step == number + 1
            engine.seal(metadata={"number": number})
            run_id = engine.run_id
    model = build(case)
    with attach(case, model, optimizer_for(case, model), tmp_path, run=run_id) as engine:
        assert_states(states_of(engine), expected[-1])
        assert engine.sealed is not None
        assert engine.sealed.metadata == {"number": 4}


# The process around -------------------------------------------------------------------------------


@pytest.mark.parametrize("num_micro_batches", [1, 3])
def test_random_numbers_go_on_as_after_plain_training(
    num_micro_batches: int, tmp_path: Path
) -> None:
    case = EngineCase(
        model="gpt2",
        dropout=0.2,
        num_micro_batches=num_micro_batches,
        choice=Choice.RECOMPUTE,
        device="emulated",
    )
    model = build(case)
    twin = copy.deepcopy(model)
    torch.manual_seed(11)
    with attach(case, model, optimizer_for(case, model), tmp_path) as engine:
        for batches in batches_of(case):
            engine.step(batches)
        after = torch.get_rng_state()
        torch.manual_seed(11)
        plain(case, engine, twin, batches_of(case))
        assert torch.equal(after, torch.get_rng_state())


@pytest.mark.parametrize("num_threads", [1, 2])
def test_the_number_of_threads_is_the_users(num_threads: int, tmp_path: Path) -> None:
    before = torch.get_num_threads(), torch.get_num_interop_threads()
    torch.set_num_threads(num_threads)
    try:
        outcome, expected = run_case(EngineCase(num_steps=2, num_threads=2), tmp_path)
        assert torch.get_num_threads() == num_threads
        assert outcome.losses == expected.losses
    finally:
        torch.set_num_threads(before[0])
    assert torch.get_num_interop_threads() == before[1]
