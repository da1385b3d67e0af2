"""Policies side by side: each planned and simulated on the same machine, as a table or JSON.

Owns which systems count as baselines and the best-batch search; the batches tried are those the
published sweeps used.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich.console import Console

from lohan.cli.output import table
from lohan.cli.request import check_policy
from lohan.errors import ConfigError
from lohan.hardware.machine import Machine
from lohan.model.shape import ModelShape
from lohan.plan.plan import Plan
from lohan.plan.policies import POLICY_NAMES
from lohan.plan.policies.ours import OURS
from lohan.plan.workload import Workload
from lohan.simulate import SimulatedStep, simulate_plan
from lohan.simulate.choose import best_plan
from lohan.simulate.quick import quick_step
from lohan.simulate.reproduce import BATCHES
from lohan.units import format_bytes, format_bytes_decimal, format_count, format_seconds

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
            fields["speedup_over_best_baseline"] = _speedup(row, best)
        return fields


def _speed(row: Compared) -> float:
    return row.step.tokens_per_second if row.step else 0.0


def _speedup(row: Compared, best: Compared | None) -> float | None:
    return _speed(row) / _speed(best) if best is not None and _speed(best) else None


def tokens_per_kdollar(step: SimulatedStep) -> float | None:
    """Tokens per second for each 1000 dollars of the machine's price; None if it has none."""
    return step.tokens_per_second / (step.price_dollars / 1000) if step.price_dollars else None


def policies_asked(text: str | None) -> tuple[str, ...]:
    """The policies named in a list separated by commas; all of them if none is given.

    Raises:
        ConfigError: for an unknown name, or an empty list.
    """
    if text is None:
        return POLICY_NAMES
    names = [check_policy(word) for word in text.split(",") if word.strip()]
    if not names:
        raise ConfigError(
            "--policies names none",
            why="there must be something to compare",
            remedy=f"name some of {', '.join(POLICY_NAMES)}, or leave it out",
        )
    return tuple(dict.fromkeys(names))


def comparison_of(
    policies: Sequence[str],
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
        own = replace(workload, clips_gradients=clips_ours and policy == OURS.name)
        if finds_best_batch:
            own = best_workload(policy, machine, shape, own)
        plan = best_plan(policy, machine, shape, own)
        step = simulate_plan(plan, machine) if plan.ledger.fits else None
        rows.append(Compared(policy=policy, plan=plan, step=step))
    return Comparison(
        machine=machine,
        shape=shape,
        workload=workload,
        finds_best_batch=finds_best_batch,
        rows=tuple(rows),
    )


def best_workload(policy: str, machine: Machine, shape: ModelShape, workload: Workload) -> Workload:
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


def show_comparison(found: Comparison, console: Console) -> None:
    """Print the policies as a table."""
    workload = found.workload
    console.print(
        f"{found.shape.name} ({format_count(found.shape.num_parameters)} parameters) on "
        f"{found.machine.name}, ${found.machine.price_dollars:,.0f}",
        style="bold",
    )
    console.print(found.machine.description)
    batch = "each at its best batch" if found.finds_best_batch else f"batch {workload.batch}"
    clipping = (
        "lohan+ clips gradients, the others cannot"
        if any(row.plan.workload.clips_gradients for row in found.rows)
        else "without gradient clipping"
    )
    console.print(f"{batch} x {workload.sequence} tokens, {clipping}; all times are simulated")
    best = found.best_baseline
    columns = ["policy", "batch", "step", "tokens/s", "TFLOPS", "of model", "written"]
    columns += ["roofline", "per k$", "speed-up"]
    shown = table("", *columns, numbers=tuple(columns[1:]))
    shown.title = None
    for row in found.rows:
        step = row.step
        if step is None:
            continue
        per_kdollar, speedup = tokens_per_kdollar(step), _speedup(row, best)
        shown.add_row(
            row.policy,
            str(row.plan.workload.batch),
            format_seconds(step.step_seconds),
            f"{step.tokens_per_second:,.1f}",
            f"{step.paper_tflops:.1f}",
            f"{step.model_tflops:.1f}",
            format_bytes_decimal(step.written_bytes),
            f"{step.roofline_share:.0%}",
            "-" if per_kdollar is None else f"{per_kdollar:.1f}",
            "-" if speedup is None else f"{speedup:.2f}x",
        )
    console.print()
    console.print(shown if shown.row_count else "No policy fits.")
    missing = table("\nDoes not fit", "policy", "batch", "what is short", numbers=("batch",))
    for row in found.rows:
        if row.step is None:
            missing.add_row(row.policy, str(row.plan.workload.batch), row.shortage)
    if missing.row_count:
        console.print(missing)
    console.print()
    if best is not None:
        console.print(
            f"speed-up is over {best.policy}, the fastest of the published baselines that fit "
            f"({', '.join(BASELINES)})"
        )
    elif any(row.policy in BASELINES for row in found.rows):
        console.print("none of the published baselines compared here fits: no speed-up is given")
    console.print(
        "TFLOPS: the paper's count of 8 per nominal parameter and token; of model: what the model "
        "itself needs\nwritten: to SSD per step; roofline: share of it that is reached; per k$: "
        "tokens/s for each 1000 dollars"
    )
