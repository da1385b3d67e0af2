"""Mappings that layers hand to each other and write into: keys and values that later layers read.

What a block puts there would leave it without being returned, and a block that is run again would
put it there again. So a block gets a copy for each run, and what it has put there is returned with
its outputs. Called by `micro_batch`.
"""

from collections import UserDict
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

from lohan.errors import ConfigError

_KINDS = (dict, UserDict)

Shared = dict[str, MutableMapping[Any, Any]]
"""Those among the keyword arguments of a block, by name."""


def shared_in(arguments: Mapping[str, Any]) -> Shared:
    """The mappings that a block is given, and may write into."""
    return {name: one for name, one in arguments.items() if type(one) in _KINDS}


def as_arguments(kwargs: dict[str, Any], shared: Shared) -> dict[str, Any]:
    """Arguments whose mappings are such as PyTorch takes apart."""
    return kwargs | {name: dict(one) for name, one in shared.items()}


def returning_written(forward: Callable[..., Any], shared: Shared) -> Callable[..., Any]:
    """A block's forward that returns with its outputs what it has put into mappings."""
    kinds: dict[str, Any] = {name: type(one) for name, one in shared.items()}

    def run(*args: Any, **kwargs: Any) -> tuple[Any, dict[str, dict[Any, Any]]]:
        own = {name: kind(kwargs[name]) for name, kind in kinds.items()}
        outputs = forward(*args, **(kwargs | own))
        written: dict[str, dict[Any, Any]] = {}
        for name, after in own.items():
            before = kwargs[name]
            if before.keys() - after.keys():
                raise ConfigError(
                    f"a block removes entries of its argument {name}",
                    why="it is run again from its arguments in backward",
                    remedy="let it put entries there, or return what others need",
                )
            written[name] = {
                key: value
                for key, value in after.items()
                if key not in before or before[key] is not value
            }
        return outputs, written

    return run


def write(shared: Shared, written: Mapping[str, dict[Any, Any]]) -> None:
    """Put what a block has returned where the model looks for it."""
    for name, entries in written.items():
        shared[name].update(entries)
