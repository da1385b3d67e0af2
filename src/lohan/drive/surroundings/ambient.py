"""Settings around a forward that belong to a thread or to the model, carried along or put aside.

Owns: autocast, grad mode, default device and type as they were where a block was called (threads do
not inherit them); switching off, for a step, what a model would do about memory itself (cached keys
and values, gradient checkpointing). Called by `segmented_model` and `block_run`.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention import _cur_sdpa_kernel_backends, _sdpa_kernel

ProcessSettings = tuple[Any, ...]


def process_settings() -> ProcessSettings:
    """Settings of PyTorch for all threads that a model may change for a while: the default type,
    and which kernels attention may use."""
    return (torch.get_default_dtype(), *_cur_sdpa_kernel_backends())


def put_process_settings(settings: ProcessSettings) -> None:
    """Set what differs."""
    if process_settings() != settings:
        torch.set_default_dtype(settings[0])
        _sdpa_kernel(settings[1:])


@dataclass(frozen=True, slots=True, kw_only=True)
class Ambient:
    """Settings of PyTorch that change what operators compute: those of a thread, and those of the
    process that micro-batches side by side must not change for each other."""

    grad_enabled: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    autocast_cache: bool
    default_device: torch.device
    process: ProcessSettings

    @classmethod
    def here(cls, device_types: tuple[str, ...]) -> "Ambient":
        """As they are on this thread now."""
        return cls(
            grad_enabled=torch.is_grad_enabled(),
            autocast=tuple(
                (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
                for kind in device_types
            ),
            autocast_cache=torch.is_autocast_cache_enabled(),
            default_device=torch.get_default_device(),
            process=process_settings(),
        )

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Run with these settings."""
        with contextlib.ExitStack() as stack:
            stack.callback(put_process_settings, process_settings())
            put_process_settings(self.process)
            stack.enter_context(torch.set_grad_enabled(self.grad_enabled))
            if torch.get_default_device() != self.default_device:
                stack.enter_context(self.default_device)
            for kind, enabled, dtype in self.autocast:
                if enabled or torch.is_autocast_enabled(kind):
                    stack.enter_context(
                        torch.autocast(
                            kind, dtype=dtype, enabled=enabled, cache_enabled=self.autocast_cache
                        )
                    )
            try:
                yield
            finally:
                # Casts of weights are cached by identity, and the weights are about to leave.
                torch.clear_autocast_cache()


@contextlib.contextmanager
def memory_features_off(model: torch.nn.Module) -> Iterator[None]:
    """Switch off key-value caches and the model's own gradient checkpointing for a while.

    A cache would be written a second time by the re-run of a block; checkpointing would run
    blocks a third time. Neither changes a result of training. Known by their transformers names.
    """
    owners: list[Any] = list(model.modules())
    configs: dict[int, object] = {}
    for module in owners:
        config = getattr(module, "config", None)
        if config is not None and not isinstance(config, torch.nn.Module):
            configs[id(config)] = config
    changed: list[tuple[object, str]] = []
    asked = model.register_forward_pre_hook(_without_cache, with_kwargs=True)
    try:
        for owner in owners:
            if vars(owner).get("gradient_checkpointing") is True:
                owner.gradient_checkpointing = False
                changed.append((owner, "gradient_checkpointing"))
        for config in configs.values():
            if getattr(config, "use_cache", None) is True:
                config.use_cache = False  # type: ignore[attr-defined]
                changed.append((config, "use_cache"))
        yield
    finally:
        asked.remove()
        for owner, name in changed:
            setattr(owner, name, True)


def _without_cache(
    _: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """What a call asks for goes before what the configuration says."""
    return (args, {**kwargs, "use_cache": False}) if kwargs.get("use_cache") is True else None
