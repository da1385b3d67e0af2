"""The adapter of a trainer's model: from before TRL makes it until its files are written.

Owns what of a trainer is different where a frozen base has an adapter. Used by the trainers.

Note "stand-ins". PEFT makes an adapter where the layer it adapts is, so on the meta device, where
the base of a model given by name is, it would have no values. While PEFT works, parameters are
therefore views of one zero, which have shape, type and device and no memory; then they are on meta
again, and first values are the same as on a base in memory.
"""

import contextlib
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import nn

from lohan.train.adapters.adapter_files import config_fields, export_adapter, saved_names
from lohan.train.adapters.kinds import adapter_of, is_adapted, refuse_unexpected, refuse_untaken
from lohan.train.adapters.prompts import has_prompts, keep_prefixes
from lohan.train.weights.check_export import ModelDirectoryReport

ADAPTER = "adapter"
"""Its name in a seal: what adapter_config.json holds."""
ADAPTER_TENSORS = "adapter_tensors"
"""Likewise: names in its file, each with the name of the tensor in the states."""
# Where the base lies and who wrote the adapter does not make it another one.
_NOT_THE_ADAPTER = ("base_model_name_or_path", "revision", "peft_version", "auto_mapping")
_REFERENCE = "ref"
"""TRL's name of the copy it makes of an adapter that a model came with."""
Tensors = Iterable[tuple[str, torch.Tensor]]
_ORIGINAL = ".original_module."


class Adapting:
    """Made before the trainer underneath is, which makes the adapter; then comes `finish`."""

    def __init__(self, model: Any, peft_config: Any, *, is_named: bool) -> None:
        self._is_named = is_named
        self._is_given = is_adapted(model)
        """Whether the model came with the adapter."""
        self._model: Any = None
        self._names: dict[str, tuple[str, ...]] | None = None
        self._hollow: HollowBase | None = None
        self._saved: dict[str, str] = {}
        if isinstance(model, torch.nn.Module):
            refuse_unexpected(model, has_values=not is_named)
        if hasattr(peft_config, "peft_type"):  # all else TRL refuses
            refuse_untaken(peft_config, has_values=not is_named)
            if is_named:
                self._hollow = HollowBase(model)

    def finish(self, model: Any) -> None:
        """Look at the model the trainer has made of the one it was given.

        Raises:
            ConfigError: it cannot be trained exactly.
        """
        if self._is_given and len(model.peft_config) > 1 and _REFERENCE in model.peft_config:
            model.delete_adapter(_REFERENCE)  # what it gives is computed before it would differ
        refuse_unexpected(model, has_values=not self._is_named)
        if not is_adapted(model):
            return
        self._model = model
        if has_prompts(adapter_of(model)[1]):
            keep_prefixes(model)
        if self._is_named:
            assert self._hollow is not None, "parameters are given by name, wherever they stood"
            self._names = self._hollow.finish(model, adapter_of(model)[0])
            self._hollow = None
        # Now: PEFT looks at values, which the engine takes.
        self._saved = saved_names(model, is_named=self._is_named)
        # With checkpointing, TRL has gradients begin at the embedding. None is needed there.
        base = model.get_base_model()
        if hasattr(base, "disable_input_require_grads"):
            base.disable_input_require_grads()

    @property
    def is_on(self) -> bool:
        """Whether the model has an adapter; if not, nothing here is to be called."""
        return self._model is not None

    @contextlib.contextmanager
    def as_reference(self) -> Iterator[None]:
        """The model, before its first step, as TRL compares it with itself: without an adapter
        that training begins with, with one that it came with. No parameter is touched."""
        parts = [] if self._is_given or not self.is_on else list(self._model.modules())
        parts = [one for one in parts if hasattr(one, "_disable_adapters")]
        before = [one._disable_adapters for one in parts]
        try:
            for one in parts:
                one._disable_adapters = True
            yield
        finally:
            for one, is_off in zip(parts, before, strict=True):
                one._disable_adapters = is_off

    def first_weights(
        self, tensors: Iterator[tuple[str, torch.Tensor]], dtype: torch.dtype
    ) -> Tensors:
        """First values of a model by name: those of its base as they come, and of its adapter,
        whose parameters are then in the type they compute in."""
        if self._names is None:
            return tensors
        made = [(name, one) for name, one in self._model.named_parameters() if not one.is_meta]
        drawn = [(name, one.detach()) for name, one in made]
        for _, one in made:
            one.data = one.data.to(dtype)
        return chain(drawn, renamed(tensors, self._names))

    def identity(self) -> dict[str, Any]:
        """What makes the adapter the one of a run."""
        fields = config_fields(self._model) if self.is_on else {}
        return {f"adapter.{k}": v for k, v in fields.items() if k not in _NOT_THE_ADAPTER}

    def sealed(self, model_name: str) -> dict[str, Any]:
        """What a seal says of the adapter, so that it can be exported."""
        if not self.is_on:
            return {}
        return {ADAPTER: self._fields(model_name), ADAPTER_TENSORS: self._saved}

    @property
    def are_frozen_written(self) -> bool:
        """Whether weights that are not trained are among those in the files of the model."""
        if not self.is_on:
            return True
        trained = {name for name, one in self._model.named_parameters() if one.requires_grad}
        return not trained.issuperset(self._saved.values())

    def export(
        self, weights: Tensors, folder: pathlib.Path, *, model_name: str, tokenizer: Any
    ) -> ModelDirectoryReport:
        """Write the adapter, in PEFT's layout. Raises as `export_adapter`."""
        return export_adapter(
            {name: tuple(one.shape) for name, one in self._model.named_parameters()},
            self._saved,
            weights,
            folder,
            fields=self._fields(model_name),
            tokenizer=tokenizer,
            should_merge=True,
        )

    def _fields(self, model_name: str) -> dict[str, Any]:
        """What the adapter's file says; the base is called as the user called it."""
        if not self._is_named:
            return config_fields(self._model)
        is_path = os.path.exists(model_name)
        return config_fields(self._model, os.path.abspath(model_name) if is_path else model_name)


