"""Random numbers: the state of the generators, and how far one micro-batch moves it.

In plain training micro-batch 1 draws after micro-batch 0 has drawn everything. Layer-major order
runs them side by side, so the state micro-batch 1 starts from must be known before micro-batch 0
has finished. `DrawLedger` learns the draws of a batch shape once and then predicts them exactly.
Owns no policy: an unknown amount is reported (`DrawsUnknown`), and the caller picks the order.
"""

import hashlib
import random
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from lohan.drive.surroundings.host_randomness import HostDraw, HostState, draws_between
from lohan.errors import ScheduleError

_COUNTER_BYTES = 16
"""Of a generator whose state is a seed and how far it has counted, 64 bits each: CUDA's, XPU's."""
RandomState = tuple[Any, ...]
"""Python's and numpy's generators, the CPU's, its device's."""


class DrawsUnknown(ScheduleError):
    """A micro-batch drew random numbers in an amount that was not known before it ran."""


class Generators:
    """The global random generators a forward draws from: Python's and numpy's, torch's for the CPU
    and its device."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = [device for device in devices if device.type not in ("cpu", "meta")]

    def state(self) -> RandomState:
        """A copy of the states."""
        others = (torch.get_device_module(device).get_rng_state(device) for device in self._devices)
        return (HostState.now(), torch.get_rng_state(), *others)

    def set_state(self, state: RandomState) -> None:
        """Continue from these states."""
        host, cpu, *others = state
        host.put_back()
        torch.set_rng_state(cpu)
        for device, own in zip(self._devices, others, strict=True):
            torch.get_device_module(device).set_rng_state(own, device)

    def state_of_group(self, step_state: RandomState, group: int, step: int) -> RandomState:
        """Where a reduction group begins to draw in a step: the first where the step does, each
        other from a seed made of torch's generators, its number and the step's. So it is known
        wherever the group runs, and nothing has to be kept from step to step."""
        if group == 0:
            return step_state
        host, *others = step_state
        known = hashlib.sha256(f"group {group} of step {step}".encode())
        for one in others:
            known.update(one.cpu().numpy().tobytes())
        seed, before = int.from_bytes(known.digest()[:4]), self.state()
        random.seed(seed)
        if not isinstance(host.numpy, str):
            np.random.seed(seed)
        torch.manual_seed(seed)
        found = self.state()
        self.set_state(before)
        return found

    def drawn(self, before: RandomState, after: RandomState) -> "list[AnyDraw | None]":
        """What is known of the draws between two states without having seen them: those from
        Python's and numpy's generators, and how far an accelerator's counter went."""
        found: list[AnyDraw | None] = list(draws_between(before[0], after[0]))
        for device, one, other in zip(self._devices, before[2:], after[2:], strict=True):
            if one.nbytes == other.nbytes == _COUNTER_BYTES:
                (seed, begin), (same_seed, end) = one.view(torch.int64), other.view(torch.int64)
                if seed == same_seed and begin <= end:
                    found.append(CounterDraw(device, int(end - begin)))
        return found


def same_state(one: RandomState, other: RandomState) -> bool:
    """Whether two states give the same random numbers."""
    return bool(one[0] == other[0]) and all(
        torch.equal(a, b) for a, b in zip(one[1:], other[1:], strict=True)
    )


@dataclass(frozen=True, slots=True)
class _Like:
    """Stands for a tensor argument whose values do not matter."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def make(self) -> torch.Tensor:
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)


@dataclass(frozen=True, slots=True)
class Draw:
    """One operator that drew random numbers, with shapes in place of tensors."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def repeat(self) -> None:
        """Move the generators as the operator did."""
        leaves, spec = tree_flatten((self.args, self.kwargs))
        made = [leaf.make() if isinstance(leaf, _Like) else leaf for leaf in leaves]
        args, kwargs = tree_unflatten(made, spec)
        self.func(*args, **kwargs)

    @property
    def device_type(self) -> str:
        """Of the generator that was drawn from."""
        leaves = tree_flatten((self.args, self.kwargs))[0]
        devices = [leaf.device for leaf in leaves if isinstance(leaf, _Like)]
        devices += [leaf for leaf in leaves if isinstance(leaf, torch.device)]
        return devices[0].type if devices else "cpu"


@dataclass(frozen=True, slots=True)
class CounterDraw:
    """All that an accelerator drew: no kernel need run, and no memory be there for its results."""

    device: torch.device
    count: int

    def repeat(self) -> None:
        """Move the generator's counter."""
        module = torch.get_device_module(self.device)
        state = module.get_rng_state(self.device).clone()
        state.view(torch.int64)[1] += self.count
        module.set_rng_state(state, self.device)


