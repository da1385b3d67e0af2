"""Room on SSD besides the states: for activations a plan swaps and gradients it spills.

Owns how much that is, and the trial before the first state is written: to be told of a full drive
at the first step is to have written all states for nothing.
"""

from collections.abc import Sequence

from lohan.errors import OutOfSpace
from lohan.plan.block_costs import block_costs
from lohan.plan.plan import Plan
from lohan.ssd import ALIGNMENT_BYTES, DriveId, IoEngine, RunDirectories, whole_pages
from lohan.store import StateLayout, SwapFile
from lohan.units import format_bytes
from lohan.vocabulary import BlockId, Choice


def swap_room_bytes(plan: Plan, layout: StateLayout) -> int:
    """What a plan has on SSD at one time besides the states."""
    sequence = plan.workload.sequence
    activations = sum(
        whole_pages(
            block_costs(
                plan.block_shape(BlockId(number)),
                block,
                plan.batch_per_gpu,
                sequence,
                plan.system.skips_unneeded,
            ).to_ssd_bytes
            + 64 * 8 * (len(block.choices) + 4) * plan.num_micro_batches
        )
        for number, block in enumerate(plan.blocks)
        if _goes_to_ssd(plan, number)
    )
    gradients = 0
    if plan.system.spills_gradients:
        # Two steps of them may be there at a time.
        gradients = 2 * sum(
            plan.workload.gradient_bytes * block.num_trainable + 64 * ALIGNMENT_BYTES
            for block in layout.blocks
        )
    return whole_pages(activations + gradients)


def try_swap_room(
    plan: Plan,
    layout: StateLayout,
    run: RunDirectories,
    *,
    states_bytes: int,
    engine: IoEngine,
    drives: Sequence[DriveId],
    weights: Sequence[float] | None,
    chunk_bytes: int,
) -> None:
    """Reserve the room beside that of the states, which is held, and give it back. May block: yes.

    Raises:
        OutOfSpace: it is not there; the numbers are named.
    """
    nbytes = swap_room_bytes(plan, layout)
    if not nbytes:
        return
    try:
        SwapFile(
            run,
            engine=engine,
            capacity_bytes=nbytes,
            drives=drives,
            weights=weights,
            chunk_bytes=chunk_bytes,
        ).close()
    except OutOfSpace as error:
        raise error.retold(
            why=f"besides {format_bytes(states_bytes)} of states a step needs "
            f"{format_bytes(nbytes)} on {len(drives)} drive(s) for swapped activations and "
            "gradients that wait; nothing was written",
            remedy="make room there, give other or more SSD directories, or more RAM",
        ) from error


def _goes_to_ssd(plan: Plan, number: int) -> bool:
    block = plan.blocks[number]
    choices = [block.input_choice, *(choice for _, choice in block.choices)]
    return Choice.SWAP_TO_SSD in choices
