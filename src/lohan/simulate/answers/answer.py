"""The answer of `lohan plan` and `lohan simulate`: everything about one plan, as numbers.

Gathers ledger, simulated step, run totals, what-ifs, limits and nearest fits; prints nothing. The
tables are in `lohan.cli.tables.plan_tables`, the JSON form here.
"""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace

from lohan.errors import DoesNotFit
from lohan.hardware.machine import Machine
from lohan.model.names import models_like
from lohan.model.shape import ModelShape
from lohan.plan.limits import (
    NearestFit,
    Question,
    largest_batch,
    largest_model,
    more_memory,
    nearest_fits,
)
from lohan.plan.plan import Plan
from lohan.plan.policies import SystemPolicy
from lohan.plan.run_cost import run_cost, run_warnings
from lohan.plan.run_room import DriveRoom
from lohan.plan.workload import Workload
from lohan.simulate.answers.batch_advice import BatchChoice, advised, batch_choices, simulated_by
from lohan.simulate.answers.what_if import WhatIf, what_ifs
from lohan.simulate.choose import Judge, JudgedPlan
from lohan.simulate.result import SimulatedStep
from lohan.units import format_bytes
from lohan.vocabulary import Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a command was asked for, understood."""

    machine: Machine
    shape: ModelShape
    workload: Workload
    policy: SystemPolicy
    has_own_ram: bool
    """The RAM size was given on the command line."""

    @property
    def question(self) -> Question:
        """The same as a question to the planner."""
        return Question(
            policy=self.policy, machine=self.machine, shape=self.shape, workload=self.workload
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTotals:
    """A whole run at the simulated rate."""

    num_tokens: int
    num_steps: int
    hours: float
    written_bytes: float
    endurance_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Everything about one plan."""

    request: Request
    plan: Plan
    step: SimulatedStep | None = None
    """None if it does not fit."""
    run: RunTotals | None = None
    what_ifs: tuple[WhatIf, ...] = ()
    batches: tuple[BatchChoice, ...] = ()
    """The batch asked for and larger ones."""
    largest_batch: int | None = None
    largest_model: str | None = None
    """With one sequence per GPU, among the known models."""
    nearest: tuple[NearestFit, ...] = ()
    rooms: tuple[DriveRoom, ...] = ()
    """Of the filesystems of this machine that the run would touch, if it is known which."""

    @property
    def warnings(self) -> list[str]:
        """What the run would do to the drives, if it is much."""
        written = self.run.written_bytes if self.run is not None else 0
        return run_warnings(
            self.request.machine, self.plan.ledger, written_bytes=written, rooms=self.rooms
        )

    def to_fields(self) -> dict[str, object]:
        """Every number as plain values."""
        request, workload = self.request, self.request.workload
        fields: dict[str, object] = {
            "fits": self.plan.ledger.fits,
            "simulated": True,
            "model": self.plan.shape.name,
            "num_parameters": self.plan.shape.num_parameters,
            "num_trained_parameters": self.plan.shape.num_trained_parameters,
            "machine": request.machine.name,
            "machine_description": request.machine.description,
            "num_gpus": request.machine.num_gpus,
            "policy": request.policy.name,
            "num_ranks": workload.num_ranks,
            "batch": workload.batch * workload.num_ranks,
            "sequence": workload.sequence,
            "clips_gradients": workload.clips_gradients,
            "num_micro_batches": self.plan.num_micro_batches,
            "loss_chunks": self.plan.loss_chunks,
            "ledger": ledger_fields(self.plan),
            "warnings": self.warnings,
            "rooms": [room.to_fields() for room in self.rooms],
            "shortages": {t.value: short for t, short in self.plan.ledger.shortages().items()},
        }
        if self.step is not None and self.run is not None:
            fields |= self.step.to_json_fields()
            fields["run"] = {
                **asdict(self.run),
                "dollars": run_cost(
                    request.machine,
                    seconds=self.run.hours * 3600,
                    written_bytes=self.run.written_bytes,
                ).dollars,
            }
            fields["batches"] = [
                {
                    "batch": one.batch,
                    "tokens_per_second": one.step.tokens_per_second,
                    "faster": one.faster,
                    "wear": one.wear,
                }
                for one in self.batches
            ]
            if self.batches:
                fields["advised_batch"] = advised(list(self.batches)).batch
            fields["what_ifs"] = [
                {
                    "change": one.change,
                    "option": one.option,
                    "fits": one.step is not None,
                    "step_seconds": one.step.step_seconds if one.step else None,
                    "tokens_per_second": one.step.tokens_per_second if one.step else None,
                    "factor": one.factor,
                }
                for one in self.what_ifs
            ]
        fields["largest_batch"] = self.largest_batch
        fields["largest_model"] = self.largest_model
        if not self.plan.ledger.fits:
            fields["nearest"] = [asdict(one) for one in self.nearest]
        return fields


