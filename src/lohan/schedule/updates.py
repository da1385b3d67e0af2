"""The update half of a step: gradients leave the GPU, states come in, are updated, and go back.

Owns when an update may run (the plan's UpdateTiming), what it reads and writes, and after what the
newest weights may be read. `build` tells it when gradients are ready and when a block is about to
go forward: a deferred update is written there, in front of the forward pass that needs it, so that
the order of writing stays an order in which everything could run one by one.
"""

from functools import partial

from lohan.plan.plan import Plan
from lohan.plan.pools import part_parameters, tied_trained, update_parts, updated_parameters
from lohan.plan.system import UpdateTiming
from lohan.schedule.due_update import DueUpdate, LateWrite, StatePart, bytes_per_parameter
from lohan.schedule.gradients import GradientTasks, piece_bytes
from lohan.schedule.task import Compute, Lease, Move, Piece
from lohan.schedule.writer import FOR_COMPUTE, FOR_STATES, TaskWriter
from lohan.vocabulary import BlockId, ComputeKind, Lane, PoolName, TaskId, TensorKind, Tier

_TOUCHED_BYTES_PER_UPDATE = 28


class UpdateTasks:
    """Writes the update tasks of each block when its gradients are ready."""

    def __init__(self, plan: Plan, writer: TaskWriter) -> None:
        self._plan, self._system, self._writer = plan, plan.system, writer
        self._gradients = GradientTasks(plan, writer)
        self._trained = updated_parameters(plan.shape, plan.workload)
        self._largest_part = part_parameters(max(self._trained), plan.num_update_parts)
        self._sharers: dict[BlockId, list[tuple[BlockId, int]]] = {}
        self._owners: dict[BlockId, list[BlockId]] = {}
        for owner, other, count in tied_trained(plan.shape):
            self._sharers.setdefault(BlockId(owner), []).append((BlockId(other), count))
            self._owners.setdefault(BlockId(other), []).append(BlockId(owner))
        self._updated: dict[BlockId, list[TaskId]] = {}
        self._written: dict[BlockId, list[TaskId]] = {}
        self._fresh: dict[BlockId, Lease] = {}
        self._held: dict[BlockId, Lease] = {}
        self._deferred: dict[BlockId, DueUpdate] = {}
        self._put_off: dict[BlockId, list[StatePart]] = {}
        self._read_ahead: dict[tuple[BlockId, int], TaskId] = {}
        self._last_write: TaskId | None = None
        self._late_write: LateWrite | None = None

    # What the builder asks -------------------------------------------------------------------

    def weights_ready(self, block: BlockId, *, for_forward: bool) -> list[TaskId]:
        """Tasks after which the newest P16 a block computes with may be fetched."""
        ready = []
        for owner in (block, *self._owners.get(block, ())):
            is_on_ssd = self._plan.home_of(owner, TensorKind.P16) is Tier.SSD
            is_fresh = for_forward and owner == block and block in self._fresh
            tasks = self._written if is_on_ssd and not is_fresh else self._updated
            ready += tasks.get(owner, [])
        return ready

    def is_fresh(self, block: BlockId) -> bool:
        """Whether the block's newest P16 waits in RAM, straight from its update."""
        return block in self._fresh

    def take_fresh(self, block: BlockId) -> Lease:
        """The lease of P16 that came straight from the update; it is given up here."""
        return self._fresh.pop(block)

    def reuses_backward_weights(self, block: BlockId) -> bool:
        """Whether the update takes P16 from the copy the backward pass read."""
        return bool(
            self._trained[block]
            and self._system.state.needs_weights_to_update
            and self._plan.home_of(block, TensorKind.P16) is Tier.SSD
            and not self._is_deferred(block)
        )

    def gradients_on_gpu(self, block: BlockId) -> tuple[Lease, ...]:
        """The lease of the gradients that a block's backward pass makes."""
        return self._gradients.on_gpu(block, self._writer.step)

    def hold(self, block: BlockId, lease: Lease) -> None:
        """Keep the backward pass's P16 in RAM until the update has used it."""
        self._held[block] = lease

    # What the builder tells ------------------------------------------------------------------

    def before_forward(self, block: BlockId) -> None:
        """A block is about to go forward: its deferred update of the step before comes first."""
        update = self._deferred.pop(block, None)
        if update is not None:
            self._write_update(update)

    def gradient_ready(self, block: BlockId, computed: TaskId) -> None:
        """The backward pass of a block is done: its gradients leave, its update follows."""
        self._gradients.leave(block, computed)
        if self._trained[block] and self._runs_under_backward(block):
            self._write_update(
                DueUpdate(block=block, step=self._writer.step, gradients=self._needed(block))
            )

    def backward_done(self, last: TaskId) -> None:
        """Every gradient exists: updates that had to wait for that come now or are deferred."""
        norm: tuple[TaskId, ...] = ()
        if self._plan.workload.clips_gradients:
            norm = (
                self._writer.write(
                    Lane.PEER if self._plan.workload.num_ranks > 1 else Lane.CPU,
                    BlockId(0),
                    Compute(ComputeKind.NORM),
                    after=self._gradients.in_ram(),
                    priority=(FOR_STATES,),
                ),
            )
        elif self._system.update_timing is UpdateTiming.AFTER_BACKWARD:
            norm = (last,)
        waiting = [
            block
            for block in self._gradients.blocks()
            if self._trained[block] and not self._runs_under_backward(block)
        ]
        is_deferred = self._system.update_timing is UpdateTiming.UNDER_NEXT_FORWARD
        for block in sorted(waiting) if is_deferred else waiting:
            update = DueUpdate(
                block=block, step=self._writer.step, gradients=self._needed(block), norm=norm
            )
            if is_deferred and not self._writer.is_last_step:
                self._deferred[block] = update
            else:
                self._write_update(update)
        self._gradients.clear()
        self._flush_write(None)
        self._last_write = None
        self._write_reads_ahead()

    def write_deferred(self) -> None:
        """No forward pass follows for now: updates that were put off to it come at once."""
        for block in sorted(self._deferred):
            self._write_update(self._deferred.pop(block))
        self._flush_write(None)

    # How an update is spelled ----------------------------------------------------------------

    def _needed(self, block: BlockId) -> tuple[TaskId, ...]:
        """What an update's gradient consists of: the block's own and those of shared weights."""
        blocks = [block, *(other for other, _ in self._sharers.get(block, ()))]
        return tuple(task for one in blocks for task in self._gradients.of(one))

    def _is_deferred(self, block: BlockId) -> bool:
        return self._plan.workload.clips_gradients or self._plan.blocks[block].defers_update

    def _runs_under_backward(self, block: BlockId) -> bool:
        if self._system.update_timing is UpdateTiming.AFTER_BACKWARD:
            return False
        return not self._is_deferred(block)

    def _bytes_per_parameter(self, block: BlockId) -> tuple[float, int]:
        shared = sum(
            self._plan.workload.slice_of(count) for _, count in self._sharers.get(block, ())
        )
        return bytes_per_parameter(
            self._plan,
            block,
            has_weights=block in self._held,
            shared_share=shared / self._trained[block],
        )

    def _write_update(self, update: DueUpdate) -> None:
        block = update.block
        if self._system.home is Tier.GPU:
            task = self._writer.write(
                Lane.GPU,
                block,
                Compute(
                    ComputeKind.UPDATE,
                    num_parameters=self._trained[block],
                    touched_bytes=self._trained[block] * _TOUCHED_BYTES_PER_UPDATE,
                ),
                after=[*update.gradients, *update.norm],
                returns=self._gpu_gradients(update),
                step=update.step,
            )
            self._updated[block] = [task]
            return
        parts = self._parts(update)
        before = self._written.get(block, [])
        updated: list[TaskId] = []
        self._written[block] = []
        for number, part in enumerate(parts):
            after = [*self._gradients_of_part(update, number, len(parts)), *update.norm]
            if self._system.update_tier is Tier.RAM:
                after += updated[-1:]  # The first part leases for all, the last gives back.
            if part.read_bytes:
                read = self._read_ahead.pop((block, number), None)
                if read is None:
                    read = self._read(update, part, before)
                    self._flush_write(read)
                after.append(read)
            updated.append(
                self._compute(
                    update,
                    part,
                    after,
                    leases=self._leases(update, part),
                    returns=self._returns(update, part, is_last=number == len(parts) - 1),
                )
            )
            if part.written_bytes:
                self._flush_write(None)
                self._late_write = LateWrite(update=update, part=part, computed=updated[-1])
                if self._system.update_timing is not UpdateTiming.PIPELINED:
                    self._flush_write(None)
        self._updated[block] = updated

    def _parts(self, update: DueUpdate) -> list[StatePart]:
        if update.block in self._put_off:
            return self._put_off.pop(update.block)
        counts = update_parts(self._trained[update.block], self._largest_part)
        read, written = self._bytes_per_parameter(update.block)
        return [
            StatePart(
                piece=Piece(number, len(counts)),
                num_parameters=count,
                read_bytes=round(count * read),
                written_bytes=round(count * written),
                slot_key=f"{update.block} {number} s{update.step}",
            )
            for number, count in enumerate(counts)
        ]

    def _read(self, update: DueUpdate, part: StatePart, before: list[TaskId]) -> TaskId:
        """States of a part come in, after the step before has written them."""
        return self._writer.write(
            Lane.SSD_READ,
            update.block,
            Move(TensorKind.OS32, Tier.SSD, Tier.RAM, part.read_bytes),
            after=[*before, *self._before_read(update)],
            leases=(part.slot,),
            piece=part.piece,
            priority=self._priority(update),
            step=update.step,
        )

    def _write_reads_ahead(self) -> None:
        """The first states that deferred updates need, as many as there are slots for.

        They are needed whatever comes next, a step or the end, so they are tasks of this step: a
        run that does not know its next step yet reads them under the backward pass. One slot stays
        free, so that whatever is written down before these updates still finds its room.
        """
        parts = {block: self._parts(update) for block, update in self._deferred.items()}
        self._put_off = dict(parts)
        largest = max((one.slot.nbytes for found in parts.values() for one in found), default=0)
        room = self._writer.pools[PoolName.STATES].capacity_bytes - largest
        for block, update in self._deferred.items():
            for part in parts[block]:
                if not part.read_bytes:
                    continue
                room -= part.slot.nbytes
                if room < 0:
                    return
                before = self._written.get(block, [])
                self._read_ahead[block, part.piece.number] = self._read(update, part, before)

    def _gpu_gradients(self, update: DueUpdate) -> tuple[Lease, ...]:
        """G16 on the GPU that an update there uses up: its own, and of blocks that only share."""
        leases = self._gradients.on_gpu(update.block, update.step)
        for other, _ in self._sharers.get(update.block, ()):
            if not self._trained[other]:
                leases += self._gradients.on_gpu(other, update.step)
        return leases

    def _gradients_of_part(
        self, update: DueUpdate, part: int, num_parts: int
    ) -> tuple[TaskId, ...]:
        """The gradients one part needs: its own piece where they came in pieces, else all."""
        if piece_bytes(self._plan, update.block):
            # Behind the pieces stand those of blocks that share the weights.
            return (update.gradients[part], *update.gradients[num_parts:])
        return update.gradients

    def _leases(self, update: DueUpdate, part: StatePart) -> tuple[Lease, ...]:
        """What the computation of one part needs beside what its read has leased."""
        has_own = part.written_bytes and not part.read_bytes
        block, leases = update.block, (part.slot,) if has_own else ()
        # After the last step no forward pass takes the weights: they only go to their home.
        comes_fresh = (
            part.piece.number == 0
            and self._system.update_timing is UpdateTiming.UNDER_NEXT_FORWARD
            and self._is_deferred(block)
            and self._plan.home_of(block, TensorKind.P16) is Tier.SSD
            and self._writer.step > update.step
        )
        if comes_fresh:
            nbytes = self._trained[block] * self._system.state.weights_bytes
            self._fresh[block] = Lease(PoolName.FRESH, f"{block} s{update.step}", nbytes)
            return (*leases, self._fresh[block])
        return leases

    def _returns(self, update: DueUpdate, part: StatePart, *, is_last: bool) -> tuple[Lease, ...]:
        """What the computation of one part gives back: all but what is still to be written."""
        block = update.block
        is_only_read = part.read_bytes and not part.written_bytes
        returns: tuple[Lease, ...] = (part.slot,) if is_only_read else ()
        if not is_last:
            return returns
        if not self._system.spills_gradients:
            # A spilled gradient came back in the slot of the states.
            returns += self._gradients.waiting(block, update.step)
            for other, _ in self._sharers.get(block, ()):
                returns += self._gradients.shared(other, block, update.step)
        if block in self._held:
            returns += (self._held.pop(block),)
        return returns

    def _flush_write(self, read: TaskId | None) -> None:
        """Write the pending W: behind R of the next block, so that the drives read first."""
        late, self._late_write = self._late_write, None
        if late is None:
            return
        write = self._writer.write(
            Lane.SSD_WRITE,
            late.update.block,
            Move(TensorKind.OS32, Tier.RAM, Tier.SSD, late.part.written_bytes),
            after=[late.computed, *([read] if read is not None else [])],
            returns=(late.part.slot,),
            piece=late.part.piece,
            priority=(FOR_STATES,),
            step=late.update.step,
        )
        self._written[late.update.block].append(write)
        self._last_write = write

    def _priority(self, update: DueUpdate) -> tuple[int, ...]:
        """As they are listed; but compute waits for the first block before anything else."""
        is_first = update.block == 0
        if is_first and self._system.update_timing is UpdateTiming.UNDER_NEXT_FORWARD:
            return (FOR_COMPUTE,)
        return (FOR_STATES,)

    def _before_read(self, update: DueUpdate) -> list[TaskId]:
        """What a state read comes after, beside the write of the step before."""
        timing = self._system.update_timing
        if timing is UpdateTiming.UNDER_NEXT_FORWARD:
            # Reading needs neither gradient nor norm, only a slot; a spilled gradient it does.
            return list(update.gradients) if self._system.spills_gradients else []
        if update.norm:
            return list(update.norm)
        if timing is UpdateTiming.NAIVE and self._last_write is not None:
            return [*update.gradients, self._last_write]
        return list(update.gradients)

    def _compute(
        self,
        update: DueUpdate,
        part: StatePart,
        after: list[TaskId],
        *,
        leases: tuple[Lease, ...],
        returns: tuple[Lease, ...],
    ) -> TaskId:
        block, num_parameters = update.block, part.num_parameters
        write = partial(self._writer.write, piece=part.piece, step=update.step)
        if self._system.update_tier is Tier.RAM:
            return write(
                Lane.CPU,
                block,
                Compute(ComputeKind.UPDATE, num_parameters=num_parameters),
                after=after,
                leases=leases,
                returns=returns,
                priority=self._priority(update),
            )
        nbytes = num_parameters * self._system.state.stored_bytes
        move = Move(TensorKind.OS32, Tier.RAM, Tier.GPU, nbytes)
        up = write(Lane.RAM_TO_GPU, block, move, after=after, leases=leases)
        work = Compute(
            ComputeKind.UPDATE,
            num_parameters=num_parameters,
            touched_bytes=num_parameters * _TOUCHED_BYTES_PER_UPDATE,
        )
        compute = write(Lane.GPU, block, work, after=[up])
        move = Move(TensorKind.OS32, Tier.GPU, Tier.RAM, nbytes)
        return write(Lane.GPU_TO_RAM, block, move, after=[compute], returns=returns)
