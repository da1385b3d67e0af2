"""GPU memory of `lohan+` that no decision about activations changes, line by line.

Owns the arithmetic of what the engine holds on the device beside its pools: the block at work, what
lies between blocks, graphs of code outside blocks, gradients while they are made. Each line is the
most there can be at one moment. Used by `our_memory`.
"""

from dataclasses import dataclass

from lohan.model.shape import BlockShape, ModelShape
from lohan.plan.pools import BlockSizes, tied_trained, trained_parameters
from lohan.plan.system import System


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFloor:
    """Bytes on one GPU for a batch cut into micro-batches."""

    working_bytes: int
    """The block at work, one micro-batch: activations, gradients of them, and gradients of weights
    before they are added to the block's."""
    between_bytes: int
    """What entered a block and what leaves it, of all micro-batches, beside the head's input."""
    rest_bytes: int
    """What autograd keeps of code outside blocks, and the masks it made, of all micro-batches."""
    shared_gradient_bytes: int
    """Gradients of shared weights that wait for the first block that uses these."""
    largest_input_bytes: int
    rest_input_bytes: int
    """Inputs of code outside blocks, the head among it: they stay, and count as kept."""

    @staticmethod
    def of(shape: ModelShape, batch: int, num_micro_batches: int, sequence: int) -> "GpuFloor":
        """The floor of a model."""
        micro_batch = batch // num_micro_batches
        largest = max(kind.input_bytes.at(batch, sequence) for kind in shape.kinds)
        head = shape.blocks[-1].input_bytes.at(batch, sequence)
        working = [working_bytes(kind, micro_batch, sequence) for kind in shape.kinds]
        return GpuFloor(
            working_bytes=max(
                working[kind] + fresh_bytes
                for kind, fresh_bytes in zip(
                    shape.sequence_of_kinds, _fresh_gradient_bytes(shape), strict=True
                )
            ),
            # Forward, what entered and what left the last block wait for the head. Backward, what
            # enters several blocks (an encoder's output) is there with its gradient.
            between_bytes=2 * largest - min(head, largest),
            rest_bytes=num_micro_batches * _rest_bytes(shape, micro_batch, sequence),
            shared_gradient_bytes=num_micro_batches * _shared_gradient_bytes(shape),
            largest_input_bytes=largest,
            rest_input_bytes=sum(
                kind.input_bytes.at(batch, sequence)
                for number, kind in enumerate(shape.blocks)
                if is_outside(shape, number)
            ),
        )

    def total_bytes(self, system: System, sizes: BlockSizes, num_micro_batches: int) -> int:
        """All of it with the pools of weights and gradients, and inputs of blocks moving."""
        return (
            system.num_weight_slots * sizes.largest_weights_bytes
            + system.num_gradient_slots * sizes.largest_gradient_bytes
            + self.working_bytes
            + self.between_bytes
            + self.rest_bytes
            + self.shared_gradient_bytes
            + self.rest_input_bytes
            # One micro-batch's share of two blocks is on its way to RAM.
            + 2 * -(-self.largest_input_bytes // num_micro_batches)
        )


def is_outside(shape: ModelShape, number: int) -> bool:
    """Whether a block of the plan is code outside blocks, of which nothing is swapped."""
    kinds = shape.sequence_of_kinds
    return number == len(kinds) - 1 or shape.kinds[kinds[number]].is_rest


def working_bytes(kind: BlockShape, micro_batch: int, sequence: int) -> int:
    """GPU memory one block's backward pass needs for activations and their gradients."""
    largest_output = max(
        (op.output_bytes.at(micro_batch, sequence) for op in kind.operators), default=0
    )
    return (
        kind.saved_bytes.at(micro_batch, sequence)
        + kind.input_bytes.at(micro_batch, sequence)
        + kind.output_bytes.at(micro_batch, sequence)
        # The gradient that comes in and the one being made.
        + 2 * largest_output
    )


def _rest_bytes(shape: ModelShape, micro_batch: int, sequence: int) -> int:
    """One micro-batch's graphs of code outside blocks; the head's is in its working set."""
    return sum(
        kind.saved_bytes.at(micro_batch, sequence) + kind.side_bytes.at(micro_batch, sequence)
        for kind in shape.blocks[:-1]
        if kind.is_rest
    )


def _fresh_gradient_bytes(shape: ModelShape) -> list[int]:
    """Gradients of weights that each block's backward pass makes before they are added."""
    trained = trained_parameters(shape)
    borrowed, lent = [0] * shape.num_blocks, [0] * shape.num_blocks
    for owner, other, count in tied_trained(shape):
        borrowed[other] += count
        lent[owner] = min(trained[owner], lent[owner] + count)
    fresh = []
    for number, kind in enumerate(shape.blocks):
        if not kind.is_rest and kind.largest_parameter:
            # One after another; a shared one is there again with what waited for it.
            made = kind.largest_parameter * (1 + bool(borrowed[number] or lent[number]))
        elif number == shape.num_blocks - 1:
            made = trained[number]  # Nothing waits for the head: what it makes for others does.
        else:
            made = trained[number] + lent[number] + 2 * borrowed[number]
        fresh.append(shape.dtype_bytes * made)
    return fresh


def _shared_gradient_bytes(shape: ModelShape) -> int:
    """Of one micro-batch: they are added up in the order of micro-batches, so each waits alone."""
    trained = trained_parameters(shape)
    waiting: dict[int, int] = {}
    for owner, _, count in tied_trained(shape):
        waiting[owner] = min(trained[owner], waiting.get(owner, 0) + count)
    return shape.dtype_bytes * sum(waiting.values())
