"""The Plan: every decision of a run, and the ledger that shows it fits.

Made by a policy from a machine, a model shape and a workload; spelled out as tasks by the schedule
builder; executed by simulator and engine alike. Owns the decisions, not how they were reached.
"""

import json
from dataclasses import dataclass

from msgspec import to_builtins

from lohan.model.loss_head import in_chunks, loss_head
from lohan.model.shape import BlockShape, ModelShape
from lohan.plan.ledger import Ledger, LedgerRow
from lohan.plan.system import System
from lohan.plan.workload import Workload
from lohan.units import format_bytes
from lohan.vocabulary import BlockId, Choice, TensorKind, Tier

PLAN_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPlan:
    """Decisions for one block."""

    input_choice: Choice
    """What happens to the tensors that enter the block with a gradient."""
    choices: tuple[tuple[int, Choice], ...] = ()
    """Operator outputs by index that are kept or swapped; all others are recomputed."""
    residents: frozenset[TensorKind] = frozenset()
    """State kinds that live in RAM instead of on SSD."""
    defers_update: bool = False
    """The update runs under the next forward pass, whose weights then come straight from it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Every decision of a run."""

    system: System
    workload: Workload
    num_gpus: int
    shape: ModelShape
    num_micro_batches: int
    """Micro-batches per GPU and step; each goes through a block before the next block begins."""
    blocks: tuple[BlockPlan, ...]
    ledger: Ledger
    num_update_parts: int = 1
    """Pieces in which the state of the largest block streams through RAM."""
    gradient_slots: int | None = None
    """Blocks of G16 that may wait in RAM; None: all of them."""
    loss_chunks: int = 1
    """Parts in which the head computes the loss of a micro-batch; 1: with its logits as a whole."""

    @property
    def computed_shape(self) -> ModelShape:
        """The shape as it is computed: with the loss in its chunks."""
        return in_chunks(self.shape, self.workload.sequence, self.loss_chunks)

    @property
    def policy(self) -> str:
        """Name of the policy that made the plan."""
        return self.system.name

    @property
    def batch_per_gpu(self) -> int:
        """Sequences each GPU computes in a step."""
        return self.workload.batch_per_gpu(self.num_gpus)

    def block_shape(self, block: BlockId) -> BlockShape:
        """Shape of one block."""
        return self.shape.kinds[self.shape.sequence_of_kinds[block]]

    def home_of(self, block: BlockId, kind: TensorKind) -> Tier:
        """Tier in which a block's state of one kind lives between its uses."""
        if kind in self.blocks[block].residents and self.system.home is Tier.SSD:
            return Tier.RAM
        return self.system.home

    def ssd_weights_bytes(self, block: BlockId, *, is_fresh: bool) -> int:
        """P16 bytes a fetch of a block reads from SSD, its own and those it shares.

        `is_fresh`: those it trains are in RAM already, straight from their update.
        """
        count = 0
        if self.home_of(block, TensorKind.P16) is Tier.SSD:
            kind = self.block_shape(block)
            count = kind.num_frozen_parameters if is_fresh else kind.num_parameters
        for owner, other, num_parameters in self.shape.tied:
            if other == block and self.home_of(BlockId(owner), TensorKind.P16) is Tier.SSD:
                count += num_parameters
        return count * self.shape.dtype_bytes

    def to_json(self) -> str:
        """The decisions as JSON, one entry per run of equal blocks."""
        runs: list[_RunInFile] = []
        for number, block in enumerate(self.blocks):
            decisions = _DecisionsInFile(
                input=block.input_choice,
                choices=dict(block.choices),
                residents=sorted(block.residents),
                defers_update=block.defers_update,
            )
            if runs and runs[-1].decisions == decisions:
                runs[-1].last = number
            else:
                runs.append(_RunInFile(first=number, last=number, decisions=decisions))
        file = PlanFile(
            policy=self.policy,
            model=self.shape.name,
            num_gpus=self.num_gpus,
            batch=self.workload.batch,
            sequence=self.workload.sequence,
            clips_gradients=self.workload.clips_gradients,
            num_micro_batches=self.num_micro_batches,
            num_update_parts=self.num_update_parts,
            gradient_slots=self.gradient_slots,
            loss_chunks=self.loss_chunks,
            blocks=runs,
            ledger=self.ledger.to_rows(),
        )
        fields = {"version": PLAN_VERSION, **to_builtins(file, str_keys=True)}
        return json.dumps(fields, indent=1)


def loss_words(plan: Plan) -> str:
    """In how many chunks a plan that may computes the loss, or why it does not."""
    head = loss_head(plan.shape)
    if isinstance(head, str):
        return f"the loss with its logits as a whole: {head}"
    if plan.loss_chunks == 1:
        return "the loss with its logits as a whole: another block needs more GPU memory"
    logits = head.linear.output_bytes.at(1, plan.workload.sequence)
    return (
        f"the loss in {plan.loss_chunks} chunks, whose logits are {format_bytes(logits)} of a "
        "sequence as a whole and are computed three times; on a GPU last bits may differ"
    )


@dataclass(slots=True, kw_only=True)
class _DecisionsInFile:
    input: Choice
    choices: dict[int, Choice]
    """By the index of an operator of the block; all others are recomputed."""
    residents: list[TensorKind]
    defers_update: bool


@dataclass(slots=True, kw_only=True)
class _RunInFile:
    first: int
    last: int
    decisions: _DecisionsInFile


@dataclass(slots=True, kw_only=True)
class PlanFile:
    """A plan as its file holds it."""

    policy: str
    model: str
    num_gpus: int
    batch: int
    sequence: int
    clips_gradients: bool
    num_micro_batches: int
    num_update_parts: int
    gradient_slots: int | None
    loss_chunks: int
    blocks: list[_RunInFile]
    ledger: list[LedgerRow]
