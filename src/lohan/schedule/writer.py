"""Writes tasks into a schedule: ids, barriers, the serial chain, and the pools they lease from.

Owns what every kind of task shares; `build`, `gradients` and `updates` decide which tasks there
are. They write in an order in which the tasks could run one by one: see "Why nothing can hang" in
`task`.
"""

from collections.abc import Iterable, Sequence

from lohan.plan.block_costs import BlockCosts
from lohan.plan.plan import Plan
from lohan.plan.pools import (
    BlockSizes,
    gradient_bytes,
    pool_sizes,
    weights_bytes,
)
from lohan.schedule.task import WHOLE, Compute, Lease, Move, Piece, Pool, Schedule, Task
from lohan.vocabulary import BlockId, Lane, Pass, PoolName, TaskId, Tier

FOR_COMPUTE = 0
FOR_STATES = 1
"""Smaller goes first where a lane's order is open: what compute waits for, then the states."""


class TaskWriter:
    """Collects the tasks of a schedule."""

    def __init__(self, plan: Plan, costs: Sequence[BlockCosts]) -> None:
        self.plan = plan
        self.weights = weights_bytes(plan.shape)
        self.gradients = gradient_bytes(plan.shape)
        self.step = 0
        self.is_last_step = False
        self._costs = costs
        self._is_serial = plan.system.is_serial
        self._tasks: list[Task] = []
        self._num_taken = 0
        self._barrier: tuple[TaskId, ...] = ()
        self._has_successor: set[TaskId] = set()
        self._last_of_peers: TaskId | None = None
        self._step_start = 0

    def start_step(self, step: int, *, is_last: bool) -> None:
        """Begin the tasks of a step."""
        self.step, self.is_last_step = step, is_last
        self._step_start = self._num_written

    @property
    def _num_written(self) -> int:
        return self._num_taken + len(self._tasks)

    def take(self) -> tuple[Task, ...]:
        """Everything written since the last time; it is forgotten here."""
        taken = tuple(self._tasks)
        self._num_taken += len(taken)
        self._tasks.clear()
        self._has_successor.clear()
        return taken

    def raise_barrier(self) -> None:
        """Everything written from now on comes after everything written so far."""
        open_ends = [
            task.id
            for task in self._tasks[self._step_start - self._num_taken :]
            if task.id not in self._has_successor
        ]
        self._barrier = tuple(open_ends)

    def write(
        self,
        lane: Lane,
        block: BlockId,
        action: Move | Compute,
        *,
        after: Iterable[TaskId] = (),
        leases: tuple[Lease, ...] = (),
        returns: tuple[Lease, ...] = (),
        priority: tuple[int, ...] = (),
        of_pass: Pass | None = None,
        piece: Piece = WHOLE,
        fixed_seconds: float = 0.0,
        step: int | None = None,
    ) -> TaskId:
        """Append one task and return its id; `step` where it belongs to an earlier one."""
        task_id = TaskId(self._num_written)
        before = dict.fromkeys(after)
        if lane is Lane.PEER:
            # Ranks that met in another order than each other would wait for ever.
            if self._last_of_peers is not None:
                before[self._last_of_peers] = None
            self._last_of_peers = task_id
        if self._is_serial and task_id:
            before[TaskId(task_id - 1)] = None
        if self._barrier and all(task < self._step_start for task in before):
            before |= dict.fromkeys(self._barrier)
        self._has_successor.update(before)
        self._tasks.append(
            Task(
                task_id,
                lane,
                block,
                self.step if step is None else step,
                action,
                tuple(before),
                leases,
                returns,
                (*priority, task_id),
                fixed_seconds,
                of_pass,
                piece,
            )
        )
        return task_id

    def moving_bytes(self, swapped_bytes: int) -> int:
        """GPU memory of a block's swapped outputs: those of one micro-batch at a time."""
        return -(-swapped_bytes // self.plan.num_micro_batches)

    def schedule(self, num_steps: int) -> Schedule:
        """Everything written, lanes in program order."""
        lanes: dict[Lane, list[TaskId]] = {}
        for task in self._tasks:
            lanes.setdefault(task.lane, []).append(task.id)
        return Schedule(
            tasks=tuple(self._tasks),
            lanes={lane: tuple(ids) for lane, ids in lanes.items()},
            pools=self.pools,
            num_steps=num_steps,
            num_blocks=len(self.weights),
            initial={tier: self.plan.ledger.constant(tier) for tier in (Tier.GPU, Tier.RAM)},
        )

    @property
    def pools(self) -> dict[PoolName, Pool]:
        """What tasks lease from."""
        return {pool.name: pool for pool in self._pools()}

    def _pools(self) -> list[Pool]:
        system, plan = self.plan.system, self.plan
        largest = max(self.weights)
        # Where the GPU is home, gradients wait there for the update, all of them.
        gradients = system.num_gradient_slots * max(self.gradients)
        if system.home is Tier.GPU:
            gradients = sum(self.gradients)
        gradients *= plan.workload.groups_per_rank
        moving = max(self.moving_bytes(costs.swapped_bytes) for costs in self._costs)
        spilled = max(costs.to_ssd_bytes for costs in self._costs) * plan.num_gpus
        in_ram = sum(costs.to_ram_bytes for costs in self._costs) * plan.num_gpus
        streaming = pool_sizes(
            system,
            BlockSizes.of(plan.shape, plan.workload),
            num_update_parts=plan.num_update_parts,
            gradient_slots=plan.gradient_slots,
        )
        return [
            Pool(PoolName.WEIGHTS, Tier.GPU, system.num_weight_slots * largest),
            Pool(PoolName.GRADIENTS, Tier.GPU, gradients),
            # Outputs of the block at work and of the one before or after it.
            Pool(PoolName.MOVING, Tier.GPU, 2 * moving),
            Pool(PoolName.KEPT, Tier.GPU, sum(costs.kept_bytes for costs in self._costs)),
            *(Pool(name, Tier.RAM, nbytes) for name, nbytes in streaming.items()),
            Pool(PoolName.SWAPPED, Tier.RAM, in_ram),
            Pool(PoolName.SPILLING, Tier.RAM, system.num_spill_slots * spilled),
        ]
