"""Sizes of the buffers a plan streams through, by pool.

One place for the arithmetic, so that the ledger's lines and the schedule's pools cannot differ:
what a block computes with, what it makes gradients for, and the pieces its state moves in.
"""

from dataclasses import dataclass
from itertools import pairwise

from lohan.model.shape import ModelShape
from lohan.plan.system import System
from lohan.plan.workload import Workload
from lohan.vocabulary import PoolName

_SLOT_MARGIN_BYTES = 4096
"""Rounding of a slot's size up to what drives read and write directly."""


def weights_bytes(shape: ModelShape) -> list[int]:
    """P16 bytes each block computes with: its own parameters and those it shares."""
    counts = [shape.kinds[kind].num_parameters for kind in shape.sequence_of_kinds]
    for _owner, other, num_parameters in shape.tied:
        counts[other] += num_parameters
    return [count * shape.dtype_bytes for count in counts]


def trained_parameters(shape: ModelShape) -> list[int]:
    """Parameters each block owns and trains; frozen ones have neither gradient nor update."""
    kinds = [kind.num_parameters - kind.num_frozen_parameters for kind in shape.kinds]
    return [kinds[kind] for kind in shape.sequence_of_kinds]


def tied_trained(shape: ModelShape) -> list[tuple[int, int, int]]:
    """(owner, other, number) of shared parameters that are trained."""
    trained = trained_parameters(shape)
    ties = [(owner, other, min(count, trained[owner])) for owner, other, count in shape.tied]
    return [tie for tie in ties if tie[2]]


def gradient_bytes(shape: ModelShape) -> list[int]:
    """G16 bytes each block's backward pass makes: for its own parameters and for shared ones."""
    counts = trained_parameters(shape)
    for _owner, other, num_parameters in tied_trained(shape):
        counts[other] += num_parameters
    return [count * shape.dtype_bytes for count in counts]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSizes:
    """What the pools of a model must hold."""

    largest_weights_bytes: int
    largest_gradient_bytes: int
    """G16 of one block on the GPU, of all groups of the rank."""
    largest_waiting_bytes: int
    """Gradients of one block that wait in RAM for their update."""
    all_gradients_bytes: int
    """The same of all blocks."""
    largest_trained: int
    """Parameters the largest update of one block changes."""
    has_ties: bool
    workload: Workload

    @staticmethod
    def of(shape: ModelShape, workload: Workload) -> "BlockSizes":
        """The sizes of a model whose steps are dealt out so."""
        gradients = gradient_bytes(shape)
        waiting = [waiting_bytes(workload, count) for count in trained_parameters(shape)]
        for _owner, other, count in tied_trained(shape):
            waiting[other] += waiting_bytes(workload, count)
        return BlockSizes(
            largest_weights_bytes=max(weights_bytes(shape)),
            largest_gradient_bytes=workload.groups_per_rank * max(gradients),
            largest_waiting_bytes=max(waiting),
            all_gradients_bytes=sum(waiting),
            largest_trained=max(updated_parameters(shape, workload)),
            has_ties=bool(tied_trained(shape)),
            workload=workload,
        )


def updated_parameters(shape: ModelShape, workload: Workload) -> list[int]:
    """Parameters of each block that one rank updates."""
    return [workload.slice_of(count) for count in trained_parameters(shape)]


def waiting_bytes(workload: Workload, num_parameters: int) -> int:
    """What a rank keeps of a gradient until the update: its slice, and of several groups their
    sum."""
    return workload.slice_of(num_parameters) * workload.gradient_bytes


def part_parameters(largest_trained: int, num_update_parts: int) -> int:
    """Parameters of one piece in which states stream through RAM."""
    return max(1, -(-largest_trained // num_update_parts))


def update_parts(trained: int, largest_part: int) -> tuple[int, ...]:
    """Parameters in each piece of a block's update; none for a block that trains nothing."""
    count = -(-trained // largest_part)
    cuts = [trained * part // count for part in range(count + 1)] if count else []
    return tuple(end - begin for begin, end in pairwise(cuts))


def pool_sizes(
    system: System, sizes: BlockSizes, *, num_update_parts: int, gradient_slots: int | None
) -> dict[PoolName, int]:
    """RAM of the streaming pools."""
    per_parameter = system.state.stored_bytes
    if system.spills_gradients:
        # The gradient comes back in the slot, and with it the one of a block that shares weights.
        per_parameter += sizes.workload.gradient_bytes * (2 if sizes.has_ties else 1)
    part = part_parameters(sizes.largest_trained, num_update_parts) * per_parameter
    waiting = sizes.all_gradients_bytes
    if gradient_slots is not None:
        waiting = min(waiting, gradient_slots * sizes.largest_waiting_bytes)
    workload, whole = sizes.workload, sizes.largest_weights_bytes
    largest = workload.slice_of(whole)
    folds, has_peers = workload.reduction_groups > 1, workload.num_ranks > 1
    return {
        PoolName.RING: system.num_ring_slots * largest,
        # Among ranks a block's weights come before the gradient of the one behind it has gone.
        PoolName.HELD: (system.num_held_slots + (has_peers and system.num_held_slots > 0))
        * largest,
        PoolName.FRESH: system.num_fresh_slots * largest,
        PoolName.STATES: system.num_state_slots * (part + _SLOT_MARGIN_BYTES),
        PoolName.WAITING: waiting,
        # What a block sends and what it gets, or the gradients of two blocks.
        PoolName.EXCHANGED: 2 * sizes.largest_gradient_bytes if folds else 0,
        PoolName.GATHERED: system.num_ring_slots * whole if has_peers else 0,
    }
