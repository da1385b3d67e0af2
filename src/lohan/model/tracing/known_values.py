"""Values that a trace knows although it runs on fake tensors: those of a batch and of buffers, and
of all that is made of these alone.

A model that counts its image tokens, looks into a mask or reads the sizes of pictures asks for
values on its way. They follow from the batch, not from weights, so they are computed beside the
fakes, on the processor, as long as they are small. Owns which values are known. Called by
`trace_ops`. Imports torch.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from lohan.units import MIB

_MOST_BYTES = 64 * MIB
"""Of what one operator makes; larger results are not followed."""
_ATEN = torch.ops.aten
_SHAPES_FROM_VALUES = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}


class KnownValues:
    """Of one trace. Every fake tensor with a known value is kept alive until `forget`."""

    def __init__(self, givens: Iterable[tuple[torch.Tensor, torch.Tensor]] = ()) -> None:
        """`givens`: tensors of the model that are no weights, and the fakes that stand for them."""
        self._givens = {id(fake): (fake, given) for given, fake in givens if _has_values(given)}
        self._known: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def note(self, fake: torch.Tensor, value: torch.Tensor) -> None:
        """`value` is what `fake` stands for; it must be nobody else's."""
        self._known[id(fake)] = (fake, value)

    def forget(self) -> None:
        """Let go of everything."""
        self._known.clear()
        self._givens.clear()

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The value of a tensor, if it is known. It may share memory with other values."""
        if type(tensor) is not FakeTensor:
            return tensor if _has_values(tensor) else None
        if id(tensor) in self._givens:
            fake, given = self._givens.pop(id(tensor))
            with _disable_current_modes():
                self.note(fake, given.detach().to("cpu", fake.dtype, copy=True))
        found = self._known.get(id(tensor))
        return None if found is None else found[1]

    def run(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What an operator returns for fake tensors, with the values that are known of it."""
        operator: Any = func
        tags = set(operator.tags)
        values = self._values(args, kwargs, tags)
        if tags & _SHAPES_FROM_VALUES:
            is_known, values = values is not None, values or self._sizes(args, kwargs)
            if values is not None:
                device = next(
                    leaf.device for leaf in tree_leaves((args, kwargs)) if _is_tensor(leaf)
                )
                real = _computed(func, values)
                return tree_map(lambda leaf: self._fake(leaf, device, is_known=is_known), real)
        result = func(*self._indexed(operator, args), **kwargs)
        made = [leaf for leaf in tree_leaves(result) if _is_tensor(leaf)]
        if values is None or sum(one.numel() * one.element_size() for one in made) > _MOST_BYTES:
            self._lose(operator, args, kwargs)
            return result
        real = [leaf for leaf in tree_leaves(_computed(func, values)) if _is_tensor(leaf)]
        for fake, value in zip(made, real, strict=True):
            self.note(fake, value)
        return result

    def _values(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], tags: set[torch.Tag]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """The arguments with values in place of fakes; None if one is unknown, or drawn."""
        if torch.Tag.nondeterministic_seeded in tags:
            return None
        is_known = True

        def value_of(leaf: Any) -> Any:
            nonlocal is_known
            if isinstance(leaf, torch.device):
                return torch.device("cpu")
            if not _is_tensor(leaf):
                return leaf
            found = self.of(leaf) if is_known else None
            is_known = found is not None
            return found

        found: tuple[tuple[Any, ...], dict[str, Any]] = tree_map(value_of, (args, kwargs))
        return found if is_known else None

    def _sizes(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Arguments that tell how large results are: whole numbers do (lengths), if some are known
        and all are."""
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if _is_tensor(leaf)]
        whole = [one for one in tensors if not one.is_floating_point()]
        if not whole or any(self.of(one) is None for one in whole):
            return None

        def size_of(leaf: Any) -> Any:
            if not _is_tensor(leaf):
                return leaf
            with _disable_current_modes():
                is_whole = not leaf.is_floating_point()
                return self.of(leaf) if is_whole else torch.zeros(leaf.shape, dtype=leaf.dtype)

        found: tuple[tuple[Any, ...], dict[str, Any]] = tree_map(size_of, (args, kwargs))
        return found

    def _indexed(self, operator: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Masks that choose elements as the numbers of these elements: so many there are."""
        if operator._overloadpacket is not _ATEN.index:
            return args
        indices: list[Any] = []
        for index in args[1]:
            is_mask = _is_tensor(index) and index.dtype in (torch.bool, torch.uint8)
            value = self.of(index) if is_mask else None
            if value is None:
                indices.append(index)
                continue
            with _disable_current_modes():
                columns = value.nonzero(as_tuple=True)
            indices += [self._fake(column, index.device) for column in columns]
        return (args[0], indices, *args[2:])

    def _fake(self, value: Any, device: torch.device, *, is_known: bool = True) -> Any:
        if not _is_tensor(value):
            return value
        fake = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
        if is_known:
            self.note(fake, value)
        return fake

    def _lose(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """What is overwritten with something unknown is unknown, and so is all that shares it."""
        for position, argument in enumerate(operator._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            written = args[position] if position < len(args) else kwargs.get(argument.name)
            for tensor in tree_leaves(written):
                value = self.of(tensor) if _is_tensor(tensor) else None
                if value is not None:
                    memory = value.untyped_storage()._cdata
                    self._known = {
                        key: (fake, one)
                        for key, (fake, one) in self._known.items()
                        if one.untyped_storage()._cdata != memory
                    }


class PythonValues(TorchFunctionMode):
    """Known values where a model leaves PyTorch: numbers for `torch.tensor`, arrays for NumPy."""

    def __init__(self, known: KnownValues) -> None:
        super().__init__()
        self._known = known

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in (torch.tensor, torch.as_tensor) and args and not _is_tensor(args[0]):
            numbers = tree_map(lambda leaf: leaf.tolist() if _is_tensor(leaf) else leaf, args[0])
            args = (numbers, *args[1:])
        elif func in (torch.Tensor.numpy, torch.Tensor.__array__):
            value = self._known.of(args[0])
            if value is not None:
                with _disable_current_modes():
                    return func(value.clone(), *args[1:], **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _computed(func: Callable[..., Any], values: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
    args, kwargs = values
    with _disable_current_modes(), torch.no_grad():
        return func(*args, **kwargs)


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor)


def _has_values(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and not tensor.is_meta
        and not tensor.requires_grad
        and tensor.nbytes <= _MOST_BYTES
    )
