"""What a model needs: its blocks, and per operator FLOPs and bytes, by tracing or by name.

Owns shapes and the names they are known by. Imported by all that plans. Importing this does not
import torch: `tracing` does, and is imported when first needed. Never trains or loads weights.
"""

from lohan.model.names import known_names, shape_of
from lohan.model.recompute import recomputation
from lohan.model.shape import INPUT, BlockShape, Growth, ModelShape, OperatorShape

__all__ = [
    "INPUT",
    "BlockShape",
    "Growth",
    "ModelShape",
    "OperatorShape",
    "known_names",
    "recomputation",
    "shape_of",
]
