"""What goes between ranks in a step: weights of a block, gradients of its groups, sums of squares.

Owns how slices lie in what is sent and in what arrives. All of it runs on the peer lane, in memory
that the caller leases.
"""

import ctypes
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from lohan.optimizer import LEAF_ELEMENTS, num_leaves
from lohan.parallel.peers import Peers, in_turn
from lohan.parallel.slices import Slice, slice_length
from lohan.store import BlockLayout, Part, StateLayout
from lohan.vocabulary import BlockId

# Gradients -------------------------------------------------------------------------------------


def sent_bytes(block: BlockLayout, num_ranks: int) -> int:
    """A block's G16 as it is sent: as many whole slices as there are ranks."""
    return 2 * num_ranks * slice_length(block.num_trainable, num_ranks)


def places_of_groups(num_ranks: int, group_bytes: int, num_groups: int) -> list[int]:
    """Where the slice of each group begins in what has arrived, in the order of groups: each of a
    rank's groups was sent by itself, and came beside the same one of other ranks."""
    return [number * (group_bytes // num_ranks) for number in range(num_groups)]


def share_missing(
    peers: Peers, block: BlockLayout, own: Sequence[frozenset[str] | None], *, what: str
) -> tuple[frozenset[str] | None, ...]:
    """Of each group the tensors without a gradient, or None if it had no backward pass."""
    names = [entry.name for entry in block.tensors if entry.is_trainable]
    flags = [
        [missing is not None, *(missing is not None and name not in missing for name in names)]
        for missing in own
    ]
    mine = torch.tensor(flags, dtype=torch.uint8, device="cpu")
    everybody = mine.new_empty((peers.num_ranks * len(own), 1 + len(names)))
    peers.gather(everybody, mine, what=what)
    return tuple(
        frozenset(name for name, has in zip(names, found[1:], strict=True) if not has)
        if found[0]
        else None
        for found in in_turn(everybody.view(peers.num_ranks, len(own), -1).tolist())
    )


def gather_squares(
    peers: Peers,
    whole: StateLayout,
    leaf_sums: MutableMapping[BlockId, npt.NDArray[np.float64]],
    num_nonfinite: MutableMapping[BlockId, int],
) -> None:
    """Put the leaf sums of slices together: those of whole blocks take their place."""
    blocks = sorted(leaf_sums)
    if not blocks:
        return
    lengths = {
        block: slice_length(whole.block(block).num_trainable, peers.num_ranks) // LEAF_ELEMENTS
        for block in blocks
    }
    own = np.zeros(sum(lengths.values()) + len(blocks))
    for (begin, end), block in zip(_stretches(lengths, blocks), blocks, strict=True):
        own[begin : begin + len(leaf_sums[block])] = leaf_sums[block]
        own[end] = num_nonfinite.get(block, 0)
    everybody = np.zeros((peers.num_ranks, len(own)))
    peers.gather(
        torch.from_numpy(everybody).view(-1), torch.from_numpy(own), what="the sums of squares"
    )
    for (begin, end), block in zip(_stretches(lengths, blocks), blocks, strict=True):
        count = num_leaves(whole.block(block).num_trainable)
        leaf_sums[block] = everybody[:, begin:end].reshape(-1)[:count].copy()
        num_nonfinite[block] = int(everybody[:, end].sum())


def _stretches(
    lengths: Mapping[BlockId, int], blocks: Sequence[BlockId]
) -> Iterator[tuple[int, int]]:
    """Leaf sums [begin, end) of each block; behind them stands one count."""
    begin = 0
    for block in blocks:
        yield begin, begin + lengths[block]
        begin += lengths[block] + 1


# Weights ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightRange:
    """Positions of one part of one block, and the byte at which they begin in a flat buffer."""

    owner: BlockId
    part: Part
    begin: int
    end: int
    offset_bytes: int


@dataclass(frozen=True)
class GatheredWeights:
    """How the flat buffer of a segment is made of what all ranks have of it."""

    ranges: tuple[WeightRange, ...]
    whole: StateLayout
    num_ranks: int

    def of_rank(self, rank: int) -> Iterator[tuple[WeightRange, int, int]]:
        """What a rank sends: positions [begin, end) of its slice, of each range."""
        place = Slice(rank=rank, num_ranks=self.num_ranks)
        for one in self.ranges:
            length = self.whole.block(one.owner).num_positions(one.part)
            yield one, *place.inside(length, one.begin, one.end)

    @cached_property
    def is_direct(self) -> bool:
        """Whether what arrives is the flat buffer: all slices of one array."""
        only = self.ranges[0]
        length = self.whole.block(only.owner).num_positions(only.part)
        return len(self.ranges) == 1 and (only.begin, only.end) == (0, length)

    @cached_property
    def chunk_bytes(self) -> int:
        """What each rank sends, padding included."""
        if self.is_direct:
            return 2 * slice_length(self.ranges[0].end, self.num_ranks)
        return max(
            sum(2 * (end - begin) for _, begin, end in self.of_rank(rank))
            for rank in range(self.num_ranks)
        )

    def buffer_bytes(self, flat_bytes: int) -> int:
        """Of a buffer for the whole: more than the flat one if slices do not come out even."""
        return max(flat_bytes, self.num_ranks * self.chunk_bytes if self.is_direct else 0)

    @cached_property
    def scratch_bytes(self) -> int:
        """Of memory for what is sent and, where it must be sorted, for what arrives."""
        return self.chunk_bytes * (1 if self.is_direct else 1 + self.num_ranks)

    def gather(
        self,
        peers: Peers,
        sources: Sequence[tuple[int, int]],
        flat: torch.Tensor,
        scratch: torch.Tensor,
        *,
        what: str,
    ) -> None:
        """Fill the flat buffer.

        Args:
            sources: of each range, where this rank's positions of it lie and how many bytes can be
                read there.
        """
        chunk = self.chunk_bytes
        sent = scratch[:chunk]
        if self.is_direct and sources[0][1] >= chunk:
            sent = _at(sources[0][0], chunk)
        else:
            at = 0
            for (_, begin, end), (address, _) in zip(
                self.of_rank(peers.rank), sources, strict=True
            ):
                ctypes.memmove(sent.data_ptr() + at, address, 2 * (end - begin))
                at += 2 * (end - begin)
            sent[at:].zero_()
        if self.is_direct:
            peers.gather(flat[: self.num_ranks * chunk], sent, what=what)
            return
        arrived = scratch[chunk : chunk * (1 + self.num_ranks)]
        peers.gather(arrived, sent, what=what)
        for rank in range(self.num_ranks):
            at = rank * chunk
            for one, begin, end in self.of_rank(rank):
                if begin == end:
                    continue
                length = self.whole.block(one.owner).num_positions(one.part)
                first = Slice(rank=rank, num_ranks=self.num_ranks).of(length)[0] + begin
                nbytes, place = 2 * (end - begin), one.offset_bytes + 2 * (first - one.begin)
                flat[place : place + nbytes] = arrived[at : at + nbytes]
                at += nbytes


def _at(address: int, nbytes: int) -> torch.Tensor:
    memory = (ctypes.c_uint8 * nbytes).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8)


# Whole tensors ---------------------------------------------------------------------------------


def whole_tensors(
    peers: Peers,
    whole: StateLayout,
    own: Iterator[tuple[str, *tuple[torch.Tensor, ...]]],
    *,
    count: int,
    is_trained_only: bool = False,
) -> Iterator[tuple[str, *tuple[torch.Tensor, ...]]]:
    """Tensors of all ranks put together, one at a time, on every rank. Runs on: the main thread.

    Args:
        own: name and `count` tensors of what this rank has, in the order of the layout.
    """
    for block in whole.blocks:
        for place in block.places:
            entry = place.entry
            if is_trained_only and not entry.is_trainable:
                continue
            length = block.num_trainable if entry.is_trainable else block.num_frozen
            found = [torch.empty(entry.num_parameters, device="cpu") for _ in range(count)]
            for rank in range(peers.num_ranks):
                first, last = Slice(rank=rank, num_ranks=peers.num_ranks).of(length)
                begin, end = max(place.begin, first), min(place.end, last)
                if begin >= end:
                    continue
                parts = [one[begin - place.begin : end - place.begin] for one in found]
                if rank == peers.rank:
                    _, *tensors = next(own)
                    for part, tensor in zip(parts, tensors, strict=True):
                        part.copy_(tensor.view(-1))
                for part in parts:
                    peers.broadcast(part, rank, what=f"the values of {entry.name}")
            yield entry.name, *(one.view(entry.shape) for one in found)
