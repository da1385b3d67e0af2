"""AdamW on the CPU: the native kernels, their settings and number formats.

Knows arrays in memory, no blocks, no files and no schedule. `store`, `lanes` and `engine` call it.
`lohan.optimizer.reference` is the slow judge of everything here; tests and `lohan.verify`
import it.
"""

from lohan.optimizer.adamw import PlainState, SplitState, update_states
from lohan.optimizer.gradient_norm import (
    LEAF_ELEMENTS,
    combine_leaf_sums,
    num_leaves,
    sum_of_squares,
)
from lohan.optimizer.memory import MemoryRange, NumberFormat, available_isas, convert
from lohan.optimizer.settings import (
    AdamWSettings,
    StepScalars,
    UpdateRange,
    prepare_step,
)

__all__ = [
    "LEAF_ELEMENTS",
    "AdamWSettings",
    "MemoryRange",
    "NumberFormat",
    "PlainState",
    "SplitState",
    "StepScalars",
    "UpdateRange",
    "available_isas",
    "combine_leaf_sums",
    "convert",
    "num_leaves",
    "prepare_step",
    "sum_of_squares",
    "update_states",
]
