"""Plans of systems that came after the paper, from what each moves per parameter and step.

Owns where their states live. Nothing is fitted to figures their authors published, so a simulated
step is the best they could do; docs/reproduction.md lists what is assumed.
"""

from dataclasses import replace

from lohan.hardware.machine import Machine
from lohan.model.shape import ModelShape
from lohan.paper.published import plan_published
from lohan.plan.plan import BlockPlan, Plan
from lohan.plan.system import System
from lohan.plan.workload import Workload
from lohan.simulate.quick import quick_step
from lohan.vocabulary import TensorKind, Tier

_STATES = frozenset({TensorKind.P32, TensorKind.OS32})
_DEFERRED_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)


def plan_later(system: System, machine: Machine, shape: ModelShape, workload: Workload) -> Plan:
    """The plan such a system would follow, fitting or not: ask its ledger."""
    plan = plan_published(system, machine, shape, workload)
    if system.name == "slideformer+ssd":
        return _with_blocks(
            plan, [replace(one, residents=frozenset({TensorKind.P16})) for one in plan.blocks]
        )
    if system.name != "greedysnake" or not plan.ledger.fits:
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
