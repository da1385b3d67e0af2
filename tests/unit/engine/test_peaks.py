"""What an engine says it held, from plan to plan."""

from pathlib import Path

import pytest

from support.engine_runs import EngineCase, attach, batches_of, build, optimizer_for


def test_memory_held_under_an_earlier_plan_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # After the fourth step another plan is taken where the machine turns out to be different.
    monkeypatch.setattr("lohan.engine.engine.faster_plan", lambda before, *_: before)
    case = EngineCase(num_steps=5)
    *first, last = batches_of(case)
    model = build(case)
    with attach(case, model, optimizer_for(case, model), tmp_path) as engine:
        for batch in first[:3]:
            engine.step(batch)
        running, held_bytes = engine._running, engine.ram_peak_bytes
        engine.step(first[3])
        assert engine._running is not running
        engine.step(last)
        assert engine.ram_peak_bytes >= held_bytes
        engine.close(should_delete=True)
