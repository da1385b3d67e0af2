"""Spells a Plan out as tasks: forward, backward and update of every block, for several steps.

Owns dependencies, leases and priorities, and writes in an order in which the tasks could run one by
one. The order of each lane is left open here; `settle` in `lohan.simulate` fixes it. Contains no
policy: everything it asks is a field of the Plan.
"""

from collections.abc import Callable, Mapping

from lohan.plan.block_costs import BlockCosts, costs_of_blocks
from lohan.plan.plan import Plan
from lohan.schedule.gradients import piece_bytes
from lohan.schedule.task import Compute, Lease, Move, Piece, Pool, Schedule, Task
from lohan.schedule.updates import UpdateTasks
from lohan.schedule.writer import FOR_COMPUTE, TaskWriter
from lohan.vocabulary import BlockId, ComputeKind, Lane, Pass, PoolName, TaskId, TensorKind, Tier


def build_schedule(plan: Plan, *, num_steps: int = 1) -> Schedule:
    """Tasks of `num_steps` consecutive steps of a plan, lanes still in program order."""
    return _StepBuilder(plan).build(num_steps)


class RollingSchedule:
    """The same tasks, one step at a time, for a run whose end is not known.

    Ids go on from call to call; a task may come after tasks of earlier calls. What is given out is
    forgotten here. `num_passes` counts calls of `step` and `evaluation`: it is the `step` of the
    tasks they return.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.num_passes = 0
        self._builder = _StepBuilder(plan)

    @property
    def pools(self) -> Mapping[PoolName, Pool]:
        """The pools all tasks lease from."""
        return self._builder.writer.pools

    def step(self) -> tuple[Task, ...]:
        """Tasks of one more training step; updates that were put off come in front."""
        return self._taken(self._builder.write_step)

    def evaluation(self) -> tuple[Task, ...]:
        """Tasks of a forward pass alone. Updates that were put off must have been flushed."""
        return self._taken(self._builder.write_evaluation)

    def flush(self) -> tuple[Task, ...]:
        """Updates that were put off to the next step."""
        self._builder.updates.write_deferred()
        return self._builder.writer.take()

    def _taken(self, write: Callable[[int], None]) -> tuple[Task, ...]:
        write(self.num_passes)
        self.num_passes += 1
        return self._builder.writer.take()


class _StepBuilder:
    """Writes the tasks of one step after another."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._system = plan.system
        self._blocks = [BlockId(number) for number in range(plan.shape.num_blocks)]
        self._head = self._blocks[-1]
        self._costs: list[BlockCosts] = costs_of_blocks(
            plan.computed_shape,
            plan.blocks,
            plan.batch_per_gpu,
            plan.workload.sequence,
            plan.system.skips_unneeded,
        )
        link_copies = plan.num_gpus if plan.system.rates.shares_host_link else 1
        self._weight_copies = 1 if plan.system.rates.partitions_over_gpus else link_copies
        self._activation_copies = link_copies
        self.writer = TaskWriter(plan, self._costs)
        self._weights = self.writer.weights
        self.updates = UpdateTasks(plan, self.writer)
        self._last_compute: TaskId | None = None

    def build(self, num_steps: int) -> Schedule:
        for step in range(num_steps):
            self.write_step(step, is_last=step == num_steps - 1)
        return self.writer.schedule(num_steps)

    def write_evaluation(self, step: int) -> None:
        self.writer.start_step(step, is_last=False)
        previous = self._last_compute
        for block in self._blocks:
            weights = self._fetch_weights(block, Pass.FORWARD)
            previous = self.writer.write(
                Lane.GPU,
                block,
                self._compute(block, ComputeKind.FORWARD),
                after=[*weights, *([previous] if previous is not None else [])],
                returns=self._weight_lease(block, Pass.FORWARD),
                of_pass=Pass.FORWARD,
            )
        self._last_compute = previous
        if self._system.has_barrier:
            self.writer.raise_barrier()

    def write_step(self, step: int, *, is_last: bool = False) -> None:
        self.writer.start_step(step, is_last=is_last)
        swapped = self._forward()
        self._backward(swapped)
        if self._system.has_barrier:
            self.writer.raise_barrier()

    def _forward(self) -> dict[BlockId, list[TaskId]]:
        swapped = {}
        # A step's forward pass follows the backward pass before it, weights or not: what lies
        # between two blocks exists once.
        previous = self._last_compute
        for block in self._blocks:
            self.updates.before_forward(block)
            weights = self._fetch_weights(block, Pass.FORWARD)
            leases = self._activation_leases(block)
            # The head runs forward and backward in one go, so its weights stay for the backward.
            keeps_weights = block == self._head
            after = [*weights, *([previous] if previous is not None else [])]
            previous = self.writer.write(
                Lane.GPU,
                block,
                self._compute(block, ComputeKind.FORWARD),
                after=after,
                leases=leases,
                returns=() if keeps_weights else self._weight_lease(block, Pass.FORWARD),
                of_pass=Pass.FORWARD,
                fixed_seconds=self._system.rates.seconds_per_block_pass,
            )
            swapped[block] = self._swap_out(block, previous)
        self._last_compute = previous
        return swapped

    def _backward(self, swapped: dict[BlockId, list[TaskId]]) -> None:
        assert self._last_compute is not None
        previous = self._last_compute
        due: list[tuple[BlockId, TaskId]] = []
        for block in reversed(self._blocks):
            costs = self._costs[block]
            is_head = block == self._head
            is_first = block == self._blocks[0] and not is_head
            # Gradients of a lookup need no weights.
            is_lookup = is_first and self._plan.block_shape(block).is_lookup
            weights = [] if is_lookup or is_head else self._fetch_weights(block, Pass.BACKWARD)
            while due:
                self.updates.gradient_ready(*due.pop())
            fetched = self._swap_in(block, swapped[block])
            after = [*weights, *fetched, previous]
            if costs.recompute_flops and not is_head and not is_first:
                previous = self.writer.write(
                    Lane.GPU,
                    block,
                    self._compute(block, ComputeKind.RECOMPUTE),
                    after=after,
                )
                after = [previous]
            returned = self._activation_returns(block)
            if not is_lookup:
                returned += self._weight_lease(block, Pass.FORWARD if is_head else Pass.BACKWARD)
            previous = self.writer.write(
                Lane.GPU,
                block,
                self._compute(block, ComputeKind.BACKWARD),
                after=after,
                leases=self.updates.gradients_on_gpu(block),
                returns=returned,
                fixed_seconds=self._system.rates.seconds_per_block_pass,
            )
            due.append((block, previous))
            if self._plan.workload.num_ranks == 1:
                self.updates.gradient_ready(*due.pop())
            # Among ranks the next block's weights come first: lists of peers keep their order, and
            # gradients must not hold back what compute waits for.
        while due:
            self.updates.gradient_ready(*due.pop())
        self._last_compute = previous
        self.updates.backward_done(previous)

    def _compute(self, block: BlockId, kind: ComputeKind) -> Compute:
        """All micro-batches of a block in one pass."""
        costs = self._costs[block]
        flops, launches = {
            ComputeKind.FORWARD: (costs.forward_flops, costs.forward_launches),
            ComputeKind.RECOMPUTE: (costs.recompute_flops, costs.recompute_launches),
            ComputeKind.BACKWARD: (costs.backward_flops, costs.backward_launches),
        }[kind]
        return Compute(kind, flops, num_launches=launches * self._plan.num_micro_batches)

    def _fetch_weights(self, block: BlockId, of_pass: Pass) -> list[TaskId]:
        """Bring P16 of a block to the GPU; returns what its compute must come after."""
        nbytes = self._weights[block]
        ready = self.updates.weights_ready(block, for_forward=of_pass is Pass.FORWARD)
        if self._system.home is Tier.GPU or nbytes == 0:
            return ready
        returns: tuple[Lease, ...] = ()
        is_fresh = of_pass is Pass.FORWARD and self.updates.is_fresh(block)
        if is_fresh:
            returns = (self.updates.take_fresh(block),)
        workload = self._plan.workload
        from_ssd = workload.slice_of(self._plan.ssd_weights_bytes(block, is_fresh=is_fresh))
        if from_ssd:
            # The update of a split state needs P16 too: then the slot is returned by the update.
            is_held = of_pass is Pass.BACKWARD and self.updates.reuses_backward_weights(block)
            pool = PoolName.HELD if is_held else PoolName.RING
            slot = Lease(pool, f"{block} {of_pass} s{self.writer.step}", from_ssd)
            read = self.writer.write(
                Lane.SSD_READ,
                block,
                Move(TensorKind.P16, Tier.SSD, Tier.RAM, from_ssd),
                after=ready,
                leases=(slot,),
                of_pass=of_pass,
                priority=(FOR_COMPUTE,),
            )
            ready = [read]
            if is_held:
                self.updates.hold(block, slot)
            else:
                returns += (slot,)
        if workload.num_ranks > 1:
            whole = Lease(PoolName.GATHERED, f"{block} {of_pass} s{self.writer.step}", nbytes)
            gather = self.writer.write(
                Lane.PEER,
                block,
                Move(TensorKind.P16, Tier.RAM, Tier.RAM, nbytes - workload.slice_of(nbytes)),
                after=ready,
                leases=(whole,),
                returns=returns,
                of_pass=of_pass,
            )
            ready, returns = [gather], (whole,)
        return self._copy_weights(block, of_pass, ready, returns, in_pieces=not from_ssd)

    def _copy_weights(
        self,
        block: BlockId,
        of_pass: Pass,
        ready: list[TaskId],
        returns: tuple[Lease, ...],
        *,
        in_pieces: bool,
    ) -> list[TaskId]:
        """P16 of a block RAM -> GPU, piece by piece where its update made it so."""
        pieces = piece_bytes(self._plan, block) if in_pieces else ()
        is_cut = bool(pieces) and len(pieces) == len(ready)
        pieces = pieces if is_cut else (self._weights[block],)
        copies: list[TaskId] = []
        for number, nbytes in enumerate(pieces):
            copies.append(
                self.writer.write(
                    Lane.RAM_TO_GPU,
                    block,
                    Move(TensorKind.P16, Tier.RAM, Tier.GPU, nbytes * self._weight_copies),
                    # The first piece leases for all, the last gives back: they keep their order.
                    after=[ready[number], *copies[-1:]] if is_cut else ready,
                    leases=self._weight_lease(block, of_pass) if number == 0 else (),
                    returns=returns if number == len(pieces) - 1 else (),
                    of_pass=of_pass,
                    piece=Piece(number, len(pieces)),
                    priority=(FOR_COMPUTE,),
                )
            )
        return copies

    def _weight_lease(self, block: BlockId, of_pass: Pass) -> tuple[Lease, ...]:
        if self._weights[block] == 0 or self._plan.home_of(block, TensorKind.P16) is Tier.GPU:
            return ()
        key = f"{block} {of_pass} s{self.writer.step}"
        return (Lease(PoolName.WEIGHTS, key, self._weights[block]),)

    def _activation_leases(self, block: BlockId) -> tuple[Lease, ...]:
        costs, step = self._costs[block], self.writer.step
        leases = []
        if costs.swapped_bytes:
            leases.append(self._moving_lease(block, "out"))
            # Outputs leave as they are made, so their places in RAM are taken beforehand.
            leases += self._ram_leases(block, "out")
        if costs.kept_bytes:
            leases.append(Lease(PoolName.KEPT, f"{block} s{step}", costs.kept_bytes))
        return tuple(leases)

    def _activation_returns(self, block: BlockId) -> tuple[Lease, ...]:
        costs, step = self._costs[block], self.writer.step
        leases = []
        if costs.swapped_bytes:
            leases.append(self._moving_lease(block, "in"))
            if self._plan.num_micro_batches > 1:
                leases += self._ram_leases(block, "in")
        if costs.kept_bytes:
            leases.append(Lease(PoolName.KEPT, f"{block} s{step}", costs.kept_bytes))
        return tuple(leases)

    def _swap_out(self, block: BlockId, computed: TaskId) -> list[TaskId]:
        """Activations of a block GPU -> RAM (-> SSD)."""
        costs = self._costs[block]
        if not costs.swapped_bytes:
            return []
        copy = self.writer.write(
            Lane.GPU_TO_RAM,
            block,
            Move(TensorKind.A16, Tier.GPU, Tier.RAM, costs.swapped_bytes * self._activation_copies),
            after=[computed],
            returns=(self._moving_lease(block, "out"),),
            priority=(FOR_COMPUTE,),
        )
        if not costs.to_ssd_bytes:
            return [copy]
        write = self.writer.write(
            Lane.SSD_WRITE,
            block,
            Move(TensorKind.A16, Tier.RAM, Tier.SSD, costs.to_ssd_bytes * self._plan.num_gpus),
            after=[copy],
            returns=tuple(
                lease for lease in self._ram_leases(block, "out") if lease.pool is PoolName.SPILLING
            ),
            priority=(FOR_COMPUTE,),
        )
        return [copy, write]

    def _swap_in(self, block: BlockId, swapped: list[TaskId]) -> list[TaskId]:
        """Activations of a block (SSD ->) RAM -> GPU."""
        costs = self._costs[block]
        if not costs.swapped_bytes:
            return swapped
        after = swapped
        if costs.to_ssd_bytes:
            read = self.writer.write(
                Lane.SSD_READ,
                block,
                Move(TensorKind.A16, Tier.SSD, Tier.RAM, costs.to_ssd_bytes * self._plan.num_gpus),
                after=after,
                leases=tuple(
                    lease
                    for lease in self._ram_leases(block, "in")
                    if lease.pool is PoolName.SPILLING
                ),
                priority=(FOR_COMPUTE,),
            )
            after = [*after, read]
        # Of several micro-batches only the first comes ahead; the others when its place is free,
        # so that RAM is needed until the last one has gone backward.
        is_alone = self._plan.num_micro_batches == 1
        copy = self.writer.write(
            Lane.RAM_TO_GPU,
            block,
            Move(TensorKind.A16, Tier.RAM, Tier.GPU, costs.swapped_bytes * self._activation_copies),
            after=after,
            leases=(self._moving_lease(block, "in"),),
            returns=self._ram_leases(block, "in") if is_alone else (),
            priority=(FOR_COMPUTE,),
        )
        return [copy]

    def _moving_lease(self, block: BlockId, way: str) -> Lease:
        nbytes = self.writer.moving_bytes(self._costs[block].swapped_bytes)
        return Lease(PoolName.MOVING, f"{block} {way} s{self.writer.step}", nbytes)

    def _ram_leases(self, block: BlockId, way: str) -> tuple[Lease, ...]:
        """RAM of swapped outputs on one of their ways: what stays there, and what SSD takes."""
        costs, step = self._costs[block], self.writer.step
        leases = []
        if costs.to_ram_bytes:
            nbytes = costs.to_ram_bytes * self._plan.num_gpus
            leases.append(Lease(PoolName.SWAPPED, f"{block} s{step}", nbytes))
        if costs.to_ssd_bytes:
            nbytes = costs.to_ssd_bytes * self._plan.num_gpus
            leases.append(Lease(PoolName.SPILLING, f"{block} {way} s{step}", nbytes))
        return tuple(leases)
