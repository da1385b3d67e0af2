"""How gradients leave the GPU: to RAM, added up over the GPUs, and on to SSD where they spill.

Owns the G16 tasks and their leases. A gradient for weights that another block owns waits for that
owner's update. Called by `updates`, which decides what happens to them then.
"""

from collections.abc import Iterable

from lohan.plan.plan import Plan
from lohan.plan.pools import (
    part_parameters,
    tied_trained,
    trained_parameters,
    update_parts,
    waiting_bytes,
)
from lohan.plan.system import UpdateTiming
from lohan.schedule.task import Compute, Lease, Move, Piece
from lohan.schedule.writer import FOR_COMPUTE, FOR_STATES, TaskWriter
from lohan.vocabulary import BlockId, ComputeKind, Lane, PoolName, TaskId, TensorKind, Tier


def piece_bytes(plan: Plan, block: BlockId) -> tuple[int, ...]:
    """Bytes of the pieces in which a block's gradients and weights are copied; none: as a whole.

    The first block's gradients are the last to come and its weights the first to be needed, so they
    go in the pieces of its update: copy, update and copy back then overlap.
    """
    shape = plan.block_shape(block)
    if (
        block != 0
        or plan.system.update_timing is not UpdateTiming.UNDER_NEXT_FORWARD
        or plan.system.spills_gradients
        or plan.workload.reduction_groups > 1
        or shape.num_frozen_parameters
        or plan.shape.num_blocks == 1
    ):
        return ()
    trained = trained_parameters(plan.shape)
    largest = part_parameters(max(trained), plan.num_update_parts)
    return tuple(count * plan.shape.dtype_bytes for count in update_parts(trained[block], largest))


