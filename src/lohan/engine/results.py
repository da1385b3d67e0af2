"""What a step gives back, what is sealed, and what is counted from step to step.

Owns these records, and what of them the engine puts into a seal beside the states and finds there
again: its counters, the model's buffers, and what the user gave. The engine fills them in; `attach`
makes the first seal of a run.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from lohan.engine.loss import LossScale
from lohan.errors import ScheduleError
from lohan.lanes.step_record import StepRecord
from lohan.store import Manifest, StoreCounters

ItemT = TypeVar("ItemT")
_COUNTERS, _BUFFERS, _USER = "lohan", "buffers", "user"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """One optimizer step."""

    step: int
    """Counts from 1."""
    loss: float
    """Of the whole step: the weighted sum of its micro-batches' losses."""
    losses: tuple[float, ...]
    """Of each micro-batch, already weighted."""
    grad_norm: float | None
    """Global norm before clipping; None where nothing waits for it."""
    tokens: int
    seconds: float
    read_bytes: int
    """While the step ran. Updates go on under the next step, and their bytes count there."""
    written_bytes: int
    busy: Mapping[str, float]
    """Share of the step's time each lane was at work."""
    bottleneck: str
    predicted_seconds: float | None = None
    """As predicted before the step; None where no prediction was asked for."""
    is_skipped: bool = False
    """Gradients were not finite; weights and states are as before."""
    loss_scale: float | None = None

    @classmethod
    def of(
        cls,
        record: StepRecord,
        losses: tuple[float, ...],
        *,
        tokens: int,
        seconds: float,
        traffic: StoreCounters,
        load: tuple[Mapping[str, float], str],
        predicted_seconds: float | None,
    ) -> "StepResult":
        """From a finished record, the SSD traffic meanwhile, and how busy lanes were."""
        return cls(
            step=record.number,
            loss=sum(losses),
            losses=losses,
            grad_norm=record.grad_norm,
            tokens=tokens,
            seconds=seconds,
            read_bytes=traffic.read_bytes,
            written_bytes=traffic.written_bytes,
            busy=load[0],
            bottleneck=load[1],
            predicted_seconds=predicted_seconds,
            is_skipped=record.is_skipped,
            loss_scale=record.loss_scale,
        )


@dataclass(slots=True, kw_only=True)
class RunCounters:
    """What lasts from step to step and is sealed with the states."""

    num_steps: int = 0
    num_updates: int = 0
    missed: dict[str, int] = field(default_factory=dict)
    """Updates a tensor did not get because it had no gradient."""
    scale: LossScale | None = None
    reduction_groups: int = 1

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        scale = self.scale
        return {
            "num_steps": self.num_steps,
            "num_updates": self.num_updates,
            "missed": dict(self.missed),
            "loss_scale": [scale.value, scale.num_good] if scale is not None else None,
            "reduction_groups": self.reduction_groups,
        }

    def take(self, sealed: Mapping[str, Any]) -> None:
        """Go on from what `to_json` gave."""
        self.num_steps = int(sealed["num_steps"])
        self.num_updates = int(sealed["num_updates"])
        self.missed = {name: int(count) for name, count in sealed["missed"].items()}
        self.reduction_groups = int(sealed.get("reduction_groups", 1))
        if self.scale is not None and sealed["loss_scale"]:
            self.scale.value, self.scale.num_good = sealed["loss_scale"]

    def count(self, record: StepRecord) -> None:
        """A step has ended."""
        self.num_steps += 1
        if self.scale is not None:
            self.scale.update(is_overflow=record.is_skipped)
        if record.is_skipped:
            return
        self.num_updates += 1
        for block, names in record.trained.items():
            missing = record.missing.get(block)
            for name in names:
                if missing is None or name in missing:
                    self.missed[name] = self.missed.get(name, 0) + 1


def of_one_step(items: Iterator[ItemT], num_steps: Callable[[], int]) -> Iterator[ItemT]:
    """What is read from the states piece by piece, as long as no step is taken meanwhile.

    Raises:
        ScheduleError: one was.
    """
    before = num_steps()
    for item in items:
        given = [item]
        del item  # not held while the next one is made
        yield given.pop()
        if num_steps() != before:
            raise ScheduleError(
                f"step {num_steps()} was taken while the states of step {before} were being read",
                why="what follows would be of another step than what came",
                remedy="read everything before the next step, or begin to read anew",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sealed:
    """The last resume point."""

    step: int
    metadata: Mapping[str, Any]

    @classmethod
    def of(cls, manifest: Manifest | None) -> "Sealed | None":
        """As a user sees a seal."""
        if manifest is None:
            return None
        return cls(step=manifest.step, metadata=manifest.metadata.get(_USER, {}))


def seal_metadata(
    *, counters: Mapping[str, Any] | None, buffers: Mapping[str, Any], user: Mapping[str, Any]
) -> dict[str, Any]:
    """The metadata of a seal; without counters for a run that begins."""
    found = {_BUFFERS: dict(buffers), _USER: dict(user)}
    return found if counters is None else {_COUNTERS: dict(counters), **found}


def sealed_counters(manifest: Manifest | None) -> Mapping[str, Any] | None:
    """Counters to go on from; None if the run begins."""
    found: Mapping[str, Any] | None = (
        manifest.metadata.get(_COUNTERS) if manifest is not None else None
    )
    return found


def sealed_buffers(manifest: Manifest | None) -> Mapping[str, Any]:
    """The model's buffers in a seal, in their sealed form; none in those of older releases."""
    found: Mapping[str, Any] = manifest.metadata.get(_BUFFERS, {}) if manifest is not None else {}
    return found
