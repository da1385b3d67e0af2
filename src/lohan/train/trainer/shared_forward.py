"""One pass through a model's blocks for a loss that calls the model more than once.

Owns remembering what the blocks gave within one loss. TRL calls the model a second time for its
metrics, or for logits to hand out, with the inputs of the first; the engine has the weights of each
block there once. Used by `lohan.SFTTrainer`.
"""

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any

import torch

from lohan.errors import ConfigError
from lohan.train.adapters.kinds import is_adapted


class OneForward:
    """Installed in a model's backbone (what a language model has below its head), before training.

    Within `per_loss`, a second call of the backbone with the same inputs returns what the first one
    gave. Outside of it, and for other inputs, nothing is different. Each thread has a memory of its
    own, as each micro-batch has its thread.
    """

    def __init__(self, model: Any) -> None:
        self._memory = threading.local()
        if is_adapted(model):
            model = model.get_base_model()
        backbone = getattr(model, "base_model", None)
        if backbone is None or backbone is model:
            return
        forward = backbone.forward

        @functools.wraps(forward)
        def remembered(*args: Any, **kwargs: Any) -> Any:
            calls = getattr(self._memory, "calls", None)
            if calls is None or args:
                return forward(*args, **kwargs)
            given = {name: value for name, value in kwargs.items() if value is not None}
            for before, output in calls:
                if _is_same(before, given):
                    return output
            output = forward(**kwargs)
            calls.append((given, output))
            return output

        backbone.forward = remembered

    @contextlib.contextmanager
    def per_loss(self) -> Iterator[None]:
        """Around the computation of one loss on one thread."""
        self._memory.calls = []
        try:
            yield
        finally:
            self._memory.calls = None


def _is_same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        one[name] is other[name]
        or (
            not isinstance(one[name], torch.Tensor)
            and not isinstance(other[name], torch.Tensor)
            and one[name] == other[name]
        )
        for name in one
    )


def refuse_second_draws(model: Any, setting: str) -> None:
    """Refuse a loss that runs a model with dropout twice: one pass cannot draw as two do.

    Raises:
        ConfigError: some dropout is on.
    """
    found = [
        name
        for name, part in model.named_modules()
        if isinstance(part, torch.nn.Dropout) and part.p
    ]
    settings = model.config.get_text_config().to_dict()
    found += [
        f"config.{name}"
        for name, value in settings.items()
        if "drop" in name and isinstance(value, float) and value > 0
    ]
    if found:
        raise ConfigError(
            f"{setting} is not supported for a model with dropout ({found[0]})",
            why="TRL runs the model twice for it, and the second run draws other random numbers",
            remedy=f"set the dropout to 0, or leave {setting} out",
        )
