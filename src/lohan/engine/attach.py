"""From a model and an optimizer to an engine: checks first, then states on SSD.

Owns the order of start-up, said aloud, and its undoing. Everything that can be refused is refused
before anything is written. `lohan.attach` finds out what machine it runs on and comes here.
"""

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.nn.parameter import UninitializedParameter

from lohan.device import open_device
from lohan.device.device import Device
from lohan.drive import LossFunction
from lohan.engine.engine import Engine
from lohan.engine.freed_memory import bound_held_memory
from lohan.engine.loss import Progress
from lohan.engine.model_buffers import ModelBuffers
from lohan.engine.planning.budgets import Budgets
from lohan.engine.planning.known_drives import KnownDrives, measured_if_used
from lohan.engine.planning.plan_run import PlannedRun, master_format_of, plan_run
from lohan.engine.planning.swap_room import try_swap_room
from lohan.engine.planning.traced_model import TracedModel, sizes_of
from lohan.engine.planning.write_limit import WriteLimit
from lohan.engine.results import RunCounters
from lohan.engine.run_setup import (
    RunSetup,
    compute_format_of,
    initial_tensors,
    lay_out,
    open_run,
    refuse_meta_buffers,
    take_model_out,
)
from lohan.engine.seal_metadata import seal_metadata, sealed_buffers
from lohan.errors import ConfigError, DoesNotFit
from lohan.hardware.machine import Machine
from lohan.lanes.step_record import NonFinitePolicy
from lohan.optimizer.torch_optimizer import AdamW
from lohan.plan.policies import Policy
from lohan.ssd import CHUNK_BYTES, IoEngine, add_drives, choose_engine
from lohan.store import (
    ComputeFormat,
    MasterFormat,
    SlotCount,
    StateStore,
    create_states,
    open_states,
)
from lohan.store.initial import Moments
from lohan.units import format_bytes


