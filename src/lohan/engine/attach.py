"""From a model and an optimizer to an engine: checks first, then states on SSD.

Owns the order of start-up, said aloud, and its undoing. Everything that can be refused is refused
before anything is written. `lohan.attach` finds out what machine it runs on and comes here.
"""

import contextlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.nn.parameter import UninitializedParameter

from lohan.closing import Closing
from lohan.device import open_device
from lohan.device.device import Device
from lohan.drive.chunked_loss import linear_head
from lohan.engine.engine import Engine
from lohan.engine.freed_memory import bound_held_memory
from lohan.engine.model_buffers import ModelBuffers
from lohan.engine.options import FirstStates, Options
from lohan.engine.planning.budgets import Budgets
from lohan.engine.planning.known_drives import KnownDrives, measured_if_used
from lohan.engine.planning.plan_run import PlannedRun, master_format_of, plan_run
from lohan.engine.planning.swap_room import swap_room_bytes, try_swap_room
from lohan.engine.planning.traced_model import TracedModel, sizes_of
from lohan.engine.ranks import (
    agreement,
    least_budgets,
    open_run,
    reduction_groups_of,
    refuse_unlike_ranks,
)
from lohan.engine.results import RunCounters, seal_metadata, sealed_buffers
from lohan.engine.run_setup import (
    RunSetup,
    compute_format_of,
    initial_tensors,
    lay_out,
    refuse_meta_buffers,
    take_model_out,
)
from lohan.errors import ConfigError, DoesNotFit
from lohan.hardware.machine import Machine
from lohan.lanes.step_record import NonFinitePolicy
from lohan.model.loss_head import LossHead, loss_head
from lohan.optimizer.torch_optimizer import AdamW
from lohan.parallel.peers import Peers
from lohan.parallel.slices import Slice
from lohan.plan.plan import Plan
from lohan.ssd import DriveId, IoEngine, RunDirectories, add_drives, choose_engine
from lohan.store import (
    ComputeFormat,
    SlotCount,
    StateLayout,
    StateStore,
    create_states,
    open_states,
)
from lohan.store.seals.commits import (
    read_commit,
    refuse_other_seal,
    settle_prepared,
)
from lohan.units import format_bytes

_AS_THE_MODEL_IS = FirstStates()


def attach_engine(
    model: torch.nn.Module,
    optimizer: AdamW,
    options: Options,
    first: FirstStates = _AS_THE_MODEL_IS,
) -> Engine:
    """Put a model's states on SSD and return the engine that trains it. See `lohan.attach`."""
    peers = options.peers or Peers()
    with peers.told_of_failure():
        return _attach(model, optimizer, options, first, peers)


