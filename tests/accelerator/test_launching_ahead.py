"""The host launches a block while the one before it still computes. No clocks: a held queue."""

import importlib
import json
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from lohan.drive import Phase
from lohan.engine.driver import StepDriver
from lohan.vocabulary import BlockId, Choice
from support import accelerator
from support.accelerator_cases import on_accelerator
from support.engine_runs import (
    attach,
    batches_of,
    build,
    optimizer_for,
)

COMPUTE = 0
PATIENCE_SECONDS = 60
"""For what should come at once; reached only by a mistake."""


class HeldAt:
    """Holds compute when a visit begins, and lets it go once a later one was launched."""

    def __init__(self, begins: tuple[int, Phase], launched: tuple[int, Phase]) -> None:
        self._begins, self._launched = begins, launched
        self._is_launched = threading.Event()
        self.num_held = 0
        self.was_ahead: list[bool] = []

    def put(self, patch: pytest.MonkeyPatch) -> None:
        before, after = StepDriver.before, StepDriver.after

        def begins(own: Any, segment: BlockId, phase: Phase) -> None:
            if (segment, phase) == self._begins:
                self._is_launched.clear()
                accelerator.calls().hold(COMPUTE)
                self.num_held += 1
                threading.Thread(target=self._let_go, daemon=True).start()
            before(own, segment, phase)

        def launched(own: Any, segment: BlockId, phase: Phase, gradients: Any) -> None:
            after(own, segment, phase, gradients)
            if (segment, phase) == self._launched:
                self._is_launched.set()

        patch.setattr(StepDriver, "before", begins)
        patch.setattr(StepDriver, "after", launched)

    def _let_go(self) -> None:
        self.was_ahead.append(self._is_launched.wait(PATIENCE_SECONDS))
        accelerator.calls().let_go(COMPUTE)


CHOICES = [Choice.KEEP, Choice.SWAP_TO_RAM, Choice.SWAP_TO_SSD, Choice.RECOMPUTE]


@pytest.mark.parametrize("num_micro_batches", [1, 2])
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("phase", [Phase.FORWARD, Phase.BACKWARD])
def test_the_next_block_is_launched_while_one_computes(
    phase: Phase,
    choice: Choice,
    num_micro_batches: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From the second step on: in the first one graphs are compared with the blocks' code."""
    case = on_accelerator(model="llama_packed", choice=choice, num_micro_batches=num_micro_batches)
    visits = ((1, phase), (2, phase)) if phase is Phase.FORWARD else ((3, phase), (2, phase))
    held = HeldAt(*visits)
    model = build(case)
    first, *others = batches_of(case)
    with attach(case, model, optimizer_for(case, model), tmp_path) as engine:
        engine.step(first)
        with monkeypatch.context() as patch:
            held.put(patch)
            for batches in others:
                engine.step(batches)
        engine.close(should_delete=True)
    assert held.was_ahead == [True] * len(others)


def test_the_lock_of_python_is_handed_on_sooner_while_a_step_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[float] = []
    before = StepDriver.before

    def noted(own: Any, segment: BlockId, phase: Phase) -> None:
        found.append(sys.getswitchinterval())
        before(own, segment, phase)

    monkeypatch.setattr(StepDriver, "before", noted)
    usual = sys.getswitchinterval()
    case = on_accelerator(model="llama_packed")
    model = build(case)
    with attach(case, model, optimizer_for(case, model), tmp_path) as engine:
        engine.step(batches_of(case)[0])
        engine.close(should_delete=True)
    assert max(found) < usual == sys.getswitchinterval()


def test_whole_steps_run_at_the_pace_of_a_gpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`benchmarks/iteration.py`, small: the rates hold steps back, and gaps are told."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    benchmark = importlib.import_module("iteration")
    monkeypatch.setattr(benchmark.torch, "set_num_threads", lambda count: None)
    words = ["--dir", str(tmp_path), "--steps", "1", "--layers", "4", "--time-scale", "0.002"]
    assert benchmark.main([*words, "--device", "accelerator", "--only", "lohan+"]) == 0
    (row,) = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert row["median_seconds"] >= row["roofline_seconds"]
    assert row["gap_us"]["median"] > 0