def attach_engine(
    model: torch.nn.Module,
    optimizer: AdamW,
    *,
    ssd: Sequence[str | os.PathLike[str]],
    ram_bytes: int,
    gpu_bytes: int | None,
    machine: Machine | KnownDrives,
    device: str | Device | None = None,
    policy: str | Policy = "lohan+",
    master_format: MasterFormat | None = None,
    weights: Iterable[tuple[str, torch.Tensor]] | None = None,
    moments: Moments | None = None,
    counters: Mapping[str, Any] | None = None,
    buffers: Mapping[str, Any] | None = None,
    run: str | None = None,
    example: Any | None = None,
    largest_step: Sequence[Any] | None = None,
    write_limit: WriteLimit | None = None,
    loss_fn: LossFunction | None = None,
    nonfinite: str = "stop",
    num_slots: int = 2,
    num_threads: int | None = None,
    progress: Progress | None = None,
    is_tracing: bool = False,
    on_planned: Callable[[PlannedRun], None] | None = None,
    io: IoEngine | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    owns_device: bool = False,
    update_parameters_per_second: float | None = None,
) -> Engine:
    """Put a model's states on SSD and return the engine that trains it. See `lohan.attach`.

    `master_format` is the policy's unless given; a function as policy gets split ones where it can.
    `update_parameters_per_second` holds CPU updates back to a rate, for emulated machines.
    """
    nonfinite_policy = _nonfinite(nonfinite)
    _check_optimizer(model, optimizer)
    compute_format = compute_format_of(model)
    refuse_meta_buffers(model)
    kept_buffers = ModelBuffers(model, None if run is not None else buffers)
    _check_counters(counters)
    dtype = torch.bfloat16 if compute_format is ComputeFormat.BF16 else torch.float16
    tell: Callable[[str], None] = progress if progress is not None else _silent
    num_fp32 = sum(p.dtype is torch.float32 for p in model.parameters())
    if num_fp32 and num_fp32 < sum(1 for _ in model.parameters()):
        tell(f"{num_fp32} parameters are fp32; they compute in bf16 here, as the others do")
    budgets = Budgets(ram_bytes=ram_bytes, gpu_bytes=gpu_bytes, writes=write_limit)
    with contextlib.ExitStack() as undo:
        opened: Device
        if device is None or isinstance(device, str):
            opened, owns_device = open_device(device, memory_bytes=gpu_bytes), True
            undo.callback(opened.close)
        else:
            opened = device
        known = machine if isinstance(machine, KnownDrives) else KnownDrives(machine=machine)
        if opened.shares_ram:
            bound_held_memory(ram_bytes + (gpu_bytes or 0))
        if example is None and largest_step:
            # Known to fit the model, where inputs made up for it might not.
            example = largest_step[0]
        tell("tracing the model")
        traced = TracedModel(
            model, dtype=dtype, device=opened.torch_device, example=example, loss_fn=loss_fn
        )
        masters = master_format or master_format_of(policy, compute_format)
        segments, layout = lay_out(model, traced, compute_format, masters)
        first = None if run is not None else initial_tensors(model, weights)
        waits_for_norm = _waits_for_norm(optimizer, compute_format, nonfinite_policy)

        def plan(machine: Machine, budgets: Budgets) -> PlannedRun | None:
            # Without batches, the smallest step there can be shows whether drives are used.
            sizes = sizes_of(largest_step) if largest_step else traced.smallest_sizes
            with contextlib.nullcontext() if largest_step else contextlib.suppress(DoesNotFit):
                return plan_run(
                    traced.shape(sizes, largest_step or [None]),
                    sizes,
                    policy=policy,
                    machine=machine,
                    budgets=budgets,
                    layout=layout,
                    clips_gradients=waits_for_norm,
                    shares_ram=opened.shares_ram,
                )
            return None

        planned = None
        if largest_step or known.measure is not None or run is None:
            tell("checking that the largest step fits" if largest_step else "planning")
            known, budgets, planned = measured_if_used(known, budgets, plan)
        if on_planned is not None and largest_step:
            planned = plan(_as_computing(known.machine, opened), budgets)
            assert planned is not None, "the largest step fits"
            on_planned(planned)
        directories, is_new = open_run(ssd, run)
        undo.callback(lambda: directories.close(should_delete=is_new))
        engine_io = io if io is not None else choose_engine()[0]
        undo.callback(engine_io.close)
        drives = add_drives(engine_io, directories.paths, known.settings)
        store: StateStore
        if is_new:
            states_bytes = num_slots * layout.slot_bytes() + layout.frozen_bytes()
            tell(f"reserving {format_bytes(states_bytes)} for states on {len(ssd)} drive(s)")
            store = create_states(
                directories,
                layout,
                engine=engine_io,
                drives=drives,
                weights=known.weights,
                slot_count=SlotCount.TWO if num_slots == 2 else SlotCount.ONE,
                scratch_bytes=budgets.scratch_bytes,
                chunk_bytes=chunk_bytes,
                should_verify_reads=False,
            )
            undo.callback(lambda: store.close(should_delete=True))
            if planned is not None:
                try_swap_room(
                    planned.plan,
                    layout,
                    directories,
                    states_bytes=states_bytes,
                    engine=engine_io,
                    drives=drives,
                    weights=known.weights,
                    chunk_bytes=chunk_bytes,
                )
            tell("writing the first states")
            assert first is not None
            store.fill(first, moments=moments, should_verify=False)
            store.seal(
                step=int(counters["num_steps"]) if counters else 0,
                metadata=seal_metadata(
                    counters=counters or None, buffers=kept_buffers.to_json(), user={}
                ),
            )
        else:
            tell("opening and verifying the states of the last seal")
            store = open_states(
                directories,
                engine=engine_io,
                layout=layout,
                drives=drives,
                scratch_bytes=budgets.scratch_bytes,
                should_verify_reads=False,
            )
            undo.callback(store.close)
            kept_buffers = ModelBuffers(model, sealed_buffers(store.sealed))
        sets = take_model_out(model, segments, layout, opened)
        setup = RunSetup(
            model=model,
            traced=traced,
            segments=segments,
            sets=sets,
            dtype=dtype,
            device=opened,
            io=engine_io,
            run=directories,
            drives=drives,
            store=store,
            machine=_as_computing(known.machine, opened),
            known=known,
            budgets=budgets,
            policy=policy,
            loss_fn=loss_fn,
            waits_for_norm=waits_for_norm,
            nonfinite=nonfinite_policy,
            num_threads=num_threads or _default_threads(opened),
            progress=progress,
            chunk_bytes=chunk_bytes,
            owns_device=owns_device,
            update_parameters_per_second=update_parameters_per_second,
            is_new=is_new,
        )
        engine = Engine(setup, optimizer, kept_buffers, is_tracing=is_tracing)
        undo.pop_all()
    return engine


def _as_computing(machine: Machine, device: Device) -> Machine:
    """The machine, which has no GPU if the processor computes, whatever it was measured with."""
    return replace(machine, gpu=replace(machine.gpu, is_processor=device.shares_ram))


def _silent(_: str) -> None:
    """Nobody listens."""


def _waits_for_norm(
    optimizer: AdamW, compute_format: ComputeFormat, nonfinite: NonFinitePolicy
) -> bool:
    """Whether an update must know of all gradients: to clip, to skip, or to undo a loss scale."""
    return (
        optimizer.max_grad_norm is not None
        or compute_format is ComputeFormat.FP16
        or nonfinite is NonFinitePolicy.SKIP
    )


def _default_threads(device: Device) -> int:
    # Where the device is the processor itself, updates leave it most of the cores.
    num_cores = len(os.sched_getaffinity(0))
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
