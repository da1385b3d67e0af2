"""Plans of the published systems: one recipe, driven by a System's properties.

Owns how activations are chosen under each ActivationRule and how the fitted footprints become a
ledger. The project's own policy is in `ours`.
"""

from collections.abc import Sequence

from lohan.errors import ConfigError
from lohan.hardware.machine import Machine
from lohan.model.shape import BlockShape, ModelShape
from lohan.plan.activations import (
    SwapPoint,
    SwapStep,
    assign_tiers,
    best_point,
    swap_order,
    swap_points,
    swappable_indices,
)
from lohan.plan.cost import Traffic, stage_seconds
from lohan.plan.ledger import Ledger, LedgerLine
from lohan.plan.ledger import ledger_line as line
from lohan.plan.plan import BlockPlan, Plan
from lohan.plan.system import ActivationRule, System
from lohan.plan.workload import Workload
from lohan.vocabulary import Choice, Tier

# Attention scores are seen only through their FLOPs; public models use heads of 128.
_HEAD_DIMENSION = 128
_SMALLER_BATCH = "use a smaller batch or a shorter sequence"
_SMALLER_MODEL = "use a smaller model or a GPU with more memory"


def plan_published(system: System, machine: Machine, shape: ModelShape, workload: Workload) -> Plan:
    """The plan a published system would follow, fitting or not: ask its ledger.

    Raises:
        ConfigError: it is to compute the loss in chunks, which none of them does.
    """
    if workload.should_chunk_loss:
        raise ConfigError(
            f"the loss was to be computed in chunks by {system.name}",
            why="published systems hold all logits",
            remedy="use the policy lohan+, or leave chunked_loss out",
        )
    recipe = _Recipe(system, machine, shape, workload)
    blocks = recipe.choose_activations()
    return Plan(
        system=system,
        workload=workload,
        num_gpus=machine.num_gpus,
        shape=shape,
        num_micro_batches=workload.num_micro_batches or 1,
        blocks=tuple(blocks),
        ledger=recipe.ledger(blocks),
    )


def activation_ram_bytes(system: System, machine: Machine, shape: ModelShape) -> int:
    """RAM a published system has left for activations."""
    usable = int(machine.ram_bytes * system.footprint.ram_share)
    return max(0, usable - _fixed_ram_bytes(system, shape))


def _fixed_ram_bytes(system: System, shape: ModelShape) -> int:
    footprint = system.footprint
    return int(
        footprint.ram_fixed_bytes
        + footprint.ram_bytes_per_block_parameter * _largest_block(shape).num_parameters
        + footprint.ram_bytes_per_model_parameter * shape.num_parameters
    )


def _largest_block(shape: ModelShape) -> BlockShape:
    """The largest inner block; of a model without any, the largest block."""
    blocks = shape.blocks
    return max(blocks[1:-1] or blocks, key=lambda block: block.num_parameters)


