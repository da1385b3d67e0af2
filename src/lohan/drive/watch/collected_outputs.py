"""What transformers collects of the modules inside blocks while a model runs: router logits for the
loss of a mixture of experts, attention maps.

Its hooks add to lists that a context variable names, where a block that is run twice would add
twice, and tensors would leave the block without being returned. So a block gets lists of its own
for each run, and what is in them after it is returned with its outputs. Known by the names of
transformers 5; earlier versions return these tensors from every layer. Called by `micro_batch`.
"""

import sys
from collections.abc import Callable, Mapping
from typing import Any

Collected = dict[str, Any]
"""Lists by the name of what they collect, and some settings."""


def active_collection() -> Collected | None:
    """What the model that runs on this thread wants to be collected; None if nothing is."""
    variable = _variable()
    return variable.get() if variable is not None else None


def returning_collected(
    forward: Callable[..., Any], collection: Collected
) -> Callable[..., tuple[Any, dict[str, tuple[Any, ...]]]]:
    """A block's forward that returns with its outputs what was collected in it."""
    # Some hooks look at how many there are already.
    numbers = {name: len(found) for name, found in collection.items() if isinstance(found, list)}

    def run(*args: Any, **kwargs: Any) -> tuple[Any, dict[str, tuple[Any, ...]]]:
        own = {
            name: [None] * numbers[name] if name in numbers else value
            for name, value in collection.items()
        }
        variable = _variable()
        token = variable.set(own)
        try:
            outputs = forward(*args, **kwargs)
        finally:
            variable.reset(token)
        return outputs, {name: tuple(own[name][number:]) for name, number in numbers.items()}

    return run


def add_collected(collection: Collected, found: Mapping[str, tuple[Any, ...]]) -> None:
    """Put what a block has returned where the model looks for it."""
    for name, values in found.items():
        collection[name].extend(values)


def _variable() -> Any:
    module = sys.modules.get("transformers.utils.output_capturing")
    return getattr(module, "_active_collector", None)
