"""Tasks, lanes, pools and the Schedule that holds them.

A task is a Move or a Compute on one lane. It starts when its lane is free, every task it comes
after is done, and the pools it leases from have room; a settled schedule proves the last condition
from the other two, so leasing never blocks. Owns the list; runs nothing.

Why nothing can hang: the builder writes tasks in an order in which they could run one by one (each
after what it comes after, every pool with room; `check_serial` replays that), and each pool grants
its leases in that order. Take the first task not yet started: everything before it has started and
will end, so what it comes after is done; its pools have granted to earlier tasks only and hold no
more than in the serial run, so there is room. Hence some task can always go on, whatever the
priorities and however long tasks take.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from lohan.vocabulary import BlockId, ComputeKind, Lane, Pass, PoolName, TaskId, TensorKind, Tier


@dataclass(frozen=True, slots=True)
class Move:
    """Bytes of one tensor kind that change their tier."""

    kind: TensorKind
    source: Tier
    target: Tier
    nbytes: int


@dataclass(frozen=True, slots=True)
class Compute:
    """Work on the GPU (FLOPs) or on the CPU (parameters)."""

    kind: ComputeKind
    flops: int = 0
    num_parameters: int = 0
    touched_bytes: int = 0
    """GPU memory traffic beyond what the compute rate already covers."""
    num_launches: int = 0
    """Operators the host launches for it, over all micro-batches."""


@dataclass(frozen=True, slots=True)
class Lease:
    """Bytes held from the start of one task to the end of another."""

    pool: PoolName
    key: str
    """Tells it from others of its pool; nothing is read out of it."""
    nbytes: int


@dataclass(frozen=True, slots=True)
class Pool:
    """Memory of one purpose in one tier; its leases together never exceed its capacity."""

    name: PoolName
    tier: Tier
    capacity_bytes: int


class Piece(NamedTuple):
    """One of the pieces in which something of a block moves or is updated; counted from 0."""

    number: int
    of: int

    def __str__(self) -> str:
        return f"{self.number + 1}/{self.of}"


WHOLE = Piece(0, 1)
"""The only piece of what is not cut."""


@dataclass(frozen=True, slots=True)
class Task:
    """One Move or Compute on one lane."""

    id: TaskId
    lane: Lane
    block: BlockId
    step: int
    action: Move | Compute
    after: tuple[TaskId, ...] = ()
    leases: tuple[Lease, ...] = ()
    """Taken when the task starts."""
    returns: tuple[Lease, ...] = ()
    """Given back when the task ends; an earlier task (or this one) leased them."""
    priority: tuple[int, ...] = ()
    """Smaller goes first where the order of a lane is still open."""
    fixed_seconds: float = 0.0
    of_pass: Pass | None = None
    """For which pass P16 moves, or which one a forward computes."""
    piece: Piece = WHOLE

    @property
    def name(self) -> str:
        """Readable name, unique within a step."""
        if isinstance(self.action, Move):
            what = f"{self.action.kind} {self.action.source}>{self.action.target}"
        else:
            what = str(self.action.kind)
        of_pass = f" {self.of_pass}" if self.of_pass else ""
        return f"{what} b{self.block}{of_pass}" + (f" {self.piece}" if self.piece.of > 1 else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Ordered tasks on lanes for one or several steps."""

    tasks: tuple[Task, ...]
    """By id."""
    lanes: Mapping[Lane, tuple[TaskId, ...]]
    """Order in which each lane runs its tasks."""
    pools: Mapping[PoolName, Pool]
    num_steps: int
    num_blocks: int
    is_settled: bool = False
    """The order is final and every pool is proven to have room at every lease."""
    initial: Mapping[Tier, int] = field(default_factory=dict)
    """Bytes held for the whole run, outside the pools."""

    def task(self, task: TaskId) -> Task:
        """The task with an id."""
        return self.tasks[task]

    def with_order(
        self, lanes: Mapping[Lane, tuple[TaskId, ...]], edges: Mapping[TaskId, tuple[TaskId, ...]]
    ) -> "Schedule":
        """The same tasks in a settled order, with the edges that prove the pools."""
        tasks = tuple(
            replace(task, after=tuple(dict.fromkeys(task.after + edges[task.id])))
            if task.id in edges
            else task
            for task in self.tasks
        )
        return replace(self, tasks=tasks, lanes=lanes, is_settled=True)
