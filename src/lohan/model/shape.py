"""What a model needs, as numbers: blocks, their operators, bytes and FLOPs, parameters, ties.

Owns the data and its JSON form. Knows nothing of torch, of how shapes are traced (`trace_ops`) or
of machines. Made by `names.shape_of`; read by the planner, the schedule and the simulator.
Letters: b is the batch, s the sequence length in tokens.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from msgspec import Struct, to_builtins

from lohan.errors import ConfigError
from lohan.fields import read_json
from lohan.units import format_count

INPUT = -1
"""Stands in `OperatorShape.inputs` for whatever enters the block from outside."""

FORMAT_VERSION = 3


class Growth(Struct, array_like=True, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A quantity that grows as `fixed + b * (per_sequence + per_token * s + per_token_pair * s^2)`.

    What all sequences of a batch share (positions, a causal mask) grows with s but not with b:
    `shared_per_token * s + shared_per_token_pair * s^2` is added. Traced quantities have whole
    coefficients, so `at` is exact.
    """

    fixed: int | float = 0
    per_sequence: int | float = 0
    per_token: int | float = 0
    per_token_pair: int | float = 0
    shared_per_token: int | float = 0
    shared_per_token_pair: int | float = 0

    def at(self, batch: int, sequence: int) -> int:
        """Return the quantity for this batch and sequence length, rounded."""
        square = sequence * sequence
        return round(
            self.fixed
            + batch * (self.per_sequence + sequence * self.per_token + square * self.per_token_pair)
            + sequence * self.shared_per_token
            + square * self.shared_per_token_pair
        )

    def __add__(self, other: "Growth") -> "Growth":
        return Growth(
            fixed=self.fixed + other.fixed,
            per_sequence=self.per_sequence + other.per_sequence,
            per_token=self.per_token + other.per_token,
            per_token_pair=self.per_token_pair + other.per_token_pair,
            shared_per_token=self.shared_per_token + other.shared_per_token,
            shared_per_token_pair=self.shared_per_token_pair + other.shared_per_token_pair,
        )

    @staticmethod
    def total(growths: Iterable["Growth"]) -> "Growth":
        """Return the sum; nothing at all sums to zero."""
        result = Growth()
        for growth in growths:
            result = result + growth
        return result


