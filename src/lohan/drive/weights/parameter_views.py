"""Parameters as views into one flat buffer per segment, and what stands in when they are offloaded.

Owns the layout of a segment's parameters in a flat buffer, putting them in place (`bind`) and
taking them out (`release`). Does not own the buffers nor decide when: the caller does both.
Gradients use the same layout (`gradient_sums`).
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from lohan.drive.weights.offloaded import mark
from lohan.errors import ConfigError, ScheduleError, bug
from lohan.model.tracing.trace_ops import storage_key

ALIGNMENT_BYTES = 64
"""Start of each parameter in its flat buffer. PyTorch's own CPU allocations start at such
addresses, and vendor matrix kernels may round differently at others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSlot:
    """Place of one parameter in the flat buffer of its segment."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset_bytes: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the parameter itself, without padding."""
        return math.prod(self.shape) * self.dtype.itemsize

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """The parameter's part of a flat buffer of bytes."""
        part = flat[self.offset_bytes : self.offset_bytes + self.num_bytes]
        return part.view(self.dtype).view(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterLayout:
    """Places of all parameters of a segment in one flat buffer."""

    slots: tuple[ParameterSlot, ...]
    num_bytes: int

    @classmethod
    def pack(
        cls,
        parameters: Mapping[str, torch.Tensor],
        *,
        alignment_bytes: int = ALIGNMENT_BYTES,
    ) -> "ParameterLayout":
        """Lay parameters out one after the other, each at a multiple of `alignment_bytes`."""
        slots, end_bytes = [], 0
        for name, parameter in parameters.items():
            slot = ParameterSlot(
                name=name,
                shape=tuple(parameter.shape),
                dtype=parameter.dtype,
                offset_bytes=math.ceil(end_bytes / alignment_bytes) * alignment_bytes,
            )
            slots.append(slot)
            end_bytes = slot.offset_bytes + slot.num_bytes
        num_bytes = math.ceil(end_bytes / alignment_bytes) * alignment_bytes
        return cls(slots=tuple(slots), num_bytes=num_bytes)

    def names(self) -> tuple[str, ...]:
        """Names of the parameters in order of their places."""
        return tuple(slot.name for slot in self.slots)


def bytes_of(flat: torch.Tensor, num_bytes: int, what: str) -> torch.Tensor:
    """A flat buffer of any element type as bytes, after checking that it is large enough."""
    if flat.dim() != 1 or not flat.is_contiguous() or flat.nbytes < num_bytes:
        raise ConfigError(
            f"{what} needs a flat contiguous buffer of {num_bytes} bytes and was given shape "
            f"{tuple(flat.shape)} with {flat.nbytes} bytes",
            why="its parameters are views into that one buffer",
            remedy="lease a buffer of the layout's `num_bytes`",
        )
    return flat.detach().view(torch.uint8)


class ParameterSet:
    """The parameters of one segment: all in place in one flat buffer, or all offloaded.

    An absent parameter keeps its shape (one NaN, expanded with stride 0): autograd compares the
    shape of a parameter with that of its gradient. Used on the main thread only.
    """

    def __init__(
        self,
        name: str,
        parameters: Mapping[str, torch.nn.Parameter],
        layout: ParameterLayout | None = None,
    ) -> None:
        self.name = name
        self.parameters = dict(parameters)
        self.trainable = frozenset(n for n, p in self.parameters.items() if p.requires_grad)
        """Names of those that had a gradient when this was made: states have places for these. One
        that is frozen later has no gradient and keeps its place."""
        self.layout = layout or ParameterLayout.pack(self.parameters)
        self._flat: torch.Tensor | None = None
        self._bound = self.layout
        self._nothing: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}
        self._check_layout()

    def _check_layout(self) -> None:
        given = {slot.name: (slot.shape, slot.dtype) for slot in self.layout.slots}
        own = {name: (tuple(p.shape), p.dtype) for name, p in self.parameters.items()}
        if given != own:
            differing = sorted(
                name for name in given.keys() | own.keys() if given.get(name) != own.get(name)
            )
            raise ConfigError(
                f"the layout of {self.name} does not fit its parameters {differing}",
                why="names, shapes and types of a layout must be those of the model",
                remedy="make the layout from this model, or load the model it was made from",
            )

    @property
    def flat(self) -> torch.Tensor:
        """The buffer the parameters are in, as bytes."""
        if self._flat is None:
            raise bug(f"the weights of {self.name} are needed and not in place")
        return self._flat

    @property
    def has_buffer(self) -> bool:
        """Whether there are parameters and they are in place."""
        return self._flat is not None

    def slot_at(self, offset_bytes: int) -> ParameterSlot | None:
        """The parameter at this place in the buffer, which other sets may have parts of."""
        for slot in self._bound.slots:
            if slot.offset_bytes <= offset_bytes < slot.offset_bytes + slot.num_bytes:
                return slot
        return None

    def offset_bytes(self, name: str) -> int:
        """Where in the buffer a parameter is.

        Raises:
            ScheduleError: this buffer does not have it.
        """
        for slot in self._bound.slots:
            if slot.name == name:
                return slot.offset_bytes
        raise bug(f"{name} of {self.name} is not in place, and needed")

    def bind(self, flat: torch.Tensor, layout: ParameterLayout | None = None) -> None:
        """Put the parameters in place: from now on they are views into `flat`.

        Args:
            layout: places in `flat` where they differ from the set's own; parameters it does not
                name stay offloaded (a segment that borrows one weight needs no others).

        Owns until: `flat` belongs to this set until `release`. Binding again moves them.
        """
        self._bound = layout or self.layout
        as_bytes = bytes_of(flat, self._bound.num_bytes, self.name)
        for slot in self._bound.slots:
            self._set(slot.name, slot.view(as_bytes), is_offloaded=False)
        self._flat = as_bytes

    def has(self, name: str) -> bool:
        """Whether one parameter is in place."""
        return self._flat is not None and any(slot.name == name for slot in self._bound.slots)

    def release(self, device: torch.device | None = None) -> None:
        """Take the parameters out of the buffer, or of the model (with data, or on meta) to
        `device`; they keep their shapes. May be called twice."""
        self._flat = None
        for slot in self.layout.slots:
            nothing = self.absent(slot.dtype, device or self.parameters[slot.name].device)
            self._set(slot.name, nothing.expand(slot.shape), is_offloaded=True)

    def _set(self, name: str, value: torch.Tensor, *, is_offloaded: bool) -> None:
        parameter = self.parameters[name]
        mark(parameter, is_offloaded=False)
        if parameter.is_meta != value.is_meta:
            # A tensor's data cannot be set across the meta device; its whole content can be
            # exchanged, which keeps the identity that optimizers and tied modules rely on.
            fresh = torch.nn.Parameter(value, requires_grad=parameter.requires_grad)
            torch.utils.swap_tensors(parameter, fresh)
        else:
            parameter.data = value
        mark(parameter, is_offloaded=is_offloaded)

    def absent(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The one number that stands for all of an absent parameter."""
        nothing = self._nothing.get((dtype, device))
        if nothing is None:
            value = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
            nothing = torch.full((), value, dtype=dtype, device=device)
            self._nothing[dtype, device] = nothing
        return nothing

    def is_absent(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is (a view of) a parameter of this set that is offloaded."""
        nothing = self._nothing.get((tensor.dtype, tensor.device))
        return nothing is not None and storage_key(tensor) == storage_key(nothing)

    def names_like(self, tensor: torch.Tensor) -> list[str]:
        """The parameter that a tensor is, or all that it may be (a view of)."""
        found = [name for name, own in self.parameters.items() if own is tensor]
        alike = [name for name, own in self.parameters.items() if own.shape == tensor.shape]
        return found or alike or list(self.parameters)


def may_be_absent(tensor: torch.Tensor) -> bool:
    """Absent weights are one element, so most tensors need no closer look."""
    return bool(tensor.untyped_storage().nbytes() == tensor.itemsize)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightPlace:
    """A tensor that is (a view of) a weight, without its memory: what a kept graph may hold."""

    own: ParameterSet
    name: str
    offset_bytes: int
    """From the start of the parameter, which may be elsewhere in the next buffer."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    is_conj: bool
    is_neg: bool
    """Views that say "conjugate" or "negate" of memory that is neither yet."""

    def tensor(self) -> torch.Tensor:
        """The same tensor in the buffer the weights are in now.

        Raises:
            ScheduleError: they are offloaded.
        """
        flat = self.own.flat
        start = flat.storage_offset() + self.own.offset_bytes(self.name) + self.offset_bytes
        typed = torch.empty(0, dtype=self.dtype, device=flat.device)
        typed = typed.set_(
            flat.untyped_storage(), start // self.dtype.itemsize, self.shape, self.strides
        )
        typed = typed.conj() if self.is_conj else typed
        return torch._neg_view(typed) if self.is_neg else typed

    def absent(self) -> torch.Tensor:
        """What stands in for it while the weights are offloaded: its shape, and no values."""
        return self.own.absent(self.dtype, self.own.flat.device).expand(self.shape)

    def copy(self) -> torch.Tensor:
        """A copy that no kernel tells from the weight: strides and alignment are the same, too.

        Raises:
            ScheduleError: they are offloaded.
        """
        weight = self.tensor()
        if not weight.numel():
            return weight.clone()
        lead = self.offset_bytes % ALIGNMENT_BYTES // self.dtype.itemsize
        steps = zip(self.shape, self.strides, strict=True)
        length = lead + 1 + sum((size - 1) * stride for size, stride in steps)
        memory = weight.as_strided((length,), (1,), int(weight.storage_offset()) - lead).clone()
        return memory.as_strided(self.shape, self.strides, lead)


class Weights:
    """All parameter sets of a model, to ask what a tensor's memory is."""

    def __init__(self, sets: Iterable[ParameterSet]) -> None:
        self._sets = tuple(sets)

    def place_of(self, tensor: torch.Tensor) -> WeightPlace | None:
        """Which weight the tensor is or views; None if its memory is not that of weights."""
        if tensor.layout is not torch.strided:
            return None
        # Buffers of several sets may be parts of one allocation, so places count too.
        storage, start_bytes = storage_key(tensor), tensor.storage_offset() * tensor.itemsize
        for own in self._sets:
            if not own.has_buffer or storage_key(own.flat) != storage:
                continue
            offset_bytes = int(start_bytes - own.flat.storage_offset())
            slot = own.slot_at(offset_bytes)
            if slot is not None:
                inside_bytes = offset_bytes - slot.offset_bytes
                return WeightPlace(
                    own=own,
                    name=slot.name,
                    offset_bytes=inside_bytes,
                    shape=tuple(tensor.shape),
                    strides=tensor.stride(),
                    dtype=tensor.dtype,
                    is_conj=tensor.is_conj(),
                    is_neg=tensor.is_neg(),
                )
        return None

    def stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, or what is in place of (a view of) a weight when weights are offloaded."""
        place = self.place_of(tensor)
        return place.absent() if place is not None else tensor

    def absence(self, tensor: torch.Tensor, what: str) -> ScheduleError | None:
        """What to say if the tensor is a parameter that is offloaded."""
        if not may_be_absent(tensor):
            return None
        for own in self._sets:
            if own.is_absent(tensor):
                names = own.names_like(tensor)
                return ScheduleError(
                    f"weights of {own.name} ({' or '.join(names)}, shape {tuple(tensor.shape)}) "
                    f"are offloaded and are needed by {what}",
                    why="they are in place only where they were used when the model was traced; "
                    "those of a block only while it runs",
                    remedy="give a loss that reads weights to `attach` (loss_fn=, example=), which "
                    "finds out where; else use weights of a block inside it and return what is "
                    "needed of them",
                )
        return None