def _attach(
    model: torch.nn.Module,
    optimizer: AdamW,
    options: Options,
    first: FirstStates,
    peers: Peers,
) -> Engine:
    assert options.ram_bytes is not None, "`attaching` asks the machine"
    assert options.machine is not None, "`attaching` asks the machine"
    groups = reduction_groups_of(options, first, peers)
    nonfinite = _nonfinite(options.nonfinite)
    _check_optimizer(model, optimizer)
    compute_format = compute_format_of(model)
    refuse_meta_buffers(model)
    buffers = ModelBuffers(model, None if first.run is not None else first.buffers)
    _check_counters(first.counters)
    num_fp32 = sum(p.dtype is torch.float32 for p in model.parameters())
    if num_fp32 and num_fp32 < sum(1 for _ in model.parameters()):
        options.tell(f"{num_fp32} parameters are fp32; they compute in bf16 here, as the others do")
    known = options.machine
    if not isinstance(known, KnownDrives):
        known = KnownDrives(machine=known)
    ram_bytes, gpu_bytes = least_budgets(options, peers)
    budgets = Budgets(ram_bytes=ram_bytes, gpu_bytes=gpu_bytes, writes=options.write_limit)
    with Closing() as undo:
        device, options = _open_device(options, undo)
        if device.shares_ram:
            bound_held_memory(budgets.ram_bytes + (budgets.gpu_bytes or 0))
        options.tell("tracing the model")
        traced = TracedModel(
            model,
            dtype=torch.bfloat16 if compute_format is ComputeFormat.BF16 else torch.float16,
            device=device.torch_device,
            # A batch that comes is known to fit the model, where inputs made up might not.
            example=options.example
            if options.example is not None or not options.largest_step
            else options.largest_step[0],
            loss_fn=options.loss_fn,
        )
        chunked_head = _loss_head(model, traced, options) if options.should_chunk_loss else None
        masters = options.master_format or master_format_of(options.policy, compute_format)
        segments, whole = lay_out(model, traced, compute_format, masters)
        refuse_unlike_ranks(whole, options, optimizer, traced, peers, groups)
        place = Slice(rank=peers.rank, num_ranks=peers.num_ranks)
        layout = place.layout(whole)
        values = None if first.run is not None else initial_tensors(model, first.weights)
        if values is not None:
            values = place.tensors(whole, values)
            first = replace(first, moments=place.moments(whole, first.moments))
        waits_for_norm = _waits_for_norm(optimizer, compute_format, nonfinite)
        link_bytes_per_second = peers.link_bytes_per_second()

        def as_used(machine: Machine) -> Machine:
            """The machine as this rank has it."""
            # Without a GPU if the processor computes, whatever it was measured with.
            gpu = replace(machine.gpu, is_processor=device.shares_ram)
            machine = replace(machine, gpu=gpu)
            if peers.num_ranks == 1:
                return machine
            return machine.of_rank(peers.num_here, link_bytes_per_second)

        def plan(machine: Machine, budgets: Budgets) -> PlannedRun | None:
            # Without batches, the smallest step there can be shows whether drives are used.
            steps = options.largest_step
            sizes = sizes_of(steps) if steps else traced.smallest_sizes
            with contextlib.nullcontext() if steps else contextlib.suppress(DoesNotFit):
                return plan_run(
                    traced.shape(sizes, steps or [None]),
                    sizes,
                    policy=options.policy,
                    machine=as_used(machine),
                    budgets=budgets,
                    layout=layout,
                    clips_gradients=waits_for_norm,
                    shares_ram=device.shares_ram,
                    num_ranks=peers.num_ranks,
                    reduction_groups=groups,
                    should_chunk_loss=chunked_head is not None,
                )
            return None

        states_bytes = options.num_slots * layout.slot_bytes() + layout.frozen_bytes()
        planned = None
        if options.largest_step or known.measure is not None or first.run is None:
            options.tell(
                "checking that the largest step fits" if options.largest_step else "planning"
            )
            measured = known, budgets

            def measure_and_plan() -> tuple[Machine, PlannedRun | None]:
                nonlocal measured
                *measured, planned = measured_if_used(*measured, plan)  # type: ignore[assignment]
                return measured[0].machine, planned

            machine, planned = peers.from_first(measure_and_plan, what="the plan")
            known, budgets = measured
            if not peers.is_first:
                known = replace(known, machine=machine)
        if options.on_planned is not None and options.largest_step:
            if peers.num_ranks == 1:
                planned = plan(known.machine, budgets)  # known already where it is the same
            assert planned is not None, "the largest step fits"
            options.on_planned(
                replace(
                    planned,
                    states_bytes=states_bytes,
                    swap_bytes=swap_room_bytes(planned.plan, layout),
                )
            )
        directories, run_id, is_new = open_run(options.ssd, first.run, peers)
        undo.callback(lambda: directories.close(should_delete=is_new))
        io = options.io if options.io is not None else choose_engine()[0]
        undo.callback(io.close)
        drives = add_drives(io, directories.paths, known.settings)
        places = _Places(directories, io, drives, known, options, peers, groups)
        if values is not None:
            plan_to_try = planned.plan if planned is not None else None
            store = _new_states(places, layout, budgets, plan_to_try, values, first, buffers, undo)
        else:
            options.tell("opening and verifying the states of the last seal")
            store = peers.together(
                lambda: _sealed_states(places, layout, budgets, undo),
                what="the sealed states of all ranks",
            )
            buffers = ModelBuffers(model, sealed_buffers(store.sealed))
        setup = RunSetup(
            options=options,
            model=model,
            traced=traced,
            segments=segments,
            sets=take_model_out(model, segments, whole, device),
            device=device,
            io=io,
            run=directories,
            drives=drives,
            store=store,
            layout=whole,
            peers=peers,
            reduction_groups=groups,
            run_id=run_id,
            machine=as_used(known.machine),
            known=known,
            budgets=budgets,
            waits_for_norm=waits_for_norm,
            nonfinite=nonfinite,
            num_threads=options.num_threads or _default_threads(device, peers.num_here),
            loss_head=chunked_head,
        )
        engine = Engine(setup, optimizer, buffers)
        undo.pop_all()
    return engine


def _loss_head(
    model: torch.nn.Module, traced: TracedModel, options: Options
) -> torch.nn.Linear | None:
    """The head whose loss can be computed in chunks, or a sentence on why there is none."""
    found = loss_head(traced.shape(traced.smallest_sizes, [None]))
    head = linear_head(model, found) if isinstance(found, LossHead) else found
    if isinstance(head, str):
        options.tell(f"the loss is computed with its logits as a whole: {head}")
        return None
    return head


def _open_device(options: Options, undo: Closing) -> tuple[Device, Options]:
    """The device, and who closes it."""
    if options.device is None or isinstance(options.device, str):
        opened = open_device(options.device, memory_bytes=options.gpu_bytes)
        undo.callback(opened.close)
        return opened, replace(options, owns_device=True)
    return options.device, options


class _Places(NamedTuple):
    """Where states go."""

    directories: RunDirectories
    io: IoEngine
    drives: Sequence[DriveId]
    known: KnownDrives
    options: Options
    peers: Peers
    reduction_groups: int


