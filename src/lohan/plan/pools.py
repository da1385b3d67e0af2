"""Sizes of the buffers a plan streams through, by pool name.

One place for the arithmetic, so that the ledger's lines and the schedule's pools cannot differ.
"""

from lohan.model.shape import ModelShape
from lohan.plan.system import System

NUM_SPILL_SLOTS = 3
"""Blocks of activations in RAM on their way to SSD or back."""


def weights_bytes(shape: ModelShape) -> list[int]:
    """P16 bytes each block computes with: its own parameters and those it shares."""
    counts = [shape.kinds[kind].num_parameters for kind in shape.sequence_of_kinds]
    for _owner, other, num_parameters in shape.tied:
        counts[other] += num_parameters
    return [count * shape.dtype_bytes for count in counts]


def pool_sizes(
    system: System,
    *,
    largest_weights_bytes: int,
    all_weights_bytes: int,
    num_update_parts: int,
    gradient_slots: int | None,
) -> dict[str, int]:
    """RAM of the streaming pools."""
    per_parameter = system.state.stored_bytes + (2 if system.spills_gradients else 0)
    part = -(-largest_weights_bytes // 2 * per_parameter // num_update_parts) + 4096
    waiting = all_weights_bytes
    if gradient_slots is not None:
        waiting = min(waiting, gradient_slots * largest_weights_bytes)
    return {
        "ring": system.num_ring_slots * largest_weights_bytes,
        "held": system.num_held_slots * largest_weights_bytes,
        "fresh": system.num_ring_slots * largest_weights_bytes,
        "states": system.num_state_slots * part,
        "waiting": waiting,
    }
