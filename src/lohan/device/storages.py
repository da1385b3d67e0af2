"""Counts the tensors that compute makes on a device whose tensors are ordinary CPU tensors.

Owns the dispatch mode that sees every operator, books each storage an operator makes and gives it
back when the last tensor or saved activation over it dies. Does not see scratch memory inside a
kernel, nor a storage resized later. Entered by `compute()` of the emulated device.
"""

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lohan.device.memory import MemoryLedger


class _StorageReference(weakref.ref[torch.UntypedStorage]):
    """A weak reference that knows what to give back; cheaper than a closure per tensor."""

    __slots__ = ("key", "nbytes")
    key: int
    nbytes: int


class StorageBook:
    """Storages made by compute and still alive. Shared by all threads that compute."""

    def __init__(self, ledger: MemoryLedger) -> None:
        self._ledger = ledger
        # torch keeps the Python object of a storage for as long as the storage itself, so the weak
        # reference dies with the memory, not with the last Python name for it.
        self._alive: dict[int, _StorageReference] = {}
        self._makes_storage: dict[Any, bool] = {}

    def makes_storage(self, operator: Any) -> bool:
        """Whether the operator returns memory that is not one of its arguments'."""
        known = self._makes_storage.get(operator)
        if known is None:
            schema = getattr(operator, "_schema", None)  # operators that take functions have none
            known = schema is None or any(value.alias_info is None for value in schema.returns)
            self._makes_storage[operator] = known
        return known

    def add(self, tensor: torch.Tensor, arguments: Any = ()) -> None:
        """Book the storage of a result unless it is booked, or an argument's. Raises DoesNotFit."""
        if not tensor.is_cpu or tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        if storage.device.type == "meta":
            return  # A fake tensor calls itself the CPU's, and has no memory.
        key = storage._cdata
        seen = self._alive.get(key)
        if seen is not None and seen() is storage:
            return
        # Some operators (`_unsafe_view`) call a view of their argument new, and the argument may
        # lie in memory that is booked elsewhere: a slot of the device.
        if any(own.untyped_storage()._cdata == key for own in _tensors_in(arguments)):
            return
        nbytes = storage.nbytes()
        self._ledger.take_compute(nbytes)
        reference = _StorageReference(storage, self._gone)
        reference.key, reference.nbytes = key, nbytes
        self._alive[key] = reference

    def _gone(self, reference: weakref.ref[torch.UntypedStorage]) -> None:
        # Runs on whichever thread lets go last, and must not block there.
        assert isinstance(reference, _StorageReference)
        if self._alive.get(reference.key) is reference:
            del self._alive[reference.key]
        self._ledger.return_compute(reference.nbytes)


def _tensors_in(arguments: Any) -> Iterator[torch.Tensor]:
    for argument in arguments:
        if isinstance(argument, torch.Tensor) and argument.layout is torch.strided:
            yield argument


class CountedCompute(TorchDispatchMode):
    """Books what operators make while it is entered; one instance per entry, shared book."""

    def __init__(self, book: StorageBook) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._book = book

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operator, then book what it made."""
        result = func(*args, **kwargs) if kwargs else func(*args)
        book = self._book
        if book.makes_storage(func):
            if isinstance(result, torch.Tensor):
                book.add(result, args)
            elif isinstance(result, (tuple, list)):
                for item in result:
                    if isinstance(item, torch.Tensor):
                        book.add(item, args)
        return result
