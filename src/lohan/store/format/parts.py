"""What a parameter's state consists of: number formats, and the parts that follow from them.

Owns the words and the bytes of each part. Where parts lie is in `layout`; how numbers are split and
rounded is told in docs/decisions/0007. Pure: no files, no memory, no torch.
"""

from collections.abc import Mapping
from enum import StrEnum

from lohan.vocabulary import TensorKind


class ComputeFormat(StrEnum):
    """Format of the weights compute uses."""

    BF16 = "bf16"
    FP16 = "fp16"


class MasterFormat(StrEnum):
    """How fp32 masters are kept beside P16; with the compute format it decides the parts."""

    SPLIT = "split"
    """Only what P16 lacks of them, in LO16: 12 bytes per parameter. bf16 compute only."""
    WHOLE = "whole"
    """In full, in P32: 14 bytes per parameter, as other systems store them."""

    @classmethod
    def default_for(cls, compute_format: ComputeFormat) -> "MasterFormat":
        """The smaller one where there is a choice."""
        return cls.SPLIT if compute_format is ComputeFormat.BF16 else cls.WHOLE


class Part(StrEnum):
    """One array of a block's state. docs/decisions/0007 states the number formats."""

    P16 = "P16"
    """Compute weights of trainable parameters."""
    LO16 = "LO16"
    """What P16 lacks of the fp32 master (split masters)."""
    P32 = "P32"
    """The fp32 master (whole masters)."""
    M32 = "M32"
    """First moment."""
    V32 = "V32"
    """Second moment; in the split state its sign bit carries a rounding tie."""
    FROZEN16 = "FROZEN16"
    """Compute weights of frozen parameters, which have nothing else."""

    @property
    def bytes_per_parameter(self) -> int:
        """2 or 4."""
        return 4 if self in (Part.P32, Part.M32, Part.V32) else 2

    @property
    def kind(self) -> TensorKind:
        """The word of plans and schedules this part belongs to."""
        if self in (Part.P16, Part.FROZEN16):
            return TensorKind.P16
        return TensorKind.P32 if self in (Part.LO16, Part.P32) else TensorKind.OS32

    @property
    def is_frozen(self) -> bool:
        """Whether its positions are those of frozen tensors, never written after the fill."""
        return self is Part.FROZEN16


TRAINABLE_PARTS: Mapping[MasterFormat, tuple[Part, ...]] = {
    MasterFormat.SPLIT: (Part.P16, Part.LO16, Part.M32, Part.V32),
    MasterFormat.WHOLE: (Part.P16, Part.P32, Part.M32, Part.V32),
}
