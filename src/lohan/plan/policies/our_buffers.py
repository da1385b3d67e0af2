"""Buffers that `lohan+` streams through, from generous to lean.

Owns how many blocks are read ahead and in how many pieces states move. The first set keeps every
lane busy; the others give RAM up for overlap, and are for budgets the first does not fit in or
leaves little of. `ours` plans with one after the other.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from lohan.model.shape import ModelShape
from lohan.plan.pools import BlockSizes, tied_trained, waiting_bytes
from lohan.plan.system import System
from lohan.plan.workload import Workload

# Parameters of one streamed piece of state: large enough for the drives, small enough for RAM,
# and not so many pieces that the list of tasks gets long.
PART_PARAMETERS = 100_000_000
MAX_PARTS = 6
# More pieces of the largest block where RAM is short; reads and writes get shorter, and tasks more.
_MORE_PARTS = (16, 64)
# Pieces smaller than this save nothing worth having.
_LEAST_PART_PARAMETERS = 64 * 1024
# Blocks of G16 in RAM that updates under the backward pass need to keep the lanes busy.
GRADIENT_SLOTS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffers:
    """One set of buffers."""

    num_update_parts: int
    gradient_slots: int
    """Blocks of G16 in RAM, beside those that wait for the next forward pass."""
    num_block_slots: int | None = None
    """Blocks of weights and of activations on their way through RAM; None: as the system has it."""
    num_state_slots: int | None = None

    @property
    def costs_overlap(self) -> bool:
        """Whether lanes wait for each other more than with the first set."""
        return self.num_block_slots is not None

    def of(self, system: System) -> System:
        """A system with these buffers."""
        if self.num_block_slots is not None:
            slots = self.num_block_slots
            system = replace(
                system,
                num_ring_slots=slots,
                num_held_slots=slots,
                num_fresh_slots=slots,
                num_spill_slots=slots,
            )
        if self.num_state_slots is not None:
            system = replace(system, num_state_slots=self.num_state_slots)
        return system


def buffer_sets(shape: ModelShape, workload: Workload) -> Iterator[Buffers]:
    """All sets for a model, the most generous first."""
    sizes = BlockSizes.of(shape, workload)
    default = min(MAX_PARTS, max(1, -(-sizes.largest_trained // PART_PARAMETERS)))
    finest = max(1, sizes.largest_trained // _LEAST_PART_PARAMETERS)
    more = [max(default, min(count, finest)) for count in _MORE_PARTS]
    least = 1 if workload.clips_gradients else 1 + _shared_gradient_slots(shape, sizes)
    for count in dict.fromkeys([default, *more]):
        yield Buffers(num_update_parts=count, gradient_slots=max(least, GRADIENT_SLOTS))
    for slots in (2, 1):
        yield Buffers(
            num_update_parts=more[-1],
            gradient_slots=max(least, slots),
            num_block_slots=slots,
            num_state_slots=2 * slots,
        )


def _shared_gradient_slots(shape: ModelShape, sizes: BlockSizes) -> int:
    """Blocks of G16 for shared weights, which wait until their owner has gone backward. Those of a
    step with a norm wait all together or on SSD."""
    shared_bytes = sum(waiting_bytes(sizes.workload, count) for _, _, count in tied_trained(shape))
    return -(-shared_bytes // max(1, sizes.largest_waiting_bytes))
