"""What a run stands on: device, drives, directories, the state store, and the model taken in.

Owns opening and closing them in the right order, and undoing what fails half-way. Made by `attach`;
the engine asks it for what a plan needs.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_map

from lohan.closing import Closing
from lohan.device.device import Device
from lohan.drive import SegmentMap, segments_from_trace
from lohan.drive.captured.graphs import Captures
from lohan.drive.surroundings.randomness import DrawLedger
from lohan.drive.weights.offloaded import is_offloaded, refuse_calls
from lohan.drive.weights.parameter_views import ParameterSet
from lohan.engine.options import Options
from lohan.engine.planning.budgets import Budgets
from lohan.engine.planning.known_drives import KnownDrives
from lohan.engine.planning.plan_memory import kinds_in_ram
from lohan.engine.planning.plan_run import PlannedRun, plan_run
from lohan.engine.planning.swap_room import swap_room_bytes
from lohan.engine.planning.traced_model import BatchSizes, TracedModel, plain_batch
from lohan.errors import ConfigError, HardwareError
from lohan.hardware.machine import Machine
from lohan.lanes.memory import try_to_pin
from lohan.lanes.step_record import NonFinitePolicy
from lohan.lanes.weight_map import map_weights, state_entries
from lohan.model.shape import ModelShape
from lohan.optimizer import AdamWSettings
from lohan.optimizer.torch_optimizer import AdamW
from lohan.parallel.peers import Peers
from lohan.plan.plan import BlockPlan, Plan
from lohan.ssd import (
    DriveId,
    IoEngine,
    RunDirectories,
)
from lohan.store import (
    ComputeFormat,
    MasterFormat,
    StateLayout,
    StateStore,
    SwapFile,
    open_states,
    parts_of_kinds,
)
from lohan.vocabulary import BlockId

_FORMATS = {
    torch.bfloat16: ComputeFormat.BF16,
    torch.float16: ComputeFormat.FP16,
    torch.float32: ComputeFormat.BF16,
}
_PIECE_ELEMENTS = 1 << 20  # checked at once: what that takes is outside of all budgets
_COMPUTE = {ComputeFormat.BF16: torch.bfloat16, ComputeFormat.FP16: torch.float16}


@dataclass(slots=True, kw_only=True)
class RunSetup:
    """Everything of a run that lasts from plan to plan."""

    options: Options
    model: torch.nn.Module
    traced: TracedModel
    segments: SegmentMap
    sets: dict[BlockId, ParameterSet]
    device: Device
    io: IoEngine
    run: RunDirectories
    drives: Sequence[DriveId]
    store: StateStore
    layout: StateLayout
    """Of the whole model; the store has this rank's slice."""
    peers: Peers
    reduction_groups: int
    run_id: str
    """Of all ranks; each has directories of its own."""
    machine: Machine
    known: KnownDrives
    budgets: Budgets
    waits_for_norm: bool
    nonfinite: NonFinitePolicy
    num_threads: int
    loss_head: torch.nn.Linear | None = None
    """Whose logits need not exist as a whole, where that was asked for."""
    draws: DrawLedger = field(default_factory=DrawLedger)
    captures: Captures = field(default_factory=Captures)
    residents: Sequence[BlockPlan] | None = None
    """The blocks of the first plan: what they keep in RAM stays there from plan to plan."""
    past_buffers_bytes: int = 0
    """The most that buffers of plans before the one in use held."""
    _pinned: list[int] = field(default_factory=list)
    _has_told_unpinned: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """What the model computes in."""
        return _COMPUTE[self.store.layout.compute_format]

    @property
    def written_bytes(self) -> int:
        """Written to the drives so far, whatever for."""
        return self.known.written_bytes + sum(
            self.io.counters(drive).written_bytes for drive in self.drives
        )

    def tell_unpinned(self, error: HardwareError) -> None:
        """Say once that memory was not pinned. Runs on: any thread; two may both say it."""
        if not self._has_told_unpinned:
            self._has_told_unpinned = True
            self.options.tell(f"copies to and from the GPU are slower than they could be: {error}")

    def on_device(self, batches: Sequence[Any]) -> list[Any]:
        """Micro-batches with their tensors where compute reads them.

        Raises:
            ConfigError: they are not a list of batches, or none, or are to get gradients. The last
                ranks may have none, if others have some.
        """
        if not isinstance(batches, Sequence) or isinstance(batches, (str, bytes)):
            raise ConfigError(
                f"micro-batches are a {type(batches).__name__}",
                why="a step takes a list of micro-batches, each a dictionary of tensors",
                remedy="write engine.step([batch])",
            )
        if not batches and self.peers.is_first:
            raise ConfigError(
                "no micro-batch was given",
                why="there is nothing to compute",
                remedy="give at least one batch",
            )
        return [tree_map(self._on_device, plain_batch(batch)) for batch in batches]

    def _on_device(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if leaf.requires_grad:
            raise ConfigError(
                f"a tensor of shape {tuple(leaf.shape)} in a micro-batch requires a gradient",
                why="gradients go to the model's parameters; those of inputs have no plan",
                remedy="detach it, or make it a parameter of the model",
            )
        target = self.device.torch_device
        return leaf if leaf.device == target else leaf.to(target)

    def rates_of(self, optimizer: AdamW) -> list[AdamWSettings]:
        """The optimizer's settings for the next step, if what was changed since it was attached
        can be followed.

        Raises:
            ConfigError: it cannot; nothing was changed.
        """
        rates, norm = optimizer.rates(), optimizer.max_grad_norm
        if norm is not None and math.isfinite(norm) and not self.waits_for_norm:
            raise ConfigError(
                f"max_grad_norm was None when the model was attached and is {norm} now",
                why="updates were planned to run before all gradients and their norm are known",
                remedy="attach again with it, or from the start with a norm that is never reached",
            )
        grouped = optimizer.group_of()
        for own in self.sets.values():
            for name, parameter in own.parameters.items():
                if parameter.requires_grad and name not in own.trainable:
                    raise ConfigError(
                        f"{name} was frozen when the model was attached and is trainable now",
                        why="it has no master and no moments to update",
                        remedy="attach with it trainable, then freeze it until it is to learn",
                    )
                if name in own.trainable and id(parameter) not in grouped:
                    raise ConfigError(
                        f"{name} is in no group of the optimizer any more",
                        why="its learning rate is not known",
                        remedy="leave it in a group; freeze it (requires_grad_(False)) to keep it",
                    )
        return rates

    def plan(self, shape: ModelShape, sizes: BatchSizes) -> PlannedRun:
        """Plan steps of some sizes; what is resident by now stays so.

        Raises:
            DoesNotFit: no plan of the policy stays within the budgets.
        """
        return plan_run(
            shape,
            sizes,
            policy=self.options.policy,
            machine=self.machine,
            budgets=self.budgets,
            layout=self.store.layout,
            clips_gradients=self.waits_for_norm,
            shares_ram=self.device.shares_ram,
            fixed_residents=self.residents,
            num_ranks=self.peers.num_ranks,
            reduction_groups=self.reduction_groups,
            should_chunk_loss=self.loss_head is not None,
        )

    def make_residents(self, plan: Plan) -> None:
        """Take the states a plan wants in RAM there, once. The last seal must be the newest
        state: what was updated since would be lost."""
        assert self.residents is None, "states have been updated since the last seal"
        self.residents = plan.blocks
        parts = parts_of_kinds(self.store.layout, kinds_in_ram(plan))
        if not any(parts.values()):
            return
        self.options.tell("loading the states that stay in RAM")
        self.store.close()
        self.store = open_states(
            self.run,
            engine=self.io,
            drives=self.drives,
            resident_parts=parts,
            scratch_bytes=self.budgets.scratch_bytes,
            should_verify=False,
            should_verify_reads=False,
        )
        for address, nbytes in self.store.resident_regions:
            if try_to_pin(self.device, address, nbytes, self.tell_unpinned):
                self._pinned.append(address)

    def make_swap_file(self, plan: Plan) -> SwapFile | None:
        """Room on SSD for swapped activations and gradients that spill; None if none do."""
        nbytes = swap_room_bytes(plan, self.store.layout)
        if not nbytes:
            return None
        return SwapFile(
            self.run,
            engine=self.io,
            capacity_bytes=nbytes,
            drives=self.drives,
            weights=self.known.weights,
            chunk_bytes=self.options.chunk_bytes,
        )

    def close(self, *, should_delete: bool) -> None:
        """Let everything go; delete the run if asked."""
        with Closing() as stack:
            if self.options.owns_device:
                stack.callback(self.device.close)
            stack.callback(self.io.close)
            stack.callback(self.run.close, should_delete=should_delete)
            stack.callback(self.store.close, should_delete=should_delete)
            while self._pinned:
                self.device.unpin(self._pinned.pop())


def compute_format_of(model: torch.nn.Module) -> ComputeFormat:
    """bf16 or fp16, from the type of the model's parameters; fp32 models compute in bf16.

    Raises:
        ConfigError: parameters of several types, or of another one.
    """
    kinds = {parameter.dtype for parameter in model.parameters()}
    formats = {_FORMATS.get(kind) for kind in kinds}
    if not kinds or None in formats or len(formats) > 1:
        found = ", ".join(sorted(str(kind).removeprefix("torch.") for kind in kinds)) or "none"
        raise ConfigError(
            f"the model's parameters are of type {found}",
            why="they are kept in one 16-bit type with fp32 masters",
            remedy="convert the model to bfloat16 (or all of it to float16)",
        )
    found_format = formats.pop()
    assert found_format is not None
    return found_format


def refuse_meta_buffers(model: torch.nn.Module) -> None:
    """Refuse a model some of whose buffers have no values.

    Raises:
        ConfigError: naming the first.
    """
    on_meta = [name for name, buffer in model.named_buffers() if buffer.is_meta]
    if on_meta:
        raise ConfigError(
            f"{len(on_meta)} buffers of the model are on the meta device, {on_meta[0]} the first",
            why="their values (rotary frequencies, running means) are not known",
            remedy="build the model with real buffers and parameters on meta",
        )


def lay_out(
    model: torch.nn.Module,
    traced: TracedModel,
    compute_format: ComputeFormat,
    master_format: MasterFormat,
) -> tuple[SegmentMap, StateLayout]:
    """Segments and state layout of a model."""
    segments = segments_from_trace(model, traced.stretches)
    return segments, StateLayout.pack(
        state_entries(model, segments),
        compute_format=compute_format,
        master_format=master_format,
    )


def take_model_out(
    model: torch.nn.Module, segments: SegmentMap, layout: StateLayout, device: Device
) -> dict[BlockId, ParameterSet]:
    """Replace the model's parameters by absent ones; its values must be in the store by now."""
    dtype = _COMPUTE[layout.compute_format]
    target = device.torch_device
    for parameter in model.parameters():
        if parameter.dtype is not dtype:
            stand_in = torch.zeros((), dtype=dtype, device=parameter.device)
            parameter.data = stand_in.expand(parameter.shape)
    for buffer in model.buffers():
        if buffer.device != target:
            buffer.data = buffer.data.to(target)
    weights = map_weights(segments, layout, dtype)
    sets = segments.parameter_sets(
        model,
        {
            segment.id: weights[segment.id].layouts[segment.id]
            for segment in segments
            if segment.parameters
        },
    )
    for own in sets.values():
        own.release(target)
    refuse_calls(model, [model.get_submodule(block.name) for block in segments.blocks])
    return sets


def initial_tensors(
    model: torch.nn.Module, weights: Iterable[tuple[str, torch.Tensor]] | None
) -> Iterable[tuple[str, torch.Tensor]]:
    """First values of all parameters: given ones, or those the model has.

    Raises:
        ConfigError: the model is on meta, or an engine took its values, and none are given; or
            (as values come) one has NaNs or infinities.
    """
    if weights is not None:
        return _finite(model, weights)
    offloaded = [name for name, parameter in model.named_parameters() if is_offloaded(parameter)]
    if offloaded:
        raise ConfigError(
            f"{len(offloaded)} parameters of the model have no values, {offloaded[0]} the first: "
            "an engine took them",
            why="they are with the run of that engine, on SSD",
            remedy="pass run= to go on with that run, weights= to start from other values, or a "
            "model with data",
        )
    on_meta = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if on_meta:
        raise ConfigError(
            f"{len(on_meta)} parameters of the model are on the meta device, {on_meta[0]} the "
            "first",
            why="they have no values to start from",
            remedy="pass weights=, an iterable of (name, tensor), or a model with data",
        )
    own = ((name, parameter.detach().cpu()) for name, parameter in model.named_parameters())
    return _finite(model, own)


def _finite(
    model: torch.nn.Module, weights: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Values as they come; none that every step would stumble over.

    Raises:
        ConfigError: a tensor has NaNs, or one that is trained infinities; it is named.
    """
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    for name, tensor in weights:
        pieces = tensor.detach().reshape(-1).split(_PIECE_ELEMENTS)
        num_nan = sum(int(piece.isnan().sum()) for piece in pieces)
        num_infinite = sum(int(piece.isinf().sum()) for piece in pieces)
        if num_nan or (num_infinite and name not in frozen):
            raise ConfigError(
                f"of the {tensor.numel()} values of the tensor {name} {num_nan} are NaN and "
                f"{num_infinite} infinite",
                why="no loss and no gradient that they reach would be a number",
                remedy="copy the model again, or start from another one: this one is damaged, or "
                "its training had failed",
            )
        yield name, tensor
