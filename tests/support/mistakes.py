"""Mistakes of order put in on purpose, one at a time, to see which device notices them.

Each takes away one wait or one edge of the schedule that makes some work come after other work.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from lohan.device import EmulatedDevice, EmulatedRates
from lohan.device.accelerator import AcceleratorDevice, CopyEnds
from lohan.device.memory import DeviceMemory
from lohan.lanes.activation_moves import SwappedActivations
from lohan.lanes.executor import LaneExecutor
from lohan.lanes.gradient_moves import GradientMoves
from lohan.lanes.launched import Launched
from lohan.lanes.weight_moves import WeightMoves
from lohan.schedule.task import Compute, Move, Task
from lohan.vocabulary import ComputeKind, Lane, TensorKind, Tier
from support import accelerator

# Far more than whoever does not wait can take, on a busy machine too. Many small copies go out, one
# after the other, so that each of those may be less late.
LATE_COPY_MICROSECONDS = {Lane.RAM_TO_GPU: 25_000, Lane.GPU_TO_RAM: 4000}
LATE_KERNEL_MICROSECONDS = 200
SLOW_BYTES_PER_SECOND = 5e5


@dataclass(frozen=True, kw_only=True)
class Mistake:
    """What is taken away, and who sees that it is gone."""

    words: str
    put: Callable[[pytest.MonkeyPatch], None]
    seen_by: frozenset[str]
    """Of `cpu`, `emulated` and `accelerator`."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Of the case that is run."""
    late_lanes: tuple[Lane, ...] = ()
    """Copies that come late on the accelerator, so that whoever does not wait is early for sure."""


class _Unwaited:
    """A device whose copies nobody waits for."""

    def __init__(self, device: Any) -> None:
        self._device = device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def wait(self, event: Any) -> None:
        """Go on at once."""


def _without_waits(owner: type, name: str) -> Callable[[pytest.MonkeyPatch], None]:
    """One kind of move does not wait for its copies."""
    right = getattr(owner, name)

    def mistaken(self: Any, *args: Any, **kwargs: Any) -> Any:
        device = self._device
        self._device = _Unwaited(device)
        try:
            return right(self, *args, **kwargs)
        finally:
            self._device = device

    return lambda patch: patch.setattr(owner, name, mistaken)


def _copies_start_at_once(patch: pytest.MonkeyPatch) -> None:
    for owner in (AcceleratorDevice, EmulatedDevice):
        right = owner.copy_async

        def mistaken(self: Any, dst: Any, src: Any, *, right: Any = right, **given: Any) -> Any:
            return right(self, dst, src, **{**given, "after": ()})

        patch.setattr(owner, "copy_async", mistaken)


class _UnwaitedQueue(_Unwaited):
    """Nor does it have times of what is not done."""

    def seconds_between(self, first: Any, second: Any) -> float:
        return 0.0


def _segments_are_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    right = Launched.__init__
    patch.setattr(Launched, "__init__", lambda self, queue: right(self, _UnwaitedQueue(queue)))


def _memory_goes_before_its_copy_is_done(patch: pytest.MonkeyPatch) -> None:
    right = AcceleratorDevice.compute_waits

    def mistaken(self: Any, event: Any) -> None:
        compute, self._compute_stream = self._compute_stream, self._memory_stream
        try:
            right(self, event)
        finally:
            self._compute_stream = compute

    patch.setattr(AcceleratorDevice, "compute_waits", mistaken)


def memory_is_reused_under_compute(patch: pytest.MonkeyPatch) -> None:
    """The allocator is not told that compute uses what it gets back. Not in the list: the engine
    ends a lease when the device is done with it, which hides it; a device alone shows it."""

    right = AcceleratorDevice.free

    def mistaken(self: Any, memory: DeviceMemory, *, is_idle: bool = False) -> None:
        right(self, memory, is_idle=True)

    patch.setattr(AcceleratorDevice, "free", mistaken)


def _ends_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CopyEnds, "add", lambda self, lane, done, **ends: None)


def _is_update(task: Task) -> bool:
    return isinstance(task.action, Compute) and task.action.kind is ComputeKind.UPDATE


def _moves(task: Task, kind: TensorKind, source: Tier, target: Tier) -> bool:
    move = task.action
    return isinstance(move, Move) and (move.kind, move.source, move.target) == (
        kind,
        source,
        target,
    )


def _is_state_write(task: Task) -> bool:
    return _moves(task, TensorKind.OS32, Tier.RAM, Tier.SSD)


