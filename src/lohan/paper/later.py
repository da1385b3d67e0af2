"""Systems that came after the paper, from what each moves per parameter and step.

Owns their properties and where their states live. Nothing is fitted to figures their authors
published: they are given the machine's own rates, perfect overlap and the least memory their design
allows, so that a simulated step is the best they could do; docs/reproduction.md lists what is
assumed. None of them clips gradients while updates overlap.
"""

from dataclasses import replace

from lohan.hardware.machine import Machine
from lohan.model.shape import ModelShape
from lohan.paper.published import plan_published
from lohan.plan.plan import BlockPlan, Plan
from lohan.plan.system import (
    PLAIN_STATE,
    ActivationRule,
    DrivingRates,
    Footprint,
    StateFormat,
    System,
    UpdateTiming,
)
from lohan.plan.workload import Workload
from lohan.simulate.quick import quick_step
from lohan.vocabulary import TensorKind, Tier

# P16 and G16 of two blocks at a time.
_TWO_BLOCKS_BYTES = 8.0
_STATES = frozenset({TensorKind.P32, TensorKind.OS32})
_DEFERRED_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)

GREEDYSNAKE = System(
    name="greedysnake",
    summary="GreedySnake: states on SSD, layer-major, updates partly under the next forward pass",
    state=PLAIN_STATE,
    home=Tier.SSD,
    update_timing=UpdateTiming.UNDER_NEXT_FORWARD,
    has_barrier=False,
    activations=ActivationRule.INPUTS_TO_RAM,
    # States of three blocks on their way, and P16 read ahead; gradients that wait for a deferred
    # update come on top.
    footprint=Footprint(
        gpu_bytes_per_block_parameter=_TWO_BLOCKS_BYTES, ram_bytes_per_block_parameter=48.0
    ),
)

SLIDEFORMER = System(
    name="slideformer",
    summary="SlideFormer: states in RAM, updates under the backward pass",
    state=PLAIN_STATE,
    home=Tier.RAM,
    update_timing=UpdateTiming.PIPELINED,
    activations=ActivationRule.INPUTS_TO_RAM,
    # Masters and moments; 16-bit copies are made for a layer at a time.
    footprint=Footprint(
        gpu_bytes_per_block_parameter=_TWO_BLOCKS_BYTES, ram_bytes_per_model_parameter=12.0
    ),
)

SLIDEFORMER_SSD = replace(
    SLIDEFORMER,
    name="slideformer+ssd",
    summary="SlideFormer with its moments on SSD and its masters in RAM",
    home=Tier.SSD,
    # The masters never travel: they are in the footprint, and weights are made from them.
    state=StateFormat(
        weights_bytes=2, master_bytes=0, moments_bytes=8, needs_weights_to_update=False
    ),
    footprint=replace(SLIDEFORMER.footprint, ram_bytes_per_model_parameter=4.0),
)

ROUNDPIPE = System(
    name="roundpipe",
    summary="RoundPipe: states in RAM, updates with gradients of the step before, GPUs in a round",
    state=PLAIN_STATE,
    home=Tier.RAM,
    update_timing=UpdateTiming.UNDER_NEXT_FORWARD,
    has_barrier=False,
    activations=ActivationRule.INPUTS_TO_RAM,
    rates=DrivingRates(shares_host_link=False, partitions_over_gpus=True),
    # P16, G16, masters and moments.
    footprint=Footprint(
        gpu_bytes_per_block_parameter=_TWO_BLOCKS_BYTES, ram_bytes_per_model_parameter=16.0
    ),
)

MEGATRAIN = System(
    name="megatrain",
    summary="MegaTrain: 16-bit weights without masters and moments in RAM, inputs on the GPU",
    state=StateFormat(
        weights_bytes=2, master_bytes=0, moments_bytes=8, needs_weights_to_update=False
    ),
    home=Tier.RAM,
    update_timing=UpdateTiming.PIPELINED,
    activations=ActivationRule.INPUTS_ON_GPU,
    footprint=Footprint(
        gpu_bytes_per_block_parameter=_TWO_BLOCKS_BYTES, ram_bytes_per_model_parameter=10.0
    ),
)

LATER_SYSTEMS = {
    system.name: system
    for system in (GREEDYSNAKE, SLIDEFORMER, SLIDEFORMER_SSD, ROUNDPIPE, MEGATRAIN)
}


def plan_later(system: System, machine: Machine, shape: ModelShape, workload: Workload) -> Plan:
    """The plan such a system would follow, fitting or not: ask its ledger."""
    plan = plan_published(system, machine, shape, workload)
    if system is SLIDEFORMER_SSD:
        return _with_blocks(
            plan, [replace(one, residents=frozenset({TensorKind.P16})) for one in plan.blocks]
        )
    if system is not GREEDYSNAKE or not plan.ledger.fits:
        return plan
    spare_bytes = plan.ledger.spare(Tier.RAM)
    waiting_bytes = {share: int(2 * share * shape.num_parameters) for share in _DEFERRED_SHARES}
    return min(
        (
            _deferring(_filled(plan, spare_bytes - nbytes), share)
            for share, nbytes in waiting_bytes.items()
            if nbytes <= spare_bytes
        ),
        key=lambda one: quick_step(one, machine).step_seconds,
    )


def _deferring(plan: Plan, share: float) -> Plan:
    """The first blocks, whose gradients come last, are updated under the next forward pass."""
    num_deferred = round(share * len(plan.blocks))
    return _with_blocks(
        plan,
        [
            replace(block, defers_update=number < num_deferred)
            for number, block in enumerate(plan.blocks)
        ],
    )


def _filled(plan: Plan, left: int) -> Plan:
    """RAM that is left holds weights, then states, of whole blocks, the first ones first."""
    state = plan.system.state
    residents: list[frozenset[TensorKind]] = [frozenset()] * len(plan.blocks)
    for kinds, bytes_each in (
        (frozenset({TensorKind.P16}), state.weights_bytes),
        (_STATES, state.master_bytes + state.moments_bytes),
    ):
        for number, kind in enumerate(plan.shape.sequence_of_kinds):
            nbytes = bytes_each * plan.shape.kinds[kind].num_parameters
            if nbytes <= left:
                residents[number] |= kinds
                left -= nbytes
    return _with_blocks(
        plan,
        [replace(one, residents=kinds) for one, kinds in zip(plan.blocks, residents, strict=True)],
    )


def _with_blocks(plan: Plan, blocks: list[BlockPlan]) -> Plan:
    return replace(plan, blocks=tuple(blocks))
