"""What a model needs: its blocks, and per operator FLOPs and bytes, by tracing or by name.

Importing this does not import torch; the tracing files do, and are imported when first needed.
"""

from lohan.model.names import known_names, shape_of
from lohan.model.recompute import Recomputation, recomputation
from lohan.model.shape import INPUT, BlockShape, Growth, ModelShape, OperatorShape

__all__ = [
    "INPUT",
    "BlockShape",
    "Growth",
    "ModelShape",
    "OperatorShape",
    "Recomputation",
    "known_names",
    "recomputation",
    "shape_of",
]