def _is_gradient(task: Task) -> bool:
    return _moves(task, TensorKind.G16, Tier.GPU, Tier.RAM) or (
        isinstance(task.action, Compute) and task.action.kind is ComputeKind.NORM
    )


def _without_edges(
    later: Callable[[Task], bool], earlier: Callable[[Task], bool]
) -> Callable[[pytest.MonkeyPatch], None]:
    """Some tasks do not come after others any more."""
    right = LaneExecutor.submit
    gone: set[int] = set()

    def mistaken(self: Any, tasks: Iterable[Task]) -> None:
        batch = list(tasks)
        gone.update(task.id for task in batch if earlier(task))
        right(
            self,
            [
                replace(task, after=tuple(one for one in task.after if one not in gone))
                if later(task)
                else task
                for task in batch
            ],
        )

    return lambda patch: patch.setattr(LaneExecutor, "submit", mistaken)


UNDER_BACKWARD = {"max_grad_norm": None}
"""Without a norm to wait for, updates run while other blocks go backward."""
ALL = frozenset({"cpu", "emulated", "accelerator"})
WITH_COPIES = ALL - {"cpu"}
ACCELERATOR = frozenset({"accelerator"})
MISTAKES = [
    Mistake(
        words="a copy out does not wait for the compute that makes it",
        put=_copies_start_at_once,
        seen_by=ACCELERATOR,
    ),
    Mistake(
        words="compute does not wait for weights on their way in",
        put=_without_waits(WeightMoves, "copy"),
        seen_by=WITH_COPIES,
        late_lanes=(Lane.RAM_TO_GPU,),
    ),
    Mistake(
        words="compute does not wait for activations on their way back",
        put=_without_waits(SwappedActivations, "_bring_back"),
        seen_by=WITH_COPIES,
        late_lanes=(Lane.RAM_TO_GPU,),
    ),
    Mistake(
        words="a segment ends before its compute is over",
        put=_segments_are_not_waited_for,
        seen_by=ACCELERATOR,
    ),
    Mistake(
        words="compute does not wait for a copy out whose memory it gets back",
        put=_memory_goes_before_its_copy_is_done,
        seen_by=ACCELERATOR,
        late_lanes=(Lane.GPU_TO_RAM,),
    ),
    Mistake(
        words="the ends of a copy are not kept alive",
        put=_ends_are_forgotten,
        seen_by=ACCELERATOR,
        late_lanes=(Lane.GPU_TO_RAM, Lane.RAM_TO_GPU),
    ),
    Mistake(
        words="a lease goes back before its copy out is done",
        put=_without_waits(SwappedActivations, "copied_out"),
        seen_by=ACCELERATOR,
        late_lanes=(Lane.GPU_TO_RAM,),
    ),
    Mistake(
        words="a gradient is used before its copy out is done",
        put=_without_waits(GradientMoves, "leave"),
        seen_by=WITH_COPIES,
        late_lanes=(Lane.GPU_TO_RAM,),
    ),
    Mistake(
        words="an update does not come after its gradient",
        put=_without_edges(_is_update, _is_gradient),
        seen_by=ALL,
        changes=UNDER_BACKWARD,
    ),
    Mistake(
        words="a write does not come after its update",
        put=_without_edges(_is_state_write, _is_update),
        seen_by=ALL,
        changes=UNDER_BACKWARD,
    ),
]


def make_late(mistake: Mistake, patch: pytest.MonkeyPatch) -> None:
    """On devices opened from now on, compute comes late, or the copies of some lanes do."""
    right, emulated = AcceleratorDevice.__init__, EmulatedDevice.__init__

    def opened(self: Any, *args: Any, **kwargs: Any) -> None:
        right(self, *args, **kwargs)
        for lane in mistake.late_lanes:
            stream = self._copy_streams[lane].stream_id
            accelerator.calls().set_delay(stream, LATE_COPY_MICROSECONDS[lane])
        if not mistake.late_lanes:
            stream = self._compute_stream.stream_id
            accelerator.calls().set_delay(stream, LATE_KERNEL_MICROSECONDS)

    def emulated_slowly(self: Any, **given: Any) -> None:
        rates = {f"{lane}_bytes_per_second": SLOW_BYTES_PER_SECOND for lane in mistake.late_lanes}
        emulated(self, **{**given, "rates": EmulatedRates(**rates)})

    patch.setattr(AcceleratorDevice, "__init__", opened)
    patch.setattr(EmulatedDevice, "__init__", emulated_slowly)
