"""The ways a training is run: everything that may change where things are, and must not change
a bit of the result.

Owns the list of cases, the plans that force them, and the machine they are planned for. Called by
`compare`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lohan.hardware.machine import Gpu, Machine, Ssd, SsdPath
from lohan.model.shape import BlockShape, ModelShape
from lohan.plan import make_plan
from lohan.plan.plan import BlockPlan, Plan
from lohan.plan.policies import Policy
from lohan.plan.workload import Workload
from lohan.units import GIB, TIB
from lohan.vocabulary import BlockId, Choice

_POLICY = "lohan+"

ACTIVATIONS: dict[str, Choice | None] = {
    "as planned": None,
    "kept": Choice.KEEP,
    "swapped to RAM": Choice.SWAP_TO_RAM,
    "swapped to SSD": Choice.SWAP_TO_SSD,
    "recomputed": Choice.RECOMPUTE,
}
"""What is done with the outputs of all blocks; as planned: what the policy decides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One way to run."""

    activations: str
    """A key of `ACTIVATIONS`."""
    num_micro_batches: int
    max_grad_norm: float | None
    reads_states: bool = False
    """Whether the loss reads hidden states and router logits too."""

    @property
    def words(self) -> str:
        """For people."""
        return (
            f"activations {self.activations}, {self.num_micro_batches} micro-batch"
            f"{'es' if self.num_micro_batches > 1 else ''}, clipping "
            f"{'on' if self.max_grad_norm is not None else 'off'}"
            f"{', a loss on hidden states' if self.reads_states else ''}"
        )


def all_cases(
    max_grad_norm: float = 1.0, *, counts: Sequence[int] = (1, 2), reads_states: bool = False
) -> list[Case]:
    """Every combination; those that differ in activations alone, and so share a judge, together.

    Args:
        counts: of micro-batches.
        reads_states: whether losses are on hidden states and router logits too.
    """
    return [
        Case(
            activations=activations,
            num_micro_batches=count,
            max_grad_norm=norm,
            reads_states=reads_states,
        )
        for count in dict.fromkeys(counts)
        for norm in (max_grad_norm, None)
        for activations in ACTIVATIONS
    ]


def policy_of(case: Case) -> Policy | str:
    """A policy that makes the plan of a case.

    Where activations are told, all states live on SSD too: so small a model would otherwise be
    kept in RAM whatever the budget.
    """
    choice = ACTIVATIONS[case.activations]
    if choice is None:
        return _POLICY

    def make(machine: Machine, shape: ModelShape, workload: Workload) -> Plan:
        plan = make_plan(_POLICY, machine, shape, workload)
        last = len(plan.blocks) - 1
        return replace(
            plan,
            blocks=tuple(
                _overruled(
                    block, plan.block_shape(BlockId(number)), choice, is_end=number in (0, last)
                )
                for number, block in enumerate(plan.blocks)
            ),
        )

    return make


def even_machine(num_ssds: int) -> Machine:
    """A made-up machine whose parts are about equally busy with a small model.

    What is planned for it uses every lane; how fast this machine really is does not matter here.
    """
    drive = Ssd(
        name="drive",
        read_bytes_per_second=1e9,
        write_bytes_per_second=1e9,
        capacity_bytes=TIB,
        endurance_bytes=1000 * TIB,
        price_dollars=0.0,
    )
    return Machine(
        name="even",
        gpu=Gpu(
            name="device",
            memory_bytes=GIB,
            flops_per_second=1e10,
            memory_bytes_per_second=1e11,
            price_dollars=0.0,
        ),
        num_gpus=1,
        ram_bytes=GIB,
        ram_to_gpu_bytes_per_second=1e9,
        gpu_to_ram_bytes_per_second=1e9,
        cpu_update_parameters_per_second=1e8,
        ssds=(drive,) * num_ssds,
        ssd_path=SsdPath(
            is_duplex=False,
            read_ceiling_bytes_per_second=1e10,
            write_ceiling_bytes_per_second=1e10,
        ),
        host_price_dollars=0.0,
    )


def _overruled(block: BlockPlan, shape: BlockShape, choice: Choice, *, is_end: bool) -> BlockPlan:
    nowhere_in_ram = replace(block, residents=frozenset())
    if is_end:  # what comes before the first and after the last block is small and stays
        return nowhere_in_ram
    if choice is Choice.RECOMPUTE:
        return replace(nowhere_in_ram, input_choice=Choice.KEEP, choices=())
    saved = [operator.index for operator in shape.operators if operator.is_saved]
    return replace(
        nowhere_in_ram, input_choice=choice, choices=tuple((index, choice) for index in saved)
    )
