"""What is made anew with each plan: lanes, moves, buffers, and the model driven by them.

Owns their making in order and their end, after success and after failure. Used by the engine.
"""

import contextlib
from dataclasses import dataclass

from lohan.drive import SegmentedModel
from lohan.engine.driver import THREADED_LANES, StepDriver
from lohan.engine.planning.plan_memory import (
    peers_bytes,
    pools_bytes,
    rounding_bytes,
    swap_rounding_bytes,
)
from lohan.engine.planning.plan_run import PlannedRun
from lohan.engine.run_setup import RunSetup
from lohan.errors import NonFiniteGradients
from lohan.lanes.activation_moves import SwappedActivations
from lohan.lanes.executor import LaneExecutor, OnFinish
from lohan.lanes.gradient_moves import GradientMoves
from lohan.lanes.memory import LeaseBook, RamMemory
from lohan.lanes.updates import Updates
from lohan.lanes.weight_map import map_weights
from lohan.lanes.weight_moves import WeightMoves
from lohan.schedule import RollingSchedule
from lohan.simulate import replay, settled_schedule, trace_of
from lohan.store import StateStore, StoreCounters, SwapFile
from lohan.trace import Recorder, Trace
from lohan.units import format_bytes
from lohan.vocabulary import Lane, Tier


@dataclass(slots=True, kw_only=True)
class RunningPlan:
    """A plan in operation."""

    planned: PlannedRun
    rolling: RollingSchedule
    lanes: LaneExecutor
    driver: StepDriver
    model: SegmentedModel
    host: RamMemory
    book: LeaseBook
    weights: WeightMoves
    gradients: GradientMoves
    activations: SwappedActivations
    updates: Updates
    swap_file: SwapFile | None
    states: StateStore
    has_updates_due: bool = False
    """Whether updates of the last step were put off to the next."""

    @property
    def counters(self) -> StoreCounters:
        """SSD traffic of states, activations and spilled gradients."""
        states = self.states.counters
        swapped = self.swap_file.counters if self.swap_file is not None else StoreCounters()
        return StoreCounters(
            read_bytes=states.read_bytes + swapped.read_bytes,
            written_bytes=states.written_bytes + swapped.written_bytes,
        )

    def predicted_trace(self) -> Trace:
        """A few simulated steps, lane by lane."""
        plan, machine = self.planned.plan, self.planned.machine
        schedule = settled_schedule(plan, machine)
        return trace_of(schedule, replay(schedule, plan, machine), plan, machine)

    def fail(self, error: BaseException) -> None:
        """Stop because of an error, which is told what cannot be known before lanes have ended."""
        self.lanes.stop(error)
        self.close(should_finish=False)
        if isinstance(error, NonFiniteGradients):
            error.add_note(self.driver.updated_so_far())

    def close(self, *, should_finish: bool) -> None:
        """End the lanes, after all tasks or after the one each is at, and let memory go."""
        with contextlib.ExitStack() as stack:
            # Backwards, and all of them, whichever fails: memory goes when nothing can write to
            # it any more, neither a lane nor a drive nor a copy of the device.
            stack.callback(self.book.device.trim)  # the next plan has other sizes
            stack.callback(self.host.close)
            stack.callback(self.book.clear)
            stack.callback(self.weights.clear)
            stack.callback(self.updates.clear)
            stack.callback(self.gradients.clear)
            stack.callback(self.activations.clear)
            if self.swap_file is not None:
                stack.callback(self.swap_file.close)
            stack.callback(self.book.device.synchronize)
            stack.callback(self.driver.abandon)
            self.lanes.close(should_finish=should_finish)


def start_running(
    setup: RunSetup,
    planned: PlannedRun,
    *,
    recorder: Recorder,
    on_finish: OnFinish,
) -> RunningPlan:
    """Make everything a plan needs, and start its lanes. What fails half-way is undone.

    Raises:
        OutOfSpace, StorageError: there is no room for what is swapped to SSD.
    """
    with contextlib.ExitStack() as undo:
        plan = planned.plan
        rolling = RollingSchedule(plan)
        layout, device, peers = setup.store.layout, setup.device, setup.peers
        tiers = {Tier.RAM, Tier.GPU} if device.shares_ram else {Tier.RAM}
        host_bytes = pools_bytes(rolling.pools, tiers) + rounding_bytes(layout)
        host_bytes += swap_rounding_bytes(plan) + peers_bytes(plan)
        if device.queue is not None:
            setup.options.tell(f"pinning {format_bytes(host_bytes)} of RAM for copies")
        host = RamMemory(host_bytes, device, on_refused_pin=setup.tell_unpinned)
        book = LeaseBook(host, device)
        undo.callback(host.close)
        swap_file = setup.make_swap_file(plan)
        if swap_file is not None:
            undo.callback(swap_file.close)
        names = {segment.id: segment.name for segment in setup.segments}
        weights = WeightMoves(
            store=setup.store,
            weights=map_weights(setup.segments, setup.layout, setup.dtype),
            sets=setup.sets,
            book=book,
            device=device,
            peers=peers,
            whole=setup.layout,
        )
        gradients = GradientMoves(
            layout=layout,
            whole=setup.layout,
            peers=peers,
            workload=plan.workload,
            book=book,
            device=device,
            spill=swap_file,
            names=names,
            num_pieces=planned.num_pieces,
            num_threads=setup.num_threads,
            dtype=setup.dtype,
        )
        updates = Updates(
            store=setup.store,
            book=book,
            weights=weights,
            gradients=gradients,
            num_pieces=planned.num_pieces,
            num_threads=setup.num_threads,
        )
        activations = SwappedActivations(device=device, book=book, file=swap_file)
        driver = StepDriver(
            planned=planned,
            device=device,
            weights=weights,
            gradients=gradients,
            activations=activations,
            updates=updates,
            names=names,
            update_parameters_per_second=setup.options.update_parameters_per_second,
        )
        lanes = LaneExecutor(
            dict.fromkeys(
                (*THREADED_LANES, *((Lane.PEER,) if peers.num_ranks > 1 else ())), driver.action
            ),
            pools=rolling.pools,
            give_back=book.give_back,
            queue=device.queue,
            recorder=recorder,
            on_finish=on_finish,
        )
        undo.callback(lanes.close, should_finish=False)
        driver.lanes = lanes
        model = SegmentedModel(
            setup.model,
            setup.segments,
            sets=setup.sets,
            hooks=driver,
            device=device.torch_device,
            store=activations,
            ledger=setup.draws,
            captures=setup.captures,
            enter_thread=device.compute,
            loss_head=setup.loss_head,
            loss_chunks=plan.loss_chunks,
        )
        undo.pop_all()
        return RunningPlan(
            planned=planned,
            rolling=rolling,
            lanes=lanes,
            driver=driver,
            model=model,
            host=host,
            book=book,
            weights=weights,
            gradients=gradients,
            activations=activations,
            updates=updates,
            swap_file=swap_file,
            states=setup.store,
        )
