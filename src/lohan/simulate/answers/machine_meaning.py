"""What a measured machine means for a full fine-tune: which part of it everything else waits for.

Plans and simulates one step of a model people know, the largest of a few that fits. Measures and
prints nothing.
"""

from dataclasses import dataclass

from lohan.errors import LohanError
from lohan.hardware.machine import Machine
from lohan.model.names import shape_of
from lohan.plan.policies import OUR_POLICY
from lohan.plan.workload import Workload
from lohan.simulate.choose import best_plan
from lohan.simulate.quick import quick_step
from lohan.simulate.result import SimulatedStep

_MODELS = ("llama-3.1-8b", "gpt2-xl", "smollm2-135m", "gpt2")
_BATCHES = (8, 1)
_SEQUENCE = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Meaning:
    """One simulated step on the machine."""

    model: str
    batch: int
    sequence: int
    step: SimulatedStep

    @property
    def option(self) -> str:
        """What to write after `lohan plan` to see it in full."""
        return f"{self.model} --batch {self.batch} --seq {self.sequence}"

    def to_fields(self) -> dict[str, object]:
        """Every number as plain values."""
        return {
            "model": self.model,
            "batch": self.batch,
            "sequence": self.sequence,
            "simulated": True,
            "step_seconds": self.step.step_seconds,
            "tokens_per_second": self.step.tokens_per_second,
            "bottleneck": self.step.bottleneck,
            "busy_seconds": {
                lane.value: busy for lane, busy in self.step.busy_seconds.items() if busy
            },
        }


def meaning_of(machine: Machine) -> Meaning | None:
    """A step of the first model and batch that fit; None if none does."""
    for model in _MODELS:
        for batch in _BATCHES:
            try:
                shape = shape_of(model, sequence=_SEQUENCE)
                workload = Workload(batch=batch, sequence=_SEQUENCE, clips_gradients=True)
                plan = best_plan(OUR_POLICY, machine, shape, workload)
                if not plan.ledger.fits:
                    continue
                step = quick_step(plan, machine)
            except LohanError:
                continue  # What cannot be planned here means nothing for this machine.
            return Meaning(model=model, batch=batch, sequence=_SEQUENCE, step=step)
    return None
