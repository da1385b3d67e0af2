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