class _Recipe:
    def __init__(
        self, system: System, machine: Machine, shape: ModelShape, workload: Workload
    ) -> None:
        self.system, self.machine, self.shape, self.workload = system, machine, shape, workload
        self.batch = workload.batch_per_gpu(machine.num_gpus)
        self.blocks = [shape.kinds[kind] for kind in shape.sequence_of_kinds]
        self.largest = _largest_block(shape)
        self.inputs = [block.input_bytes.at(self.batch, workload.sequence) for block in self.blocks]
        # The head's input is used at once; it never leaves the GPU.
        self.swappable_inputs = [*self.inputs[:-1], 0]
        per_kind = [kind.forward_flops.at(self.batch, workload.sequence) for kind in shape.kinds]
        flops = [per_kind[kind] for kind in shape.sequence_of_kinds]
        self.forward_flops, self.inner_flops = sum(flops), sum(flops[1:-1])
        self.num_parameters = shape.num_parameters

    def _orders(self) -> list[tuple[SwapStep, ...]]:
        def order(block: BlockShape) -> tuple[SwapStep, ...]:
            return swap_order(block, self.batch, self.workload.sequence, False)

        orders = [(), *(order(block) for block in self.blocks[1:-1]), ()]
        return orders[: len(self.blocks)]

    def choose_activations(self) -> list[BlockPlan]:
        rule = self.system.activations
        if rule in (ActivationRule.NOTHING, ActivationRule.INPUTS_ON_GPU):
            keeps_all = rule is ActivationRule.NOTHING
            return self._with_head(
                [
                    BlockPlan(
                        input_choice=Choice.KEEP,
                        choices=tuple((index, Choice.KEEP) for index in swappable_indices(block))
                        if keeps_all
                        else (),
                    )
                    for block in self.blocks
                ]
            )
        orders = self._orders()
        left_bytes = activation_ram_bytes(self.system, self.machine, self.shape)
        ram_bytes = int(left_bytes / self.system.footprint.ram_bytes_per_activation_byte)
        if rule is ActivationRule.COPY_TIME:
            # Capuchin looks at operators as they run, not at what they cost to make again.
            orders = [tuple(sorted(order, key=lambda s: s.operator_index)) for order in orders]
        points = swap_points(orders, self.swappable_inputs, self.inner_flops)
        point = self._choose(rule, points, ram_bytes)
        if rule is ActivationRule.EVERYTHING_TO_SSD:
            ram_bytes = 0
        elif rule not in (ActivationRule.HOLISTIC, ActivationRule.EVERYTHING):
            # These never use the SSD: what does not fit shows in the ledger.
            ram_bytes = max(ram_bytes, point.swapped_bytes * self.machine.num_gpus)
        return self._with_head(
            assign_tiers(
                orders,
                self.swappable_inputs,
                point.num_items,
                ram_bytes,
                bytes_factor=self.machine.num_gpus,
            )
        )

    def _with_head(self, plans: list[BlockPlan]) -> list[BlockPlan]:
        head = BlockPlan(input_choice=Choice.KEEP, choices=plans[-1].choices)
        return [*plans[:-1], head]

    def _choose(
        self, rule: ActivationRule, points: Sequence[SwapPoint], ram_bytes: int
    ) -> SwapPoint:
        num_gpus = self.machine.num_gpus
        if rule is ActivationRule.INPUTS_TO_RAM:
            return points[0]
        if rule in (ActivationRule.EVERYTHING, ActivationRule.EVERYTHING_TO_SSD):
            return points[-1]
        in_ram = [point for point in points if point.swapped_bytes * num_gpus <= ram_bytes]
        if rule is ActivationRule.MEMORY_BOUND:
            return (in_ram or points[:1])[-1]
        if rule is ActivationRule.COPY_TIME:
            hidden_bytes = (
                self.forward_flops
                / self.machine.gpu.flops_per_second
                * self.machine.gpu_to_ram_bytes_per_second
            )
            return ([p for p in in_ram if p.swapped_bytes <= hidden_bytes] or points[:1])[-1]
        if rule is ActivationRule.HOLISTIC_RAM:
            points = in_ram or points[:1]
        return best_point(points, lambda point: self._seconds(point, ram_bytes))

    def _seconds(self, point: SwapPoint, ram_bytes: int) -> float:
        num_gpus = self.machine.num_gpus
        num_parameters = self.num_parameters
        swapped = point.swapped_bytes * num_gpus
        state = self.system.state
        return stage_seconds(
            self.machine,
            Traffic(
                forward_flops=self.forward_flops,
                backward_flops=2 * self.forward_flops,
                recompute_flops=point.recompute_flops,
                num_parameters=num_parameters,
                swapped_bytes=swapped,
                spilled_bytes=max(0, swapped - ram_bytes),
                state_read_bytes=num_parameters * (state.master_bytes + state.moments_bytes),
                state_written_bytes=num_parameters * state.stored_bytes,
                weight_read_bytes=2 * num_parameters,
                weight_copy_bytes=2 * num_parameters * num_gpus,
            ),
            copy_interference=self.system.rates.copy_interference,
        )

    # Memory ----------------------------------------------------------------------------------

    def _budgets(self) -> dict[Tier, int]:
        footprint = self.system.footprint
        return {
            Tier.GPU: int(self.machine.gpu.memory_bytes * footprint.gpu_share),
            Tier.RAM: int(self.machine.ram_bytes * footprint.ram_share),
            Tier.SSD: self.machine.ssd_capacity_bytes,
        }

    def ledger(self, plans: Sequence[BlockPlan]) -> Ledger:
        footprint, num_gpus = self.system.footprint, self.machine.num_gpus
        in_ram, on_ssd, on_gpu = self._activation_bytes(plans)
        per_block = footprint.gpu_bytes_per_block_parameter
        if num_gpus > 1 and footprint.gpu_bytes_per_block_parameter_parallel is not None:
            per_block = footprint.gpu_bytes_per_block_parameter_parallel
        largest = self.largest
        working = largest.saved_bytes.at(self.batch, self.workload.sequence) + max(self.inputs)
        if footprint.has_score_matrix:
            pairs = sum(op.forward_flops.per_token_pair for op in largest.operators)
            scores = self.batch * self.workload.sequence**2 * pairs / 4 / _HEAD_DIMENSION
            # Scores and probabilities at 2 bytes each and a mask of 1.
            working += int(5 * scores)
        num_logits = (
            max(
                (
                    op.output_bytes.at(self.batch, self.workload.sequence)
                    for op in self.blocks[-1].operators
                    if op.forward_flops.at(1, 16) > 0
                ),
                default=0,
            )
            / self.shape.dtype_bytes
        )
        in_flight = per_block * largest.num_parameters
        states = footprint.gpu_bytes_per_model_parameter * self.shape.num_parameters
        logits = footprint.gpu_logits_bytes * num_logits
        fixed = _fixed_ram_bytes(self.system, self.shape)
        swapped = in_ram * footprint.ram_bytes_per_activation_byte
        lines = [
            line(
                Tier.GPU, "weights and gradients of the blocks in flight", in_flight, _SMALLER_MODEL
            ),
            line(Tier.GPU, "states kept on the GPU", states, _SMALLER_MODEL),
            line(Tier.GPU, "activations of one block", working, _SMALLER_BATCH, is_constant=True),
            line(Tier.GPU, "logits of the loss", logits, _SMALLER_BATCH),
            line(Tier.GPU, "activations kept", on_gpu, _SMALLER_BATCH),
            line(Tier.RAM, "buffers and states", fixed, "use a smaller model or more RAM"),
            line(Tier.RAM, "swapped activations", swapped, _SMALLER_BATCH),
            line(Tier.SSD, "swapped activations", on_ssd, _SMALLER_BATCH),
        ]
        if self.system.home is Tier.SSD:
            per_parameter = self.system.state.stored_bytes + 2 * self.system.spills_gradients
            nbytes = per_parameter * self.shape.num_parameters
            lines.append(line(Tier.SSD, "states", nbytes, "add a drive"))
        return Ledger(lines=(*lines, *self._tensor_line()), budgets=self._budgets())

    def _tensor_line(self) -> list[LedgerLine]:
        """A system that cannot move a matrix needs, in effect, memory that no GPU has."""
        largest_matrix = self.largest.num_parameters / 3
        allowed = self.system.footprint.max_tensor_bytes
        if allowed is None or largest_matrix * 4 < allowed:
            return []
        purpose = "one weight matrix as 4-byte gradients, more than this system can move"
        return [line(Tier.GPU, purpose, self._budgets()[Tier.GPU] + 1, _SMALLER_MODEL)]

    def _activation_bytes(self, plans: Sequence[BlockPlan]) -> tuple[int, int, int]:
        """Activation bytes in RAM, on SSD and on each GPU between the passes."""
        by_choice = dict.fromkeys(Choice, 0)
        for block, plan, nbytes in zip(self.blocks, plans, self.swappable_inputs, strict=True):
            by_choice[plan.input_choice] += nbytes
            sizes = {op.index: op.output_bytes for op in block.operators}
            for index, choice in plan.choices:
                by_choice[choice] += sizes[index].at(self.batch, self.workload.sequence)
        num_gpus = self.machine.num_gpus
        return (
            by_choice[Choice.SWAP_TO_RAM] * num_gpus,
            by_choice[Choice.SWAP_TO_SSD] * num_gpus,
            by_choice[Choice.KEEP],
        )