def ledger_fields(plan: Plan) -> dict[str, object]:
    """The ledger per tier as plain values."""
    ledger = plan.ledger
    return {
        tier.value: {
            "budget_bytes": ledger.budgets[tier],
            "needed_bytes": ledger.total(tier),
            "spare_bytes": ledger.spare(tier),
            "lines": [
                {"purpose": line.purpose, "bytes": line.nbytes} for line in ledger.lines_of(tier)
            ],
        }
        for tier in Tier
    }


def totals_of(step: SimulatedStep, num_tokens: int) -> RunTotals:
    """A run of a number of tokens: whole steps, so the last one may see more."""
    num_steps = math.ceil(step.num_steps_for(num_tokens))
    return RunTotals(
        num_tokens=num_tokens,
        num_steps=num_steps,
        hours=num_steps * step.step_seconds / 3600,
        written_bytes=num_steps * step.written_bytes,
        endurance_share=num_steps * step.endurance_share_per_step,
    )


def plan_of(request: Request, judge: Judge | None = None) -> Plan:
    """The plan asked for, fitting or not, as a judge takes it.

    Raises:
        DoesNotFit: if the RAM size on the command line is below what the model needs whatever
            the batch: no answer about this model can be given with it.
    """
    taken = (judge or Judge()).best(request.question)
    if taken is not None:
        return taken.plan
    plan = request.policy.plan(request.machine, request.shape, request.workload)
    if request.has_own_ram and Tier.RAM in plan.ledger.shortages():
        _require_minimum_ram(request)
    return plan


def _require_minimum_ram(request: Request) -> None:
    smallest = replace(
        request.question,
        workload=replace(request.workload, batch=request.machine.num_gpus),
    )
    plan = request.policy.plan(smallest.machine, smallest.shape, smallest.workload)
    if Tier.RAM not in plan.ledger.shortages():
        return
    ram_bytes = request.machine.ram_bytes
    # Drives may be short too: RAM that makes up for them is nobody's choice.
    least = next(more_memory(smallest, plan.ledger.shortages()), None)
    largest = plan.ledger.lines_of(Tier.RAM)[0]
    needs = plan.ledger.total(Tier.RAM)
    raise DoesNotFit(
        f"--ram {format_bytes(ram_bytes)} is below the minimum: {request.policy.name} with "
        f"{request.shape.name} needs {format_bytes(needs)} of RAM even for one sequence per GPU, "
        f"{format_bytes(plan.ledger.budgets[Tier.RAM])} of it are allowed, short by "
        f"{format_bytes(plan.ledger.shortages()[Tier.RAM])}",
        why=f"the largest part is {format_bytes(largest.nbytes)} of {largest.purpose}",
        remedy=(
            f"give at least {least.option}"
            if least is not None
            else "use a smaller model: other memory is short too"
        )
        + "; or use a smaller model or another --policy",
    )


def with_limits(answer: Answer, policies: Iterable[SystemPolicy]) -> Answer:
    """The same answer with the largest batch and model that fit, and what to do if it does not."""
    request = answer.request
    question = request.question
    shapes = models_like(request.shape, request.workload.sequence)
    smallest = replace(question, workload=replace(request.workload, batch=request.machine.num_gpus))
    largest = largest_model(smallest, shapes)
    ledger = answer.plan.ledger
    return replace(
        answer,
        largest_batch=largest_batch(question),
        largest_model=largest.name if largest else None,
        nearest=()
        if ledger.fits
        else tuple(nearest_fits(question, ledger.shortages(), shapes, policies)),
    )


def with_step(answer: Answer, step: SimulatedStep, num_tokens: int, judge: Judge) -> Answer:
    """The same answer with a simulated step, the run's totals and the what-ifs."""
    question = answer.request.question
    return replace(
        answer,
        step=step,
        run=totals_of(step, num_tokens),
        what_ifs=tuple(what_ifs(question, JudgedPlan(plan=answer.plan, step=step), judge)),
        batches=tuple(batch_choices(question, step, simulated_by(judge))),
    )
