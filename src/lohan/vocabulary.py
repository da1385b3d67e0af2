"""The words of lohan: tiers, tensor kinds, lanes, choices, kinds of compute, and typed ids.

Code, logs, documents, reports and the command line all use these spellings. Owns no behaviour.
Imported by every other part; imports none of them.
"""

from enum import StrEnum
from typing import NewType

BlockId = NewType("BlockId", int)
"""Position of a block in the model: 0 is the embedding, the last one is the head."""

TaskId = NewType("TaskId", int)
"""Position of a task in its schedule."""


class Tier(StrEnum):
    """A place tensors live in. `GPU` may be a CPU or an emulated device; the word stays."""

    GPU = "GPU"
    RAM = "RAM"
    SSD = "SSD"


class TensorKind(StrEnum):
    """What a tensor is for. The number is the bits of one element."""

    P16 = "P16"
    """Weights used for compute."""
    G16 = "G16"
    """Gradients."""
    P32 = "P32"
    """Master weights (in the split state: the low half that P16 lacks)."""
    OS32 = "OS32"
    """Optimizer state: AdamW's two moments."""
    A16 = "A16"
    """Activations."""


class Lane(StrEnum):
    """A worker that runs its tasks one at a time, the most urgent that may run first."""

    GPU = "gpu"
    GPU_TO_RAM = "gpu_to_ram"
    RAM_TO_GPU = "ram_to_gpu"
    SSD_READ = "ssd_read"
    SSD_WRITE = "ssd_write"
    CPU = "cpu"
    PEER = "peer"


class PoolName(StrEnum):
    """What the memory of a pool is for."""

    WEIGHTS = "weights"  # On the GPU: P16 of blocks at work and of the next ones
    GRADIENTS = "gradients"  # On the GPU: G16 until they leave
    MOVING = "moving"  # On the GPU: A16 on their way out or in
    KEPT = "kept"  # On the GPU: A16 that stay there
    RING = "ring"  # In RAM: P16 between SSD and GPU
    HELD = "held"  # In RAM: P16 that the backward pass read and the update needs too
    FRESH = "fresh"  # In RAM: P16 from an update to the next forward pass
    STATES = "states"  # In RAM: states from their read to their write
    WAITING = "waiting"  # In RAM: G16 that wait for their update
    EXCHANGED = "exchanged"  # In RAM: G16 of reduction groups, until they are added up
    GATHERED = "gathered"  # In RAM: P16 of a whole block, made of the slices of all ranks
    SWAPPED = "swapped"  # In RAM: A16 that stay there
    SPILLING = "spilling"  # In RAM: A16 between GPU and SSD


class Pass(StrEnum):
    """One way through the blocks."""

    FORWARD = "forward"
    BACKWARD = "backward"


class Choice(StrEnum):
    """What happens to an activation between forward and backward."""

    KEEP = "keep"
    SWAP_TO_RAM = "swap_to_ram"
    SWAP_TO_SSD = "swap_to_ssd"
    RECOMPUTE = "recompute"


class ComputeKind(StrEnum):
    """What a compute task does."""

    FORWARD = "forward"
    RECOMPUTE = "recompute"
    BACKWARD = "backward"
    UPDATE = "update"
    NORM = "norm"
    REDUCE = "reduce"
