"""Policies side by side: each planned and simulated on the same machine, as plain values.

Owns which systems count as baselines and the best-batch search; the batches tried are those the
published sweeps used.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lohan.hardware.machine import Machine
from lohan.model.shape import ModelShape
from lohan.paper.reproduce import BATCHES
from lohan.plan.plan import Plan
from lohan.plan.policies import OUR_POLICY, SystemPolicy
from lohan.plan.workload import Workload
from lohan.simulate import SimulatedStep, simulate_plan
from lohan.simulate.choose import best_plan
from lohan.simulate.quick import quick_step
from lohan.units import format_bytes

BASELINES = ("zero-infinity", "zero-offload", "colossal-ai", "flashneuron", "gpu-only")
"""Systems others have run on such machines. G10 is none: it was only ever simulated, with direct
SSD-GPU transfers that consumer cards do not have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One policy: its plan, and its step if that fits."""

    policy: str
    plan: Plan
    step: SimulatedStep | None

    @property
    def shortage(self) -> str:
        """What is short, in words."""
        shortages = self.plan.ledger.shortages().items()
        return ", ".join(f"{tier} short by {format_bytes(short)}" for tier, short in shortages)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All policies, in the order they are listed."""

    machine: Machine
    shape: ModelShape
    workload: Workload
    finds_best_batch: bool
    rows: tuple[Compared, ...]

    @property
    def best_baseline(self) -> Compared | None:
        """The fastest of the published baselines that fits."""
        running = [row for row in self.rows if row.policy in BASELINES and row.step is not None]
        return max(running, key=_speed, default=None)

    def to_fields(self) -> dict[str, object]:
        """Every number as plain values."""
        best = self.best_baseline
        return {
            "simulated": True,
            "model": self.shape.name,
            "machine": self.machine.name,
            "machine_description": self.machine.description,
            "price_dollars": self.machine.price_dollars,
            "batch": None if self.finds_best_batch else self.workload.batch,
            "sequence": self.workload.sequence,
            "best_baseline": best.policy if best else None,
            "policies": [self._fields(row, best) for row in self.rows],
        }

    def _fields(self, row: Compared, best: Compared | None) -> dict[str, object]:
        fields: dict[str, object] = {
            "policy": row.policy,
            "fits": row.step is not None,
            "batch": row.plan.workload.batch,
            "clips_gradients": row.plan.workload.clips_gradients,
            "shortages": {t.value: short for t, short in row.plan.ledger.shortages().items()},
        }
        if row.step is not None:
            fields |= row.step.to_json_fields()
            fields["tokens_per_second_per_kdollar"] = tokens_per_kdollar(row.step)
            fields["speedup_over_best_baseline"] = speedup(row, best)
        return fields


def _speed(row: Compared) -> float:
    return row.step.tokens_per_second if row.step else 0.0


def speedup(row: Compared, best: Compared | None) -> float | None:
    """Tokens per second over those of the best baseline; None if none fits."""
    return _speed(row) / _speed(best) if best is not None and _speed(best) else None


def tokens_per_kdollar(step: SimulatedStep) -> float | None:
    """Tokens per second for each 1000 dollars of the machine's price; None if it has none."""
    return step.tokens_per_second / (step.price_dollars / 1000) if step.price_dollars else None


def comparison_of(
    policies: Sequence[SystemPolicy],
    machine: Machine,
    shape: ModelShape,
    workload: Workload,
    *,
    finds_best_batch: bool = False,
    clips_ours: bool = False,
) -> Comparison:
    """Plan and simulate each policy.

    Raises:
        ConfigError: if the batch does not divide over the GPUs.
    """
    rows = []
    for policy in policies:
        own = replace(workload, clips_gradients=clips_ours and policy is OUR_POLICY)
        if finds_best_batch:
            own = best_workload(policy, machine, shape, own)
        plan = best_plan(policy, machine, shape, own)
        step = simulate_plan(plan, machine) if plan.ledger.fits else None
        rows.append(Compared(policy=policy.name, plan=plan, step=step))
    return Comparison(
        machine=machine,
        shape=shape,
        workload=workload,
        finds_best_batch=finds_best_batch,
        rows=tuple(rows),
    )


def best_workload(
    policy: SystemPolicy, machine: Machine, shape: ModelShape, workload: Workload
) -> Workload:
    """The batch with most tokens per second among doubling ones; one sequence if none fits."""
    best, best_speed = replace(workload, batch=machine.num_gpus), 0.0
    for per_gpu in BATCHES:
        candidate = replace(workload, batch=per_gpu * machine.num_gpus)
        plan = best_plan(policy, machine, shape, candidate)
        if not plan.ledger.fits:
            break  # What a larger batch needs is never less.
        speed = quick_step(plan, machine).tokens_per_second
        if speed > best_speed:
            best, best_speed = candidate, speed
    return best
