"""Peak memory of a training process, measured from outside, against the budget it was given.

The bare process has imported everything, has run a step of one layer, and has the model on meta;
what it takes beyond that is the engine's. On the cpu device the budget holds the GPU tier too.
"""

from pathlib import Path

import pytest

from lohan.units import MIB, parse_bytes
from support.offloaded_run import Settings
from support.watched_runs import Watched, watch

RAM = "104MiB"
TRAINING = ("attach", "first step", "steps", "seal", "evaluate")


@pytest.mark.slow
def test_peak_ram_keeps_to_the_budget_and_is_flat_in_the_number_of_layers(tmp_path: Path) -> None:
    def run(layers: int) -> Watched:
        watched = watch(
            Settings(
                directory=str(tmp_path / str(layers)),
                layers=layers,
                batch=1,
                sequence=64,
                ram=RAM,
                should_resume=layers == 12,
            )
        )
        assert not watched.error, watched.error
        return watched

    short, long = run(6), run(12)
    budget = parse_bytes(RAM)
    for watched in (short, long):
        peaks = {phase: watched.peaks[phase] for phase in TRAINING}
        assert max(peaks.values()) <= budget, watched.story()
    assert max(long.peaks["resume"], long.peaks["steps after resume"]) <= budget, long.story()
    # The states of the longer model: five times the budget and more.
    assert long.facts["states_bytes"] >= 5 * budget
    assert long.facts["states_bytes"] > 1.8 * short.facts["states_bytes"]
    # 300 MB of states more. Plans may use the budget differently; beside buffers, what grows is the
    # tasks of schedules as Python objects, about 1 MiB a layer while plans are compared.
    beside = [watched.peaks["steps"] - watched.facts["buffers_bytes"] for watched in (short, long)]
    assert beside[1] - beside[0] <= 12 * MIB, f"{short.story()}\n\n{long.story()}"
