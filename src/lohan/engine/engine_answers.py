"""What an engine can be asked between steps: counts, plan, seal, memory, traces.

Owns no work: nothing here changes anything but predictions, made from when first asked for.
The engine is made of this and of what it does.
"""

from typing import Any

from lohan.engine.model_buffers import ModelBuffers
from lohan.engine.planning.predicting import Predictions
from lohan.engine.results import RunCounters
from lohan.engine.run_setup import RunSetup
from lohan.engine.running import RunningPlan
from lohan.engine.seal_metadata import Sealed
from lohan.hardware.machine import Machine
from lohan.plan.plan import Plan
from lohan.simulate import SimulatedStep
from lohan.store import StateStore, StoreCounters
from lohan.trace import Recorder, Trace


class EngineAnswers:
    """The read-only side of an engine."""

    _setup: RunSetup
    _counters: RunCounters
    _buffers: ModelBuffers
    _running: RunningPlan | None
    _predictions: Predictions
    _recorder: Recorder

    @property
    def run_id(self) -> str:
        """Names the run's directories on the SSDs; `attach(run=...)` takes it up again."""
        return self._setup.run.run_id

    @property
    def num_steps(self) -> int:
        """Optimizer steps taken, skipped ones included."""
        return self._counters.num_steps

    @property
    def counters(self) -> dict[str, Any]:
        """What a copy of the states needs besides them: `attach(counters=...)` takes it."""
        return self._counters.to_json()

    @property
    def buffers(self) -> dict[str, Any]:
        """The model's persistent buffers for such a copy: `attach(buffers=...)` takes it."""
        return self._buffers.to_json()

    @property
    def sealed(self) -> Sealed | None:
        """The last resume point."""
        return Sealed.of(self._setup.store.sealed)

    @property
    def plan(self) -> Plan | None:
        """The plan in use; None before the first step."""
        return self._running.planned.plan if self._running is not None else None

    @property
    def machine(self) -> Machine:
        """What the plan counts on: as measured, and after the first steps as they showed it."""
        return self._setup.machine

    @property
    def gpu_peak_bytes(self) -> int | None:
        """Most held at once on the device; None where it computes in main memory."""
        device = self._setup.device
        return None if device.shares_ram else device.peak_bytes

    @property
    def prediction(self) -> SimulatedStep | None:
        """What the simulator says the next step takes, by what steps have shown so far; None
        before the first plan."""
        return None if self._running is None else self._predictions.of(self._running.planned)

    @property
    def rates_note(self) -> str:
        """What to know about the rates of drives in predictions; empty once steps have shown
        them."""
        return "" if self._predictions.has_learned else self._setup.known.note

    @property
    def is_rehearsing(self) -> bool:
        """Whether a loss function is called only to count its draws; its result is thrown away."""
        return self._running is not None and self._running.model.is_learning_draws

    @property
    def store(self) -> StateStore:
        """The states."""
        return self._setup.store

    @property
    def written_bytes(self) -> int:
        """Written to the SSDs by attaching and since: to measure them, first states, steps,
        seals."""
        return self._setup.written_bytes

    @property
    def measuring_bytes(self) -> int:
        """As much of that as was written to measure the SSDs."""
        return self._setup.known.written_bytes

    @property
    def traffic(self) -> StoreCounters:
        """SSD traffic of the plan in use. What a step moves goes on after its call has ended: for
        exact figures ask after `synchronize`."""
        return self._running.counters if self._running is not None else StoreCounters()

    @property
    def ram_peak_bytes(self) -> int:
        """Most main memory held at once by buffers and resident states, of all plans so far."""
        buffers = self._running.host.peak_bytes if self._running is not None else 0
        return max(buffers, self._setup.past_buffers_bytes) + self.store.ram_peak_bytes

    def trace(self) -> Trace:
        """What the lanes did so far (the newest spans), if the engine was attached to trace."""
        plan = self.plan
        return self._recorder.trace(
            f"{plan.policy if plan else 'no plan'} on {self._setup.device.name}",
            budgets_bytes=dict(plan.ledger.budgets) if plan else None,
        )

    def predicted_trace(self) -> Trace | None:
        """The same lanes and tasks as the simulator sees them; None before the first step."""
        return self._running.predicted_trace() if self._running is not None else None
