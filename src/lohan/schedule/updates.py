"""The update half of a step: gradients leave the GPU, states come in, are updated, and go back.

Owns when an update may run (the plan's UpdateTiming), what it reads and writes, and how the next
forward pass gets its weights. `build` tells it when gradients are ready.
"""

from collections.abc import Iterator

from lohan.plan.plan import Plan
from lohan.plan.system import UpdateTiming
from lohan.schedule.task import Compute, Lease, Move
from lohan.schedule.writer import TaskWriter
from lohan.vocabulary import BlockId, ComputeKind, Lane, TaskId, TensorKind, Tier

FOR_COMPUTE = 0
FOR_STATES = 1
"""Smaller goes first where a lane's order is open: what compute waits for, then the states."""


class UpdateTasks:
    """Writes the update tasks of each block when its gradients are ready."""

    def __init__(self, plan: Plan, writer: TaskWriter) -> None:
        self._plan, self._system, self._writer = plan, plan.system, writer
        self._ready: dict[BlockId, list[TaskId]] = {}
        self._fresh: set[BlockId] = set()
        self._held: dict[BlockId, Lease] = {}
        self._gradients: dict[BlockId, list[TaskId]] = {}
        self._previous_write: TaskId | None = None
        self._unordered_write: tuple[BlockId, TaskId] | None = None

    # What the builder asks -------------------------------------------------------------------

    def weights_ready(self, block: BlockId) -> list[TaskId]:
        """Tasks after which the newest P16 of a block may be read."""
        return self._ready.get(self._owner(block), [])

    def is_fresh(self, block: BlockId) -> bool:
        """Whether the block's newest P16 is in RAM, straight from its update."""
        return block in self._fresh

    def fresh_lease(self, block: BlockId) -> tuple[Lease, ...]:
        """The lease of P16 that came straight from the update; it is given up here."""
        self._fresh.discard(block)
        return (Lease("fresh", f"{block} s{self._writer.step - 1}", self._writer.weights[block]),)

    def reuses_backward_weights(self, block: BlockId) -> bool:
        """Whether the update takes P16 from the copy the backward pass read."""
        return (
            self._system.state.needs_weights_to_update
            and self._plan.home_of(block, TensorKind.P16) is Tier.SSD
            and not self._is_deferred(block)
        )

    def hold(self, block: BlockId, lease: Lease) -> None:
        """Keep the backward pass's P16 in RAM until the update has used it."""
        self._held[block] = lease

    def gradient_ready(self, block: BlockId, computed: TaskId) -> None:
        """The backward pass of a block is done: its gradients leave, its update follows."""
        nbytes = self._writer.weights[block]
        if nbytes == 0:
            return
        if self._system.update_tier is Tier.GPU and self._system.home is Tier.GPU:
            self._gradients[block] = [computed]
        else:
            self._gradients[block] = self._gradient_out(block, computed, nbytes)
        if self._runs_under_backward(block):
            self._write_update(block)

    def backward_done(self, last: TaskId) -> None:
        """Every gradient exists: write the updates that had to wait for that."""
        waiting = [block for block in self._gradients if not self._runs_under_backward(block)]
        norm = [last]
        if self._plan.workload.clips_gradients:
            norm = [
                self._writer.write(
                    Lane.CPU,
                    BlockId(0),
                    Compute(ComputeKind.NORM),
                    after=[task for tasks in self._gradients.values() for task in tasks],
                    priority=(FOR_STATES,),
                )
            ]
        # In the order the next forward pass needs them, or as the gradients came.
        if self._system.update_timing is UpdateTiming.UNDER_NEXT_FORWARD:
            waiting.sort()
        for block in waiting:
            self._write_update(block, norm)
        self._gradients.clear()
        self._previous_write = self._unordered_write = None

    # How an update is spelled ----------------------------------------------------------------

    def _owner(self, block: BlockId) -> BlockId:
        return next((o for o, other, _ in self._tied() if other == block), block)

    def _tied(self) -> Iterator[tuple[BlockId, BlockId, int]]:
        for owner, other, num_parameters in self._plan.shape.tied:
            yield BlockId(owner), BlockId(other), num_parameters

    def _is_deferred(self, block: BlockId) -> bool:
        return self._plan.workload.clips_gradients or self._plan.blocks[block].defers_update

    def _runs_under_backward(self, block: BlockId) -> bool:
        if self._system.update_timing is UpdateTiming.AFTER_BACKWARD:
            return False
        # A tied block's gradient is complete only with its owner's, at the end of the pass.
        return not self._is_deferred(block)

    def _gradient_out(self, block: BlockId, computed: TaskId, nbytes: int) -> list[TaskId]:
        copies = self._plan.num_gpus if self._system.rates.shares_host_link else 1
        if self._system.rates.partitions_over_gpus:
            copies = 1
        out = self._writer.write(
            Lane.GPU_TO_RAM,
            block,
            Move(TensorKind.G16, Tier.GPU, Tier.RAM, nbytes * copies),
            after=[computed],
            leases=self._ram_gradient(block),
            returns=self._writer.gradient_lease(block, Tier.GPU),
            priority=(FOR_STATES,),
        )
        tasks = [out]
        if self._plan.num_gpus > 1 and not self._system.rates.partitions_over_gpus:
            reduce = Compute(
                ComputeKind.REDUCE, num_parameters=nbytes // 2 * (self._plan.num_gpus - 1)
            )
            tasks = [self._writer.write(Lane.CPU, block, reduce, after=tasks)]
        if self._system.spills_gradients:
            spill = Move(TensorKind.G16, Tier.RAM, Tier.SSD, nbytes)
            tasks = [
                self._writer.write(
                    Lane.SSD_WRITE,
                    block,
                    spill,
                    after=tasks,
                    returns=self._ram_gradient(block),
                    priority=(FOR_COMPUTE,),
                )
            ]
        return tasks

    def _ram_gradient(self, block: BlockId) -> tuple[Lease, ...]:
        """G16 waiting in RAM; gradients of weights that a block only shares go to their owner."""
        if not self._plan.block_shape(block).num_parameters:
            return ()
        return self._writer.gradient_lease(block, Tier.RAM)

    def _update_bytes(self, block: BlockId, num_parameters: int) -> tuple[int, int]:
        """Bytes read from SSD and written to it by the update of a block."""
        state = self._system.state
        by_kind = {
            TensorKind.P16: state.weights_bytes,
            TensorKind.P32: state.master_bytes,
            TensorKind.OS32: state.moments_bytes,
        }
        stored = {
            kind: nbytes
            for kind, nbytes in by_kind.items()
            if self._plan.home_of(block, kind) is Tier.SSD
        }
        written = sum(stored.values())
        read = written - stored.get(TensorKind.P16, 0)
        if state.needs_weights_to_update and block not in self._held:
            read += stored.get(TensorKind.P16, 0)
        if self._system.spills_gradients:
            read += 2
        return read * num_parameters, written * num_parameters

    def _write_update(self, block: BlockId, norm: list[TaskId] | None = None) -> None:
        system, writer, plan = self._system, self._writer, self._plan
        num_parameters = plan.block_shape(block).num_parameters
        if num_parameters == 0:
            # Only tied weights: they are updated with their owner.
            return
        gradients = [*self._gradients[block], *(norm or [])]
        if system.home is Tier.GPU:
            task = writer.write(
                Lane.GPU,
                block,
                Compute(ComputeKind.UPDATE, touched_bytes=num_parameters * 28),
                after=gradients,
                returns=writer.gradient_lease(block, Tier.GPU),
            )
            self._ready[block] = [task]
            return
        read_bytes, written_bytes = self._update_bytes(block, num_parameters)
        num_parts = plan.num_update_parts if read_bytes + written_bytes else 1
        parts_ready: list[TaskId] = []
        is_deferred = system.update_timing is UpdateTiming.UNDER_NEXT_FORWARD and (
            self._is_deferred(block)
        )
        # After the last step no forward pass takes the weights: they only go to their home.
        comes_fresh = (
            is_deferred
            and plan.home_of(block, TensorKind.P16) is Tier.SSD
            and not writer.is_last_step
        )
        last_computes: list[TaskId] = []
        for part in range(num_parts):
            label = f"{part + 1}/{num_parts}" if num_parts > 1 else ""
            share = [nbytes // num_parts for nbytes in (read_bytes, written_bytes)]
            is_last = part == num_parts - 1
            if is_last:
                share = [
                    nbytes - nbytes // num_parts * (num_parts - 1)
                    for nbytes in (read_bytes, written_bytes)
                ]
            parameters = num_parameters // num_parts
            slot = Lease("states", f"{block} {part} s{writer.step}", max(*share, 1))
            after = self._before_read(block, gradients, norm)
            if share[0]:
                read = writer.write(
                    Lane.SSD_READ,
                    block,
                    Move(TensorKind.OS32, Tier.SSD, Tier.RAM, share[0]),
                    after=after,
                    leases=(slot,),
                    part=label,
                    priority=self._state_priority(block),
                )
                if self._unordered_write is not None:
                    self._order_write_after(read)
                ready_to_compute = [read, *gradients]
            else:
                ready_to_compute = gradients
            returns: tuple[Lease, ...] = ()
            if is_last:
                # A spilled gradient comes back in the slot of the states.
                returns = () if system.spills_gradients else self._ram_gradient(block)
                if block in self._held:
                    returns += (self._held.pop(block),)
            computed = self._compute(
                block,
                parameters,
                ready_to_compute,
                returns=returns if share[1] else returns + ((slot,) if share[0] else ()),
                fresh=comes_fresh and part == 0,
                label=label,
            )
            last_computes.append(computed)
            if share[1]:
                write = writer.write(
                    Lane.SSD_WRITE,
                    block,
                    Move(TensorKind.OS32, Tier.RAM, Tier.SSD, share[1]),
                    after=[computed],
                    leases=() if share[0] else (slot,),
                    returns=(slot,),
                    part=label,
                    priority=(FOR_STATES,),
                )
                parts_ready.append(write)
                self._previous_write = write
                if system.update_timing is UpdateTiming.PIPELINED:
                    self._unordered_write = (block, write)
        if comes_fresh:
            self._fresh.add(block)
            self._ready[block] = last_computes
        elif plan.home_of(block, TensorKind.P16) is Tier.SSD:
            self._ready[block] = parts_ready
        else:
            self._ready[block] = last_computes

    def _state_priority(self, block: BlockId) -> tuple[int, ...]:
        """Under the next forward pass the first blocks are needed first; else as they come."""
        if self._system.update_timing is UpdateTiming.UNDER_NEXT_FORWARD:
            return (FOR_STATES, self._writer.step, block)
        return (FOR_STATES,)

    def _before_read(
        self, block: BlockId, gradients: list[TaskId], norm: list[TaskId] | None
    ) -> list[TaskId]:
        """What a state read comes after."""
        timing = self._system.update_timing
        if norm is not None or timing is UpdateTiming.AFTER_BACKWARD:
            return list(norm or gradients)
        if timing is UpdateTiming.NAIVE and self._previous_write is not None:
            return [*gradients, self._previous_write]
        return gradients

    def _order_write_after(self, read: TaskId) -> None:
        """W[i] comes after R[i-1]: the drives read for the next block before they write."""
        assert self._unordered_write is not None
        self._writer.add_edge(self._unordered_write[1], read)
        self._unordered_write = None

    def _compute(
        self,
        block: BlockId,
        num_parameters: int,
        after: list[TaskId],
        *,
        returns: tuple[Lease, ...],
        fresh: bool,
        label: str,
    ) -> TaskId:
        writer, system = self._writer, self._system
        leases: tuple[Lease, ...] = ()
        if fresh:
            leases = (Lease("fresh", f"{block} s{writer.step}", writer.weights[block]),)
        if system.update_tier is Tier.RAM:
            return writer.write(
                Lane.CPU,
                block,
                Compute(ComputeKind.UPDATE, num_parameters=num_parameters),
                after=after,
                leases=leases,
                returns=returns,
                part=label,
                priority=self._state_priority(block),
            )
        up = writer.write(
            Lane.RAM_TO_GPU,
            block,
            Move(TensorKind.OS32, Tier.RAM, Tier.GPU, num_parameters * system.state.stored_bytes),
            after=after,
            part=label,
        )
        compute = writer.write(
            Lane.GPU,
            block,
            Compute(ComputeKind.UPDATE, touched_bytes=num_parameters * 28),
            after=[up],
            part=label,
        )
        return writer.write(
            Lane.GPU_TO_RAM,
            block,
            Move(TensorKind.OS32, Tier.GPU, Tier.RAM, num_parameters * system.state.stored_bytes),
            after=[compute],
            returns=returns,
            part=label,
        )
