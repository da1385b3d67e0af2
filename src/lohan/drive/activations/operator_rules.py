"""What operators do to memory, as far as storing and skipping their outputs depends on it.

Owns rules about single operators, from their schemas and the memory they touch. Knows neither
blocks nor stores. Used by `swap_modes`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lohan.model.tracing.trace_ops import reads_values, storage_key, tensors_in


def changed_in_place(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[torch.Tensor]:
    """Tensor arguments that the operator's schema says it writes to."""
    written: list[torch.Tensor] = []
    if func._schema.is_mutable:
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[position] if position < len(args) else kwargs.get(argument.name)
                written.extend(tensors_in(value))
    return written


def reason_not_to_store(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
) -> str | None:
    """Why the result of a dispatched call can be neither stored nor skipped; None if it can."""
    outputs = tensors_in(result)
    if not outputs:
        return "it has no tensor output"
    written = changed_in_place(func, args, kwargs)
    if written:
        is_plain = len(written) == 1 and len(outputs) == 1 and outputs[0] is written[0]
        return None if is_plain else "it changes several tensors, or returns another"
    inputs = {storage_key(tensor) for tensor in tensors_in((args, kwargs))}
    if any(storage_key(tensor) in inputs for tensor in outputs):
        return "its output is a view of its input"
    return None


class SkippedValues:
    """Memory of outputs that a re-run will not have, as long as it is theirs.

    By storage, which is not kept alive: memory that comes up again is its new owner's.
    """

    def __init__(self) -> None:
        self._memory: set[int] = set()

    def enter(
        self,
        func: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        result: Any,
        *,
        is_skipped: bool,
        is_stored: bool = False,
    ) -> None:
        """An operator has made these tensors, or changed them in place; views are neither.

        Memory that is older than the block (a buffer) has no operator that made it: what is written
        there from skipped values is as little there as they are, unless it is stored.
        """
        given = tensors_in((args, kwargs))
        memory = {storage_key(tensor) for tensor in tensors_in(result)}
        if not func._schema.is_mutable:
            memory -= {storage_key(tensor) for tensor in given}
        elif not is_skipped and not is_stored:
            memory = {storage_key(tensor) for tensor in changed_in_place(func, args, kwargs)}
            read = {storage_key(tensor) for tensor in given} - memory
            is_skipped = bool(read & self._memory)
            if not is_skipped:
                return  # of a view, the rest of the memory is as it was
        if is_skipped:
            self._memory |= memory
        else:
            self._memory -= memory

    def are_read_by(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
    ) -> bool:
        """Whether an operator computes tensors from skipped values.

        Views read nothing, and what is only written to (statistics of a module) is put back.
        """
        if func._schema.is_mutable or not reads_values(func):
            return False
        read = {storage_key(tensor) for tensor in tensors_in((args, kwargs))}
        made = tensors_in(result)
        is_view = any(storage_key(tensor) in read for tensor in made)
        return bool(made) and not is_view and bool(read & self._memory)
