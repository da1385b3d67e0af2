"""An update that is due: what it waits for, its parts, and what they move.

Owns these facts; the tasks are written by `updates`.
"""

from dataclasses import dataclass

from lohan.plan.plan import Plan
from lohan.schedule.task import Lease, Piece
from lohan.vocabulary import BlockId, PoolName, TaskId, TensorKind, Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class DueUpdate:
    """An update that is due: of which step, and what it must wait for."""

    block: BlockId
    step: int
    gradients: tuple[TaskId, ...]
    norm: tuple[TaskId, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePart:
    """One part of a block's state in one update."""

    piece: Piece
    num_parameters: int
    read_bytes: int
    written_bytes: int
    slot_key: str

    @property
    def slot(self) -> Lease:
        """The RAM it takes from its read to its write."""
        return Lease(PoolName.STATES, self.slot_key, max(self.read_bytes, self.written_bytes))


@dataclass(frozen=True, slots=True, kw_only=True)
class LateWrite:
    """A write that is placed behind the next block's read."""

    update: DueUpdate
    part: StatePart
    computed: TaskId


def bytes_per_parameter(
    plan: Plan, block: BlockId, *, has_weights: bool, shared_share: float
) -> tuple[float, int]:
    """Bytes the update of a block reads from SSD and writes to it, for each parameter.

    `has_weights`: P16 is in RAM from the backward pass. `shared_share`: gradients that other blocks
    made for its weights, per parameter.
    """
    state = plan.system.state
    by_kind = {
        TensorKind.P16: state.weights_bytes,
        TensorKind.P32: state.master_bytes,
        TensorKind.OS32: state.moments_bytes,
    }
    stored = {
        kind: nbytes for kind, nbytes in by_kind.items() if plan.home_of(block, kind) is Tier.SSD
    }
    written = sum(stored.values())
    read: float = written
    if not state.needs_weights_to_update or has_weights:
        read -= stored.get(TensorKind.P16, 0)
    if plan.system.spills_gradients:
        read += plan.workload.gradient_bytes * (1 + shared_share)
    return read, written