def with_frozen(
    model: Any, trained: Tensors | None, first: Callable[[], Tensors | None]
) -> Tensors | None:
    """Values of an archive, which has what is trained, and of the base that belongs to it."""
    frozen = {name for name, one in model.named_parameters() if not one.requires_grad}
    if trained is None or not frozen:
        return trained
    given = first()
    rest: Tensors = model.named_parameters() if given is None else given
    return chain(trained, ((name, one.detach()) for name, one in rest if name in frozen))


def num_written(model: Any) -> int:
    """Parameters that the model's files hold in 16 bits; those of an adapter count double."""
    if not is_adapted(model):
        return sum(int(parameter.numel()) for parameter in model.parameters())
    return 2 * sum(int(one.numel()) for one in model.parameters() if one.requires_grad)


class HollowBase:
    """A base of stand-ins, from before adapters are made until `finish`."""

    def __init__(self, model: nn.Module) -> None:
        self._names: dict[int, str] = {}
        self._kept: list[nn.Parameter] = []  # an id is of what lives
        named = {id(p): name for name, p in model.named_parameters()}

        def stand_in(parameter: nn.Parameter) -> nn.Parameter:
            zero = torch.zeros((), dtype=parameter.dtype, device="cpu")
            made = nn.Parameter(zero.expand(parameter.shape), parameter.requires_grad)
            self._names[id(made)] = named[id(parameter)]
            self._kept.append(made)
            return made

        _replace(model, lambda parameter: stand_in(parameter) if parameter.is_meta else None)

    def finish(self, model: nn.Module, adapter: str) -> dict[str, tuple[str, ...]]:
        """Take the stand-ins out again, and copies of them that are trained whole.

        Returns:
            For each name of the base the names it has in `model`.
        """
        parameters = dict(model.named_parameters(remove_duplicate=False))
        owners: dict[int, str] = dict(self._names)
        for name, parameter in parameters.items():
            original = name.replace(f".modules_to_save.{adapter}.", _ORIGINAL)
            if original != name:
                owners[id(parameter)] = self._names[id(parameters[original])]
        found: dict[str, list[str]] = {name: [] for name in self._names.values()}
        for name, parameter in model.named_parameters():
            if id(parameter) in owners:
                found[owners[id(parameter)]].append(name)

        def on_meta(parameter: nn.Parameter) -> nn.Parameter | None:
            if id(parameter) not in owners:
                return None
            nothing = torch.empty_like(parameter, device="meta")
            return nn.Parameter(nothing, parameter.requires_grad)

        _replace(model, on_meta)
        self._kept.clear()
        return {name: tuple(names) for name, names in found.items()}


def _replace(model: nn.Module, made_of: Callable[[nn.Parameter], nn.Parameter | None]) -> None:
    """Put others in the place of parameters, one for all modules that share one."""
    made: dict[int, nn.Parameter | None] = {}
    kept = list(model.parameters())  # an id is of what lives
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in made:
                made[id(parameter)] = made_of(parameter)
            found = made[id(parameter)]
            if found is not None:
                module._parameters[name] = found
    del kept


def renamed(
    tensors: Iterator[tuple[str, torch.Tensor]], names: dict[str, tuple[str, ...]]
) -> Iterator[tuple[str, Any]]:
    """Tensors of a base by the names they have under an adapter; a copied one comes twice."""
    for name, tensor in tensors:
        for own in names[name]:
            yield own, tensor
        del tensor