AnyDraw = Draw | HostDraw | CounterDraw

_READS_VALUES = (
    # How much these draw, or whether they accept it, depends on the values of a tensor.
    "aten::multinomial",
    "aten::bernoulli.default",
    "aten::bernoulli_.Tensor",
    "aten::normal.Tensor_float",
    "aten::normal.float_Tensor",
    "aten::normal.Tensor_Tensor",
    "aten::poisson",
    "aten::rrelu_with_noise",
    "aten::rrelu_with_noise_",
    "aten::rrelu_with_noise_functional",
    "aten::binomial",
    "aten::_standard_gamma",
    "aten::_sample_dirichlet",
)


def may_draw(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operator draws random numbers. Attention without dropout does not."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    return not any(
        argument.name == "dropout_p"
        and (args[place] if place < len(args) else kwargs.get(argument.name)) == 0
        for place, argument in enumerate(func._schema.arguments)
    )


class DrawRecorder(TorchDispatchMode):
    """Notes every operator that draws from a default generator."""

    def __init__(self, draws: list[AnyDraw | None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._draws = draws

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if may_draw(func, args, kwargs) and kwargs.get("generator") is None:
            name = func._schema.name
            full_name = f"{name}.{func._overloadname}"
            predictable = name not in _READS_VALUES and full_name not in _READS_VALUES
            self._draws.append(self._note(func, args, kwargs) if predictable else None)
        return func(*args, **kwargs)

    @staticmethod
    def _note(func: Any, args: Any, kwargs: dict[str, Any]) -> Draw:
        leaves, spec = tree_flatten((tuple(args), kwargs))
        noted = [
            _Like(tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.device)
            if isinstance(leaf, torch.Tensor)
            else leaf
            for leaf in leaves
        ]
        return Draw(func, *tree_unflatten(noted, spec))


class DrawLedger:
    """What each batch shape was seen to draw; kept from step to step.

    A shape that is not known is taken to draw nothing until it does (most models draw nothing).
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, tuple[AnyDraw, ...]] = {}
        self.has_draws: dict[Hashable, bool] = {}
        """By setting, whether any batch was found to draw; none before one was looked at."""

    def learn(self, signature: Hashable, draws: Sequence[AnyDraw | None]) -> None:
        """Remember draws, unless one of them cannot be predicted."""
        noted = tuple(draw for draw in draws if draw is not None)
        if len(noted) == len(draws):
            counted = {draw.device.type for draw in noted if isinstance(draw, CounterDraw)}
            self._known[signature] = tuple(
                draw
                for draw in noted
                if not (isinstance(draw, Draw) and draw.device_type in counted)
                and not (isinstance(draw, CounterDraw) and not draw.count)
            )

    def knows(self, signature: Hashable) -> bool:
        """Whether the draws of such a batch were learned."""
        return signature in self._known

    def draws(self, signature: Hashable) -> bool:
        """Whether such a batch draws anything, or cannot be predicted."""
        return self._known.get(signature) != ()

    def forget(self, signature: Hashable) -> None:
        """Predictions for this shape turned out wrong."""
        self._known.pop(signature, None)

    def advance(self, signature: Hashable) -> None:
        """Move the generators as a whole forward of such a batch would."""
        for draw in self._known.get(signature, ()):
            draw.repeat()


def draw_setting(model: torch.nn.Module, loss_fn: Any) -> Hashable:
    """What of a model, its loss and the process decides how much is drawn, beside the batch.

    Not whether there will be gradients: a forward draws the same without. A loss function is known
    by its code: many are made anew for every step.
    """
    modes: list[Hashable] = []
    for part in model.modules():
        values = vars(part)
        modes.append(part.training)
        for name in [name for name in values if name == "p" or "drop" in name]:
            if isinstance(values[name], float):
                modes.append(values[name])
    called = getattr(loss_fn, "func", loss_fn)
    code = getattr(called, "__code__", None) or type(called)
    return tuple(modes), code, torch.is_autocast_enabled("cpu")


def signature_of(batch: object, *more: Hashable) -> Hashable:
    """What the amount of random numbers depends on: shapes, types, devices and plain values."""
    leaves, spec = tree_flatten(batch)
    parts: list[Hashable] = [str(spec), *more]
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            parts.append((tuple(leaf.shape), leaf.dtype, str(leaf.device)))
        elif isinstance(leaf, (bool, int, float, str, bytes, type(None))):
            parts.append(leaf)
        else:
            parts.append(type(leaf).__qualname__)
    return tuple(parts)