NOTHING = Growth()


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorShape:
    """One operator call in a block's forward whose output owns memory; views count as their owner.

    Attributes:
        index: ordinal of the call among the block's dispatched operators, views included. The call
            counted is the last one that writes the memory (an in-place follow-up takes its place).
        name: module path within the block and operator, such as `mlp.fc2/addmm`.
        inputs: `index` of the operators whose outputs it reads, aliases resolved; `INPUT` once for
            anything from outside the block. Parameters and buffers are not listed.
        output_bytes: memory its outputs own.
        forward_flops: 2 per multiply-add of matrix products, convolutions and attention; 0 for
            elementwise operators.
        backward_flops: the same of what autograd runs for it.
        touched_bytes: bytes read and written, for operators bound by memory.
        is_saved: autograd keeps an output of it for the backward pass.
        partly_saved_bytes: where only some of several outputs are kept (a dropout's mask but not
            its result), the bytes of those; otherwise None.
    """

    index: int
    name: str
    inputs: tuple[int, ...]
    output_bytes: Growth
    forward_flops: Growth = NOTHING
    backward_flops: Growth = NOTHING
    touched_bytes: Growth = NOTHING
    is_saved: bool = False
    partly_saved_bytes: Growth | None = None

    @property
    def saved_bytes(self) -> Growth:
        """Bytes of its outputs that autograd keeps for the backward pass."""
        if not self.is_saved:
            return Growth()
        return self.output_bytes if self.partly_saved_bytes is None else self.partly_saved_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockShape:
    """One kind of block: the embedding, a transformer block, the head with the loss.

    Attributes:
        name: such as `embedding`, `block`, `head`.
        num_parameters: owned by this block; a tied parameter is owned by the first block using it.
        num_frozen_parameters: those of `num_parameters` that are not trained.
        operators: in the order of their `index`.
        input_bytes: tensors that enter with a gradient: the activation between blocks.
        output_bytes: tensors that leave.
        is_lookup: its backward pass needs no weights, as that of an embedding.
        is_rest: code outside the model's blocks: it runs forward once, what autograd keeps of it
            stays on the GPU, and its gradients come all at once.
        side_bytes: tensors without a gradient (masks, positions) that such code makes for the
            blocks after it, which keep them on the GPU.
        largest_parameter: elements of the largest parameter it trains, its own or a shared one; 0
            if that is not known.
    """

    name: str
    num_parameters: int
    num_frozen_parameters: int = 0
    operators: tuple[OperatorShape, ...] = ()
    input_bytes: Growth = NOTHING
    output_bytes: Growth = NOTHING
    is_lookup: bool = False
    is_rest: bool = False
    side_bytes: Growth = NOTHING
    largest_parameter: int = 0

    @property
    def forward_flops(self) -> Growth:
        """FLOPs of one forward pass."""
        return Growth.total(operator.forward_flops for operator in self.operators)

    @property
    def backward_flops(self) -> Growth:
        """FLOPs of one backward pass, recomputation not included."""
        return Growth.total(operator.backward_flops for operator in self.operators)

    @property
    def num_launches(self) -> int:
        """Operators of one forward pass, views included: what the host launches."""
        return self.operators[-1].index + 1 if self.operators else 0

    @property
    def saved_bytes(self) -> Growth:
        """Bytes of operator outputs that autograd keeps; the block's input is not one of them."""
        return Growth.total(operator.saved_bytes for operator in self.operators)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A model as its row of blocks.

    Attributes:
        name: as the user called it.
        dtype_bytes: of one compute weight (P16 and G16).
        kinds: the distinct blocks.
        sequence_of_kinds: block k is `kinds[sequence_of_kinds[k]]`; 0 is the embedding, the last
            one the head with the loss.
        tied: (owner block, other block, number of parameters) of weights used by two blocks.
        tokens_per_sample: fixed by the model (diffusion), or None where the user chooses.
        nominal_parameters: the figure in the model's name, which the paper's TFLOPS are counted by.
    """

    name: str
    dtype_bytes: int = 2
    kinds: tuple[BlockShape, ...]
    sequence_of_kinds: tuple[int, ...]
    tied: tuple[tuple[int, int, int], ...] = ()
    tokens_per_sample: int | None = None
    nominal_parameters: int | float | None = None

    def __post_init__(self) -> None:
        known = range(len(self.kinds))
        if not self.sequence_of_kinds or not all(k in known for k in self.sequence_of_kinds):
            raise _malformed(f"sequence_of_kinds names kinds other than 0..{len(self.kinds) - 1}")
        blocks = range(self.num_blocks)
        if not all(owner in blocks and other in blocks for owner, other, _ in self.tied):
            raise _malformed(f"tied names blocks other than 0..{self.num_blocks - 1}")

    @property
    def blocks(self) -> tuple[BlockShape, ...]:
        """Every block of the model in order."""
        return tuple(self.kinds[kind] for kind in self.sequence_of_kinds)

    @property
    def num_blocks(self) -> int:
        """Blocks of the model, embedding and head included."""
        return len(self.sequence_of_kinds)

    @property
    def num_parameters(self) -> int:
        """Parameters of the model, each tied one counted once."""
        counts = Counter(self.sequence_of_kinds)
        return sum(self.kinds[kind].num_parameters * count for kind, count in counts.items())

    @property
    def num_trained_parameters(self) -> int:
        """Those of `num_parameters` that are not frozen."""
        return self.num_parameters - sum(kind.num_frozen_parameters for kind in self.blocks)

    @property
    def in_words(self) -> str:
        """How many parameters there are, and how many are trained if not all."""
        trained, count = self.num_trained_parameters, self.num_parameters
        some = f", {format_count(trained)} of them trained" if trained < count else ""
        return f"{format_count(count)} parameters{some}"

    def to_json(self) -> str:
        """Return the shape as JSON text: sorted keys, one operator per line, final newline."""
        return _to_text(self)

    @staticmethod
    def from_json(text: str) -> "ModelShape":
        """Read what `to_json` wrote.

        Raises:
            ConfigError: if the text is not JSON, of another version, or a key is missing, unknown
                or of the wrong type.
        """
        return read_json(
            text, ModelShape, where="model shape", version=FORMAT_VERSION, is_complete=True
        )


def _malformed(reason: str) -> ConfigError:
    return ConfigError(
        "a model shape cannot be used",
        why=reason,
        remedy="write it again with this version of lohan",
    )


def _to_text(shape: ModelShape) -> str:
    record = {"version": FORMAT_VERSION, **to_builtins(shape)}
    kinds = []
    for kind in record.pop("kinds"):
        operators = [json.dumps(_shorter(one), sort_keys=True) for one in kind.pop("operators")]
        kinds.append(_object_text(_shorter(kind), "operators", operators))
    return _object_text(record, "kinds", kinds) + "\n"


def _object_text(record: Mapping[str, object], last_key: str, items: Iterable[str]) -> str:
    head = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in sorted(record.items())]
    return "{" + ",\n".join([*head, f'"{last_key}": [\n' + ",\n".join(items) + "\n]"]) + "}"


def _shorter(record: dict[str, Any]) -> dict[str, Any]:
    """Leave the zeros at the end of each growth out: most use the first few coefficients."""
    for key, value in record.items():
        if isinstance(value, list) and key.endswith(("_bytes", "_flops")):
            while value and not value[-1]:
                value.pop()
    return record
