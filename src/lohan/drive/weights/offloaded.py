"""A model whose weights are offloaded: how to tell, and no computing with or saving what stands in.

Engines leave one NaN, spread over its shape, in place of each parameter. Whoever reads it between
steps, calls the model, generates with it or saves it would get NaNs without a word. Owns the type
of such parameters and the hooks, which say so instead; they stay with the model, since its weights
do not come back by themselves. Called by `parameter_views` and `run_setup` when weights leave, by
`segmented_model` around its own calls, and by the trainers after a step.
"""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn, cast

import torch

from lohan.errors import ConfigError

_VALUES = frozenset({"data", "T", "H", "mT", "mH", "real", "imag"})
"""Attributes that are tensors; all others say something about one."""
_WITHOUT_VALUES = frozenset(
    {"size", "dim", "ndimension", "numel", "nelement", "stride", "element_size", "__len__"}
    | {"storage_offset", "untyped_storage", "data_ptr", "get_device", "is_pinned", "is_shared"}
    | {"is_floating_point", "is_complex", "is_signed", "is_contiguous", "is_inference"}
    | {"requires_grad_", "register_hook", "register_post_accumulate_grad_hook", "retain_grad"}
    | {"__format__", "dim_order", "is_same_size", "result_type"}
    | {"_has_compatible_shallow_copy_type"}  # asked by `model.to`, also where nothing is to do
)
_CONVERSIONS = frozenset({"to", "cpu", "bfloat16", "half", "float", "contiguous", "type"})
"""They give the tensor itself, or a word, where there is nothing to convert."""
_GRADIENT: Any = vars(torch._C.TensorBase)["grad"]
"""The attribute as every tensor has it."""


class AwayParameter(torch.nn.Parameter):
    """What a parameter is while its values are elsewhere; it is the same object before and after.

    It has its shape, format and device. Outside of a step its values cannot be read.
    """

    gradient_is_used = False
    """Whether a step made a gradient, and used it up, that the caller may still ask for."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Refuse what reads values, unless a model is in a step: there weights come in time."""
        name = func.__name__
        if name in ("__get__", "__set__", "__delete__"):
            is_read = name == "__get__" and func.__self__.__name__ in _VALUES
            is_set, name = name == "__set__", func.__self__.__name__
            if is_set and name == "data" and args[1] is not args[0]:
                _refuse_new_values(args[0])
        else:
            is_read = name not in _WITHOUT_VALUES | _CONVERSIONS
        refused = f"{name} of a parameter was asked for, but its weights are offloaded"
        if is_read and not _OPEN:
            _refuse_values(refused)
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **(kwargs or {}))
        is_other = isinstance(found, torch.Tensor) and found is not args[0]
        if name in _CONVERSIONS and not _OPEN and is_other:
            _refuse_values(refused)
        return found

    @property
    def grad(self) -> torch.Tensor | None:
        """None, or an error where the gradient of the step just taken is asked for."""
        if self.gradient_is_used and not _OPEN:
            raise ConfigError(
                f"the gradient of a parameter of shape {tuple(self.shape)} was asked for",
                why="the engine has used each block's gradient for its update and let go of it",
                remedy="read the norm of all gradients in the log (grad_norm); look at or change "
                "single ones with parameter.register_hook(...), which runs in the backward pass; "
                "clip with max_grad_norm",
            )
        with torch._C.DisableTorchFunctionSubclass():
            return cast(torch.Tensor | None, _GRADIENT.__get__(self))

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            _GRADIENT.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def __repr__(self) -> str:  # type: ignore[override]
        return f"AwayParameter(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    def as_subclass(self, cls: Any) -> NoReturn:
        """torch gives it without asking."""
        _refuse_values("a parameter was asked for as another type, but its weights are offloaded")

    def __deepcopy__(self, memo: Any) -> NoReturn:
        _refuse_values("a copy of a parameter was asked for, but its weights are offloaded")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        _refuse_values("a parameter was to be saved, but its weights are offloaded")


def mark(parameter: torch.nn.Parameter, *, is_offloaded: bool) -> None:
    """Make a parameter one whose values cannot be read, or an ordinary one again."""
    if type(parameter) is (torch.nn.Parameter if is_offloaded else AwayParameter):
        parameter.__class__ = AwayParameter if is_offloaded else torch.nn.Parameter


def note_used_gradients(model: torch.nn.Module, *, are_used: bool) -> None:
    """Whether a gradient that is asked for now would be that of a step just taken."""
    for parameter in model.parameters():
        if isinstance(parameter, AwayParameter):
            parameter.gradient_is_used = are_used


def is_offloaded(parameter: torch.Tensor) -> bool:
    """Whether it is what engines leave in place of a parameter."""
    with torch._C.DisableTorchFunctionSubclass():
        is_one = parameter.numel() > 1 and not parameter.is_meta and not any(parameter.stride())
        return is_one and bool(parameter.detach().flatten()[0].isnan())


_OPEN: set[int] = set()
"""Modules of models that are in a step, by identity. Not kept in the hooks: copies of a model and
models around it have these too."""


def refuse_calls(model: torch.nn.Module, blocks: Iterable[torch.nn.Module]) -> None:
    """From now on, calling the model or a block of it while weights are offloaded is an error, and
    so is saving it."""
    for module in (model, *blocks):
        if _before_forward not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(_before_forward, prepend=True)
    if _before_state_dict not in model._state_dict_pre_hooks.values():
        model.register_state_dict_pre_hook(_before_state_dict)


@contextlib.contextmanager
def calls_allowed(model: torch.nn.Module) -> Iterator[None]:
    """Weights come in time: the model may be called, on any thread."""
    opened = {id(module) for module in model.modules()} - _OPEN
    _OPEN.update(opened)
    try:
        yield
    finally:
        _OPEN.difference_update(opened)


def _before_forward(module: torch.nn.Module, _args: Any) -> None:
    if id(module) not in _OPEN:
        _refuse_offloaded(module, f"{type(module).__name__} was called outside of a step")


def _before_state_dict(module: torch.nn.Module, _prefix: str, _keep_vars: bool) -> None:
    _refuse_offloaded(module, f"the state of {type(module).__name__} was asked for")


def _refuse_offloaded(module: torch.nn.Module, what: str) -> None:
    offloaded = next((name for name, own in module.named_parameters() if is_offloaded(own)), None)
    if offloaded is not None:
        _refuse_values(f"{what}, but its weights are offloaded, {offloaded} the first")


def _refuse_new_values(parameter: torch.Tensor) -> NoReturn:
    raise ConfigError(
        f"values were put into the data of a parameter of shape {tuple(parameter.shape)}, whose "
        "weights are offloaded",
        why="the next step brings its weights from SSD, and these values would be lost",
        remedy="set weights before attaching; after closing the engine put them in place with "
        "model.load_state_dict(values, assign=True)",
    )


def _refuse_values(what: str) -> NoReturn:
    raise ConfigError(
        what,
        why="lohan holds them on SSD and brings each block only while a step or an evaluation "
        "needs it; in their place are NaNs",
        remedy="compute with engine.evaluate() (trainer.evaluate(), trainer.predict()); save "
        "with trainer.save_model() or lohan export and load that model to generate; or read "
        "the weights from engine.weights()",
    )