class GradientTasks:
    """Writes the gradient tasks of each block, and remembers them for one step."""

    def __init__(self, plan: Plan, writer: TaskWriter) -> None:
        self._plan, self._system, self._writer = plan, plan.system, writer
        workload = plan.workload
        self._own = [waiting_bytes(workload, count) for count in trained_parameters(plan.shape)]
        self._shared: dict[BlockId, list[tuple[BlockId, int]]] = {}
        for owner, other, count in tied_trained(plan.shape):
            nbytes = waiting_bytes(workload, count)
            self._shared.setdefault(BlockId(other), []).append((BlockId(owner), nbytes))
        self._ready: dict[BlockId, list[TaskId]] = {}
        self._arrived: list[TaskId] = []

    def leave(self, block: BlockId, computed: TaskId) -> None:
        """Write what brings a block's gradients to where its update takes them from."""
        nbytes = self._writer.gradients[block]
        if nbytes == 0:
            return
        if self._system.home is Tier.GPU:
            self._ready[block] = [computed]
            self._arrived.append(computed)
            return
        step = self._writer.step
        waiting = self.waiting(block, step)
        for owner, _ in self._shared.get(block, ()):
            waiting += self.shared(block, owner, step)
        if self._plan.workload.reduction_groups > 1:
            self._leave_groups(block, computed, waiting)
            return
        rates = self._system.rates
        is_gathered = rates.shares_host_link and not rates.partitions_over_gpus
        copies = self._plan.num_gpus if is_gathered else 1
        pieces = piece_bytes(self._plan, block) or (nbytes,)
        before: list[TaskId] = []
        for number, one_bytes in enumerate(pieces):
            piece = Piece(number, len(pieces))
            task = self._writer.write(
                Lane.GPU_TO_RAM,
                block,
                Move(TensorKind.G16, Tier.GPU, Tier.RAM, one_bytes * copies),
                # The first piece leases for all, the last gives back: they keep their order.
                after=[computed, *before],
                leases=waiting if number == 0 else (),
                returns=self.on_gpu(block, step) if number == len(pieces) - 1 else (),
                priority=(FOR_STATES,),
                piece=piece,
            )
            before = [task]
            if self._plan.num_gpus > 1 and not rates.partitions_over_gpus:
                count = one_bytes // self._plan.shape.dtype_bytes * (self._plan.num_gpus - 1)
                reduce = Compute(ComputeKind.REDUCE, num_parameters=count)
                task = self._writer.write(Lane.CPU, block, reduce, after=[task], piece=piece)
            self._arrived.append(task)
            if self._system.spills_gradients:
                task = self._writer.write(
                    Lane.SSD_WRITE,
                    block,
                    Move(TensorKind.G16, Tier.RAM, Tier.SSD, nbytes),
                    after=[task],
                    returns=waiting,
                    priority=(FOR_COMPUTE,),
                )
            self._ready.setdefault(block, []).append(task)

    def _leave_groups(self, block: BlockId, computed: TaskId, waiting: tuple[Lease, ...]) -> None:
        """Gradients of the rank's groups go to RAM and, slice by slice, to the ranks that own them,
        which add up those of all groups."""
        workload, step = self._plan.workload, self._writer.step
        nbytes = self._writer.gradients[block] * workload.groups_per_rank
        held = Lease(PoolName.EXCHANGED, f"{block} out s{step}", nbytes)
        task = self._writer.write(
            Lane.GPU_TO_RAM,
            block,
            Move(TensorKind.G16, Tier.GPU, Tier.RAM, nbytes),
            after=[computed],
            leases=(held,),
            returns=self.on_gpu(block, step),
            priority=(FOR_STATES,),
        )
        if workload.num_ranks > 1:
            arrived = Lease(PoolName.EXCHANGED, f"{block} in s{step}", nbytes)
            task = self._writer.write(
                Lane.PEER,
                block,
                Move(TensorKind.G16, Tier.RAM, Tier.RAM, nbytes - workload.slice_of(nbytes)),
                after=[task],
                leases=(arrived,),
                returns=(held,),
            )
            held = arrived
        count = nbytes // self._plan.shape.dtype_bytes
        task = self._writer.write(
            Lane.CPU,
            block,
            Compute(ComputeKind.REDUCE, num_parameters=count),
            after=[task],
            leases=waiting,
            returns=(held,),
            priority=(FOR_STATES,),
        )
        self._arrived.append(task)
        if self._system.spills_gradients:
            spilled = sum(lease.nbytes for lease in waiting)
            task = self._writer.write(
                Lane.SSD_WRITE,
                block,
                Move(TensorKind.G16, Tier.RAM, Tier.SSD, spilled),
                after=[task],
                returns=waiting,
                priority=(FOR_COMPUTE,),
            )
        self._ready[block] = [task]

    def of(self, block: BlockId) -> list[TaskId]:
        """Tasks after which a block's gradients are where its update takes them from."""
        return self._ready.get(block, [])

    def in_ram(self) -> list[TaskId]:
        """Tasks after which every gradient of the step has been in RAM."""
        return self._arrived

    def blocks(self) -> Iterable[BlockId]:
        """Blocks with gradients, in the order they came."""
        return self._ready

    def clear(self) -> None:
        """Forget the step."""
        self._ready, self._arrived = {}, []

    def on_gpu(self, block: BlockId, step: int) -> tuple[Lease, ...]:
        """G16 of a block on the GPU."""
        nbytes = self._writer.gradients[block] * self._plan.workload.groups_per_rank
        return (Lease(PoolName.GRADIENTS, f"{block} s{step}", nbytes),) if nbytes else ()

    def waiting(self, block: BlockId, step: int) -> tuple[Lease, ...]:
        """G16 of a block's own parameters, waiting in RAM for their update."""
        nbytes = self._own[block]
        return (Lease(PoolName.WAITING, f"{block} s{step}", nbytes),) if nbytes else ()

    def shared(self, block: BlockId, owner: BlockId, step: int) -> tuple[Lease, ...]:
        """G16 that a block made for weights of another one, waiting in RAM for its update."""
        return tuple(
            Lease(PoolName.WAITING, f"{block} for {owner} s{step}", nbytes)
            for shared_with, nbytes in self._shared.get(block, ())
            if shared_with == owner
        )