def _new_states(
    places: _Places,
    layout: StateLayout,
    budgets: Budgets,
    plan: Plan | None,
    values: Iterable[tuple[str, torch.Tensor]],
    first: FirstStates,
    buffers: ModelBuffers,
    undo: Closing,
) -> StateStore:
    """Reserve room for states and for what the plan swaps, write the states, seal them."""
    directories, io, drives, known, options, peers, groups = places
    states_bytes = options.num_slots * layout.slot_bytes() + layout.frozen_bytes()
    options.tell(
        f"reserving {format_bytes(states_bytes)} for states on {len(options.ssd)} drive(s)"
    )

    def filled() -> StateStore:
        store = create_states(
            directories,
            layout,
            engine=io,
            drives=drives,
            weights=known.weights,
            slot_count=SlotCount.TWO if options.num_slots == 2 else SlotCount.ONE,
            scratch_bytes=budgets.scratch_bytes,
            chunk_bytes=options.chunk_bytes,
            should_verify_reads=False,
        )
        undo.callback(lambda: store.close(should_delete=True))
        if plan is not None:
            try_swap_room(
                plan,
                layout,
                directories,
                states_bytes=states_bytes,
                engine=io,
                drives=drives,
                weights=known.weights,
                chunk_bytes=options.chunk_bytes,
            )
        options.tell("writing the first states")
        store.fill(values, moments=first.moments, should_verify=False)
        return store

    store = peers.together(filled, what="the first states of all ranks")
    counters = first.counters or None
    if groups > 1:
        begun = RunCounters(reduction_groups=groups).to_json()
        counters = {**(counters or begun), "reduction_groups": groups}
    store.seal(
        step=int(first.counters["num_steps"]) if first.counters else 0,
        metadata=seal_metadata(counters=counters, buffers=buffers.to_json(), user={}),
        agree=agreement(peers, directories),
    )
    return store


def _sealed_states(
    places: _Places, layout: StateLayout, budgets: Budgets, undo: Closing
) -> StateStore:
    """The states of the last seal, which all ranks have."""
    directories, io, drives, _, _, peers, _ = places
    committed = None
    if peers.num_ranks > 1:
        committed = peers.from_first(
            lambda: read_commit(directories.paths), what="the record of the last seal"
        )
        settle_prepared(directories.paths, committed)
    store = open_states(
        directories,
        engine=io,
        layout=layout,
        drives=drives,
        scratch_bytes=budgets.scratch_bytes,
        should_verify_reads=False,
    )
    undo.callback(store.close)
    if committed is not None and store.sealed is not None:
        refuse_other_seal(store.sealed, committed, peers.rank)
    return store


def _waits_for_norm(
    optimizer: AdamW, compute_format: ComputeFormat, nonfinite: NonFinitePolicy
) -> bool:
    """Whether an update must know of all gradients: to clip, to skip, or to undo a loss scale."""
    return (
        optimizer.max_grad_norm is not None
        or compute_format is ComputeFormat.FP16
        or nonfinite is NonFinitePolicy.SKIP
    )


def _default_threads(device: Device, num_ranks_here: int) -> int:
    # Where the device is the processor itself, updates leave it most of the cores.
    num_cores = max(1, len(os.sched_getaffinity(0)) // num_ranks_here)
    return max(1, num_cores // 2) if device.shares_ram else num_cores


def _nonfinite(text: str) -> NonFinitePolicy:
    try:
        return NonFinitePolicy(text)
    except ValueError:
        raise ConfigError(
            f"nonfinite is {text!r}",
            why="it says what happens when gradients are infinite or NaN",
            remedy='write "stop" or "skip"',
        ) from None


def _check_counters(counters: Mapping[str, Any] | None) -> None:
    try:
        RunCounters().take(counters or RunCounters().to_json())
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"the counters to go on from are not those of an engine ({error!r})",
            why="updates go on counting where the copied ones stopped",
            remedy="pass what `Engine.counters` gave when the states were copied",
        ) from None


def _check_optimizer(model: torch.nn.Module, optimizer: object) -> None:
    if not isinstance(optimizer, AdamW):
        raise ConfigError(
            f"the optimizer is a {type(optimizer).__module__}.{type(optimizer).__name__}",
            why="states live with the engine, which knows AdamW",
            remedy="use lohan.AdamW(model.parameters(), lr=...)",
        )
    lazy = [name for name, p in model.named_parameters() if isinstance(p, UninitializedParameter)]
    if lazy:
        raise ConfigError(
            f"{len(lazy)} parameters of the model have no shape yet, {lazy[0]} the first",
            why="a lazy module makes them when it first runs, and their states need places before",
            remedy="call the model once with a small batch, then make the optimizer and attach",
        )
    grouped = set(optimizer.group_of())
    without = [
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and id(parameter) not in grouped
    ]
    if without:
        raise ConfigError(
            f"{len(without)} trainable parameters are in no group of the optimizer, {without[0]} "
            "the first",
            why="their learning rate is not known",
            remedy="give the optimizer all trainable parameters, or freeze these "
            "(requires_grad_(False))",
        )
    own = {id(parameter) for parameter in model.parameters()}
    foreign = len(grouped - own)
    if foreign:
        raise ConfigError(
            f"{foreign} parameters of the optimizer are not the model's",
            why="they would never be updated",
            remedy="make the optimizer from the model that is attached",
        )
