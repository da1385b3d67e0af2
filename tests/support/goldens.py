"""The cases kept as goldens: small models, every kind of schedule, and what is simulated of them.

`scripts/regenerate_goldens` writes them to tests/golden; a test compares byte for byte.
"""

import json
import pathlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

from lohan.hardware.machine import Machine
from lohan.hardware.presets import machine_named
from lohan.model.names import shape_of
from lohan.model.shape import ModelShape
from lohan.paper import policy_named
from lohan.plan import Plan, Workload
from lohan.schedule import dump_schedule
from lohan.simulate import settled_schedule, simulate_plan
from lohan.units import GIB

FOLDER = pathlib.Path(__file__).parents[1] / "golden"
_SHOWN_STEP = 1


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model on one machine under one policy."""

    name: str
    model: str
    machine: str
    policy: str
    batch: int
    ram_gib: int | None = None
    clips_gradients: bool = False

    def plan(self) -> tuple[Plan, Machine]:
        machine = machine_named(self.machine)
        if self.ram_gib is not None:
            machine = machine.with_ram(self.ram_gib * GIB)
        workload = Workload(batch=self.batch, sequence=1024, clips_gradients=self.clips_gradients)
        return policy_named(self.policy).plan(machine, short(self.model), workload), machine


CASES = (
    Case(name="lohan", model="gpt-6b", machine="paper-4090", policy="lohan", batch=32),
    Case(
        name="naive-pipeline",
        model="gpt-6b",
        machine="paper-4090",
        policy="lohan+naive-pipeline",
        batch=32,
    ),
    Case(
        name="zero-infinity",
        model="gpt-6b",
        machine="paper-4090",
        policy="zero-infinity",
        batch=8,
    ),
    Case(
        name="ours",
        model="gpt-6b",
        machine="desktop-4090",
        policy="lohan+",
        batch=64,
        ram_gib=14,
    ),
    Case(
        name="ours-clipped-and-spilled",
        model="gpt-6b",
        machine="paper-4090",
        policy="lohan+",
        batch=64,
        ram_gib=2,
        clips_gradients=True,
    ),
    Case(name="ours-tied", model="gpt2", machine="desktop-4090", policy="lohan+", batch=16),
)


def short(name: str) -> ModelShape:
    """A model cut down to its embedding, three blocks and its head."""
    shape = shape_of(name)
    kinds = shape.sequence_of_kinds
    tied = tuple((owner, 4, count) for owner, _, count in shape.tied)
    sequence = (kinds[0], *kinds[1:4], kinds[-1])
    return replace(shape, name=f"{name} cut to 3 blocks", sequence_of_kinds=sequence, tied=tied)


def golden_files() -> Iterator[tuple[str, str]]:
    """Name and text of every golden file."""
    steps = {}
    for case in CASES:
        plan, machine = case.plan()
        schedule = settled_schedule(plan, machine, num_steps=3)
        yield f"{case.name}.txt", dump_schedule(schedule, step=_SHOWN_STEP)
        yield f"{case.name}.plan.json", plan.to_json() + "\n"
        steps[case.name] = {
            name: _rounded(value)
            for name, value in simulate_plan(plan, machine).to_json_fields().items()
        }
    yield "simulated.json", json.dumps(steps, indent=1) + "\n"


def _rounded(value: object) -> object:
    """Numbers to ten digits: the last bits may differ between processors."""
    if isinstance(value, float):
        return float(f"{value:.10g}")
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    return value
