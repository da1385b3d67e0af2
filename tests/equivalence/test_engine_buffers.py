"""Buffers that training changes (running statistics, counters) end as a plain loop leaves them."""

import copy
from pathlib import Path

import pytest
import torch

from lohan.errors import CheckpointError, ConfigError
from lohan.vocabulary import Choice
from support.engine_faults import assert_states, states_of
from support.engine_runs import EngineCase, optimizer_for
from support.odd_runs import plain, start, states_in_memory

DEVICES = ["cpu", "emulated"]


class CountingBlock(torch.nn.Module):
    """Keeps a running mean of what passes through it."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(8, 8)
        self.dropout = torch.nn.Dropout(0.2)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("num_rows", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean.mul_(0.9).add_(x.detach().float().mean((0, 1)) * 0.1)
            # Another tensor each time, not another value of the same.
            self.num_rows = self.num_rows + len(x)
        return x + self.dropout(torch.tanh(self.up(x - self.mean.to(x.dtype))))


class Counting(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = torch.nn.Linear(4, 8)
        self.blocks = torch.nn.ModuleList(CountingBlock() for _ in range(3))
        self.leave = torch.nn.Linear(8, 1)
        self.register_buffer("num_calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("largest", torch.full((), -9.0))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.training:
            self.num_calls += 1
            self.largest = torch.maximum(self.largest, x.detach().amax())
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return {"loss": self.leave(x).square().mean()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", DEVICES)
def test_running_statistics_are_those_of_plain_training(
    device: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Also in the first step, before which a forward counts the random numbers it draws; and where
    what the statistics are made of is needed for nothing else, but they are read at once."""
    case = EngineCase(device=device, residents=False, choice=Choice.RECOMPUTE)
    torch.manual_seed(3)
    model = Counting().to(torch.bfloat16)
    for block in model.blocks:
        block.mean = block.mean.to(dtype)
    twin = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(5)
    steps = [
        [
            {"x": torch.randn(num_rows, 3, 4, generator=generator).to(torch.bfloat16)}
            for num_rows in (2, 3, 2)
        ]
        for _ in range(3)
    ]
    torch.manual_seed(11)
    with start(case, model, optimizer_for(case, model), tmp_path, steps[0][0]) as engine:
        for batches in steps:
            engine.step(batches)
        assert int(model.num_calls) == 9
        torch.manual_seed(11)
        expected = plain(case, engine, twin, steps)
        assert_states(states_of(engine), states_in_memory(expected))
        for (name, own), other in zip(model.named_buffers(), twin.buffers(), strict=True):
            assert torch.equal(own, other), name


def _batches(num_steps: int) -> list[list[dict[str, torch.Tensor]]]:
    generator = torch.Generator().manual_seed(5)
    return [
        [
            {"x": torch.randn(num_rows, 3, 4, generator=generator).to(torch.bfloat16)}
            for num_rows in (2, 3)
        ]
        for _ in range(num_steps)
    ]


class Remembering(Counting):
    """Also has a large table that it changes, a large one that it does not, and one it forgets."""

    def __init__(self, start: float = 0.0) -> None:
        super().__init__()
        self.register_buffer("seen", torch.full((300, 300), start))
        self.register_buffer("mask", torch.ones(300, 300).tril())
        self.register_buffer("frequencies", torch.randn(8))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        self.register_buffer("later", None)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.training:
            self.seen[: len(x)] += x.detach().mean()
            self.scratch += 1
            self.later = self.num_calls.repeat(2)
        more = self.frequencies.sum() * 0 + self.seen.mean()
        return {"loss": super().forward(x)["loss"] + more}


def _remembering(seed: int) -> Remembering:
    torch.manual_seed(seed)
    return Remembering(float(seed)).to(torch.bfloat16)


