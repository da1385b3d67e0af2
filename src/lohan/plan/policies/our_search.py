"""The search of `lohan+`: how much is swapped, how much stays on the GPU, how RAM is shared out.

Each candidate is a point on the swap list (`activations`) with the last blocks kept whole on the
GPU; GPU memory that is left keeps outputs that would be swapped, RAM is filled by benefit per byte
(`residency`), and the estimate of `cost` decides. Called by `ours`, which makes a Plan of it.
"""

from bisect import bisect_right
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate

from lohan.hardware.machine import Machine
from lohan.model.shape import BlockShape, ModelShape
from lohan.plan.activations import SwapPoint, SwapStep, best_point, swap_order, swap_points
from lohan.plan.cost import StepLoad, Traffic, ssd_rates_of, step_load
from lohan.plan.policies.gpu_floor import is_outside
from lohan.plan.policies.our_memory import OurMemory
from lohan.plan.pools import updated_parameters
from lohan.plan.residency import Residency, fill_ram
from lohan.plan.system import System
from lohan.plan.workload import Workload

_FOREVER_SECONDS = 1e12
"""What does not fit takes longer than anything that does."""
_PARTS_OF_KEPT = 4
"""Numbers of whole blocks on the GPU that are tried: none, all that fit, and between."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """What is kept and swapped: swap lists of the blocks that swap, and how far down they go."""

    orders: tuple[tuple[SwapStep, ...], ...]
    inputs: tuple[int, ...]
    point: SwapPoint
    num_kept: int
    """Last blocks whose activations stay on the GPU."""
    kept_bytes: int
    """GPU memory beside them that keeps what the other blocks would swap."""
    num_micro_batches: int

    @property
    def swapped_bytes(self) -> int:
        """Bytes that leave each GPU."""
        return max(0, self.point.swapped_bytes - self.kept_bytes)


@dataclass(frozen=True)
class Search:
    """The facts a search needs, worked out once."""

    machine: Machine
    shape: ModelShape
    workload: Workload
    _known: dict[tuple[int, int, int], list[Chosen]] = field(default_factory=dict, compare=False)

    @cached_property
    def blocks(self) -> list[BlockShape]:
        """Shape of every block."""
        return [self.shape.kinds[kind] for kind in self.shape.sequence_of_kinds]

    @cached_property
    def batch(self) -> int:
        """Sequences per GPU and step."""
        return self.workload.batch_per_gpu(self.machine.num_gpus)

    @cached_property
    def trained(self) -> list[int]:
        """Trained parameters of every block; of this rank's slice, as all that is stored."""
        return updated_parameters(self.shape, self.workload)

    @cached_property
    def num_trained(self) -> int:
        """Trained parameters of the model."""
        return sum(self.trained)

    @cached_property
    def stored(self) -> list[int]:
        """Parameters of every block."""
        return [self.workload.slice_of(block.num_parameters) for block in self.blocks]

    @cached_property
    def num_parameters(self) -> int:
        """Parameters of the model."""
        if self.workload.num_ranks == 1:
            return self.shape.num_parameters
        return sum(self.stored)

    def _flops(self, way: str) -> int:
        per_kind = [
            getattr(kind, way).at(self.batch, self.workload.sequence) for kind in self.shape.kinds
        ]
        return sum(per_kind[kind] for kind in self.shape.sequence_of_kinds)

    @cached_property
    def forward_flops(self) -> int:
        """FLOPs of the forward pass of one GPU."""
        return self._flops("forward_flops")

    @cached_property
    def backward_flops(self) -> int:
        """FLOPs of the backward pass of one GPU, nothing recomputed."""
        return self._flops("backward_flops")

    @cached_property
    def num_launches(self) -> int:
        """Operators of the forward pass of one micro-batch."""
        return sum(block.num_launches for block in self.blocks)

    @cached_property
    def orders(self) -> list[tuple[SwapStep, ...]]:
        """Swap list of every block; embedding, head and other code outside recompute nothing."""
        inner = [
            () if block.is_rest else swap_order(block, self.batch, self.workload.sequence, True)
            for block in self.blocks[1:-1]
        ]
        return [(), *inner, ()][: len(self.blocks)]

    @cached_property
    def inputs(self) -> list[int]:
        """Bytes that enter every block and may be swapped."""
        # What enters code outside blocks never leaves the GPU.
        return [
            0
            if is_outside(self.shape, number)
            else block.input_bytes.at(self.batch, self.workload.sequence)
            for number, block in enumerate(self.blocks)
        ]

    def choose(self, memory: OurMemory, spare: int) -> Chosen:
        """The candidate with the shortest estimate of those that fit, or the one that needs least
        RAM; `spare` is RAM beyond the buffers."""

        def seconds(candidate: Chosen) -> float:
            short_bytes = self._short_bytes(candidate, spare, memory.system)
            if short_bytes > 0:
                return _FOREVER_SECONDS + short_bytes
            return self.load(candidate, spare, memory.system).estimated_seconds

        most = max(0, bisect_right(self._kept_sizes, memory.spare_gpu_bytes) - 1)
        best: Chosen | None = None
        for num_kept in sorted({most * part // _PARTS_OF_KEPT for part in range(5)}):
            candidates = self._candidates(memory, num_kept)
            if not candidates:
                continue
            candidate = best_point(candidates, seconds)
            if best is None or seconds(candidate) < seconds(best) * (1 - 1e-9):
                best = candidate
        assert best is not None, "no block kept and nothing but inputs swapped is always there"
        return best

    def _candidates(self, memory: OurMemory, num_kept: int) -> list[Chosen]:
        """All with so many blocks kept; RAM and drives have no part in it."""
        key = (memory.spare_gpu_bytes, memory.num_micro_batches, num_kept)
        if key in self._known:
            return self._known[key]
        swapping = len(self.blocks) - 1 - num_kept
        orders = (*self.orders[:swapping], *([()] * (num_kept + 1)))
        inputs = (*self.inputs[:swapping], *([0] * (num_kept + 1)))
        left = sum(step.saved_flops for order in orders for step in order)
        found = self._known[key] = []
        for point in swap_points(orders, inputs, left):
            room = memory.spare_gpu_bytes - self._kept_sizes[num_kept]
            if room < point.swapped_bytes:
                # Not all of it can stay, so some of it moves.
                room -= memory.moving_bytes_of(point.largest_block_bytes)
            # With nothing kept and only inputs swapped there must be an answer, fitting or not.
            if room >= 0 or (num_kept == 0 and point.num_items == 0):
                found.append(
                    Chosen(
                        orders=orders,
                        inputs=inputs,
                        point=point,
                        num_kept=num_kept,
                        kept_bytes=max(0, room),
                        num_micro_batches=memory.num_micro_batches,
                    )
                )
        return found

    @cached_property
    def _kept_sizes(self) -> list[int]:
        """Bytes of the activations of the last 0, 1, 2, ... inner blocks."""
        sizes = [
            0
            if kind.is_rest
            else kind.input_bytes.at(self.batch, self.workload.sequence)
            + sum(
                op.output_bytes.at(self.batch, self.workload.sequence)
                for op in kind.operators
                if op.is_saved
            )
            for kind in self.shape.kinds
        ]
        inner = [sizes[kind] for kind in self.shape.sequence_of_kinds[1:-1]]
        return [0, *accumulate(reversed(inner))]

    def fill(self, chosen: Chosen, spare: int, system: System) -> Residency:
        """RAM shared out for a candidate; what spills needs buffers on its way."""
        swapped = chosen.swapped_bytes * self.machine.num_gpus
        filled = self.fill_ram(spare, swapped)
        if filled.activation_bytes == swapped:
            return filled
        spill_bytes = self._spill_bytes(chosen, system)
        if spill_bytes >= swapped:
            # Nothing is won by what would take as much RAM on its way.
            return replace(self.fill_ram(spare - swapped, 0), activation_bytes=swapped)
        return self.fill_ram(spare - spill_bytes, swapped)

    def _spill_bytes(self, chosen: Chosen, system: System) -> int:
        """RAM for what is on its way to SSD or back."""
        return system.num_spill_slots * chosen.point.largest_block_bytes * self.machine.num_gpus

    def _short_bytes(self, chosen: Chosen, spare: int, system: System) -> int:
        """RAM that a candidate lacks for what it swaps, in RAM or on its way to SSD."""
        swapped = chosen.swapped_bytes * self.machine.num_gpus
        return min(swapped, self._spill_bytes(chosen, system)) - spare

    def fill_ram(self, spare: int, swapped_bytes: int) -> Residency:
        """RAM shared out between states and so many bytes of activations."""
        return fill_ram(
            max(0, spare),
            num_parameters=self.num_parameters,
            num_trained=self.num_trained,
            swapped_bytes=swapped_bytes,
        )

    def load(self, chosen: Chosen, spare: int, system: System) -> StepLoad:
        """Busy seconds per resource for a candidate, with RAM filled by benefit."""
        traffic = self.traffic(chosen, self.fill(chosen, spare, system), system.spills_gradients)
        clips = self.workload.clips_gradients
        return step_load(self.machine, traffic, clips=clips, ssd_rates=self._ssd_rates)

    @cached_property
    def _ssd_rates(self) -> tuple[float, float]:
        return ssd_rates_of(self.machine)

    def traffic(self, chosen: Chosen, filled: Residency, spills_gradients: bool) -> Traffic:
        """What a candidate asks of the machine."""
        num_parameters, num_gpus = self.num_parameters, self.machine.num_gpus
        weights_on_ssd = 2 * num_parameters - filled.weights_bytes
        states_on_ssd = 10 * self.num_trained - filled.states_bytes
        swapped = chosen.swapped_bytes * num_gpus
        # Frozen weights are read but never written.
        weights_written = weights_on_ssd * self.num_trained / max(1, num_parameters)
        return Traffic(
            forward_flops=self.forward_flops,
            backward_flops=self.backward_flops,
            forward_launches=chosen.num_micro_batches * self.num_launches,
            recompute_flops=chosen.point.recompute_flops,
            num_parameters=self.num_trained,
            swapped_bytes=swapped,
            spilled_bytes=swapped - filled.activation_bytes,
            state_read_bytes=states_on_ssd,
            state_written_bytes=states_on_ssd + weights_written,
            weight_read_bytes=weights_on_ssd,
            weight_copy_bytes=2 * self.shape.num_parameters * num_gpus,
            gradient_spill_bytes=2 * self.num_trained if spills_gradients else 0,
        )
