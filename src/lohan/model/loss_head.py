"""The head of a language model whose loss needs no whole logits: a linear map, then cross entropy.

Owns seeing it in a shape's operators (`loss_head`), how rows and vocabulary are cut (`pieces`), and
what the head needs so (`in_chunks`). Knows nothing of torch or of plans; what runs is
`drive.chunked_loss`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from lohan.model.shape import INPUT, Growth, ModelShape, OperatorShape

UNIT = 64
"""Rows, or words of the vocabulary, that stay together. Products of a few are made by other
kernels, which add up in another order."""
_MOST_CHUNKS = 1024
_LINEAR = ("mm", "addmm")
_FP32_BYTES = 4


def pieces(total: int, num_pieces: int) -> Iterator[slice]:
    """Cut so many rows into whole units; the last piece has the remainder too."""
    num_units = max(1, total // UNIT)
    num_pieces = min(num_pieces, num_units)
    cuts = [UNIT * (num_units * piece // num_pieces) for piece in range(num_pieces)]
    for begin, end in pairwise((*cuts, total)):
        yield slice(begin, end)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossHead:
    """Operators of the last block that make the logits and the loss of them."""

    linear: OperatorShape
    logits: tuple[OperatorShape, ...]
    """As large as the logits, the linear map among them."""
    module: str
    """Path of the linear map in the model."""


def loss_head(shape: ModelShape) -> LossHead | str:
    """The head of a model, or why its loss cannot be computed in chunks."""
    operators = {operator.index: operator for operator in shape.blocks[-1].operators}
    losses = [one for one in operators.values() if _called(one) == "nll_loss_forward"]
    if len(losses) != 1:
        return "it is not one cross entropy of logits"
    chain = [losses[0]]
    for steps in (("_log_softmax",), ("_to_copy", *_LINEAR), _LINEAR):
        if _called(chain[-1]) in _LINEAR:
            break
        made = [operators[index] for index in chain[-1].inputs if index != INPUT]
        found = [one for one in made if _called(one) in steps]
        if len(found) != 1:
            others = ", ".join(map(_called, made)) or "what enters the head"
            return f"its logits are made by {others} and not by a linear map alone"
        chain += found
    linear, logits = chain[-1], tuple(chain[1:])
    if any(_bytes(one) * shape.dtype_bytes != _bytes(linear) * _FP32_BYTES for one in logits[:-1]):
        return "its cross entropy is not in fp32, or not of all rows of the logits"
    for one in operators.values():
        if one not in chain and {*one.inputs} & {made.index for made in logits}:
            return f"the logits are read by {_called(one)} too"
    return LossHead(linear=linear, logits=logits, module=linear.name.rpartition("/")[0])


def most_chunks(sequence: int) -> int:
    """So many make sense."""
    return max(1, min(_MOST_CHUNKS, sequence // UNIT))


def in_chunks(shape: ModelShape, sequence: int, num_chunks: int) -> ModelShape:
    """The shape with the loss of its head in chunks: the largest of them is all there is of the
    logits, which are computed twice more for the gradients."""
    if num_chunks == 1:
        return shape
    head = loss_head(shape)
    assert isinstance(head, LossHead), "whoever asks for chunks has seen that there can be some"
    num_words = head.linear.output_bytes.at(1, sequence) // shape.dtype_bytes // sequence
    share = max(_largest_share(total, num_chunks) for total in (sequence, num_words))
    block = shape.blocks[-1]
    parts = {one.index for one in head.logits}
    operators = []
    for one in block.operators:
        if one.index in parts:
            one = replace(one, output_bytes=_scaled(one.output_bytes, share))
        if one.index == head.linear.index:
            again = _scaled(one.forward_flops, 2)
            one = replace(one, backward_flops=one.backward_flops + again)
        operators.append(one)
    # All rows of the gradient of what the linear map is given are there while the chunks are.
    extra = replace(
        head.linear,
        index=operators[-1].index + 1,
        name="gradient of the head's input",
        inputs=(),
        output_bytes=block.input_bytes,
        forward_flops=Growth(),
        backward_flops=Growth(),
        touched_bytes=Growth(),
        is_saved=True,
    )
    chunked = replace(block, operators=(*operators, extra))
    kinds = list(shape.kinds)
    kinds[shape.sequence_of_kinds[-1]] = chunked
    return replace(shape, kinds=tuple(kinds))


def _largest_share(total: int, num_pieces: int) -> float:
    largest: int = max(one.stop - one.start for one in pieces(total, num_pieces))
    return largest / max(1, total)


def _called(operator: OperatorShape) -> str:
    return operator.name.rpartition("/")[2]


def _bytes(operator: OperatorShape) -> int:
    return operator.output_bytes.at(1, 2**10)


def _scaled(growth: Growth, by: float) -> Growth:
    return Growth(**{name: getattr(growth, name) * by for name in growth.__struct_fields__})
