"""Where backward runs on another thread than forward, as it does for a GPU, no bit changes."""

from pathlib import Path

import pytest

from lohan.vocabulary import Choice
from support.backward_threads import run_backward_elsewhere
from support.engine_runs import EngineCase, assert_same, run_case

PLACES = [Choice.KEEP, Choice.SWAP_TO_RAM, Choice.SWAP_TO_SSD, Choice.RECOMPUTE]


@pytest.mark.parametrize("choice", PLACES)
@pytest.mark.parametrize("model", ["llama", pytest.param("t5", marks=pytest.mark.slow)])
def test_backward_on_a_thread_of_its_own_changes_no_bit(
    model: str, choice: Choice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = run_backward_elsewhere(monkeypatch)
    case = EngineCase(
        model=model,
        choice=choice,
        residents=False,
        device="emulated",
        num_micro_batches=2,
        dropout=0.2,
        num_steps=2,
    )
    assert_same(*run_case(case, tmp_path))
    assert threads