@pytest.mark.parametrize("device", DEVICES)
def test_a_run_that_goes_on_from_a_seal_has_the_buffers_of_one_never_stopped(
    device: str, tmp_path: Path
) -> None:
    case = EngineCase(device=device, residents=False, choice=Choice.RECOMPUTE)
    model, steps = _remembering(3), _batches(4)
    twin = copy.deepcopy(model)
    with start(case, model, optimizer_for(case, model), tmp_path, steps[0][0]) as engine:
        torch.manual_seed(11)
        for batches in steps[:2]:
            engine.step(batches)
        engine.seal()
        random_state = torch.get_rng_state()
        engine.step(steps[2])
        run = engine.run_id
    for first, end in ((2, 3), (3, 4)):
        # Twice: what has changed in an earlier life is sealed again in a later one.
        model = _remembering(9)
        optimizer = optimizer_for(case, model)
        torch.set_rng_state(random_state)
        with start(case, model, optimizer, tmp_path, steps[0][0], run=run) as engine:
            assert not model.scratch.any()
            for batches in steps[first:end]:
                engine.step(batches)
            random_state = torch.get_rng_state()
            engine.seal()
            if end == len(steps):
                torch.manual_seed(11)
                expected = plain(case, engine, twin, steps)
                assert_states(states_of(engine), states_in_memory(expected))
    assert model.later is not None
    for (name, own), other in zip(model.named_buffers(), twin.buffers(), strict=True):
        assert name == "scratch" or torch.equal(own.cpu(), other), name
    assert set(model.scratch.tolist()) == {2.0}


def test_a_copy_of_a_run_takes_the_buffers_along(tmp_path: Path) -> None:
    case = EngineCase(residents=False)
    model, steps = _remembering(3), _batches(2)
    with start(case, model, optimizer_for(case, model), tmp_path, steps[0][0]) as engine:
        engine.step(steps[0])
        masters = {name: master.clone() for name, master in engine.weights()}
        kept, counters = engine.buffers, engine.counters
    other = _remembering(9)
    options = {"weights": masters.items(), "counters": counters, "buffers": kept}
    with start(case, other, optimizer_for(case, other), tmp_path, steps[0][0], **options) as engine:
        run = engine.run_id
    # Killed before its first step: the first seal has them too.
    other = _remembering(9)
    start(case, other, optimizer_for(case, other), tmp_path, steps[0][0], run=run).close()
    for name in ("seen", "num_calls", "blocks.2.mean", "frequencies", "later"):
        assert torch.equal(other.get_buffer(name), model.get_buffer(name)), name


def test_a_large_buffer_that_never_changed_must_be_made_as_it_was(tmp_path: Path) -> None:
    case = EngineCase(residents=False)
    model, steps = _remembering(3), _batches(1)
    with start(case, model, optimizer_for(case, model), tmp_path, steps[0][0]) as engine:
        run = engine.run_id
    model = _remembering(3)
    model.mask[0, 0] = 5
    with pytest.raises(CheckpointError, match="buffer mask has other values"):
        start(case, model, optimizer_for(case, model), tmp_path, steps[0][0], run=run)


def test_a_model_without_a_sealed_buffer_is_refused(tmp_path: Path) -> None:
    case = EngineCase(residents=False)
    model, steps = _remembering(3), _batches(1)
    with start(case, model, optimizer_for(case, model), tmp_path, steps[0][0]) as engine:
        run = engine.run_id
    model = Counting().to(torch.bfloat16)
    with pytest.raises(CheckpointError, match="holds a buffer seen that the model does not have"):
        start(case, model, optimizer_for(case, model), tmp_path, steps[0][0], run=run)


def test_a_seal_of_an_older_release_leaves_the_buffers_as_the_model_was_made(
    tmp_path: Path,
) -> None:
    case = EngineCase(residents=False)
    model, steps = _remembering(3), _batches(1)
    with start(case, model, optimizer_for(case, model), tmp_path, steps[0][0]) as engine:
        run = engine.run_id
        engine.store.seal(step=0, metadata={"user": {}})
    model = _remembering(4)
    start(case, model, optimizer_for(case, model), tmp_path, steps[0][0], run=run).close()
    assert torch.equal(model.seen.cpu(), torch.full((300, 300), 4.0).to(torch.bfloat16))


def test_a_sparse_buffer_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    case = EngineCase(residents=False)
    model, steps = _remembering(3), _batches(1)
    model.register_buffer("links", torch.eye(3).to_sparse())
    with pytest.raises(ConfigError, match="buffer links is"):
        start(case, model, optimizer_for(case, model), tmp_path, steps[0][0])
    assert not list((tmp_path / "ssd0").iterdir())
