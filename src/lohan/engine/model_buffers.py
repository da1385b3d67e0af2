"""A model's buffers in a seal: running statistics go on from where they were.

Owns which buffers a seal holds, their form in its metadata, and putting them back. They are part of
the manifest, so they are replaced with it in one instant and covered by its checksum. Persistent
buffers only: what a model leaves out of its `state_dict` is made anew by its code. Made by
`attach`; used by the engine when it seals, and by `train`.
"""

import base64
import binascii
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from lohan.errors import CheckpointError, ConfigError
from lohan.model.tracing.kept_contents import put_value
from lohan.ssd.checksums import checksum_memory

_SMALL_BYTES = 64 * 1024
"""Buffers up to this size are always sealed; larger ones (masks, tables) once they change."""


def persistent_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The buffers that are saved with a model, by their first names."""
    return {
        name: buffer
        for name, buffer in model.named_buffers()
        if name.rpartition(".")[2] not in _owner_of(model, name)._non_persistent_buffers_set
    }


class ModelBuffers:
    """The buffers of a model that is being trained. One caller at a time, between steps."""

    def __init__(self, model: torch.nn.Module, sealed: Mapping[str, Any] | None = None) -> None:
        """Take up the buffers of a seal or a copy (`to_json`), if there is one to go on from.

        Raises:
            CheckpointError: the seal's buffers are not those of this model; it is unchanged.
            ConfigError: a buffer is of a form that cannot be sealed.
        """
        self._model = model
        values = stored_buffers(sealed or {})
        for name, entry in (sealed or {}).items():
            self._refuse_other(name, entry)
        put_buffers(model, values)
        self._first = {name: _checksum(_bytes_of(name, b)) for name, b in self._current().items()}
        self._changed = {name for name, entry in (sealed or {}).items() if entry["is_changed"]}

    def to_json(self) -> dict[str, Any]:
        """All persistent buffers: values, or only a checksum of large ones that never changed."""
        found: dict[str, Any] = {}
        for name, buffer in self._current().items():
            values = _bytes_of(name, buffer)
            checksum = _checksum(values)
            if self._first.get(name) != checksum:
                self._changed.add(name)
            found[name] = {
                "dtype": str(buffer.dtype).removeprefix("torch."),
                "shape": list(buffer.shape),
                "checksum": checksum,
                "is_changed": name in self._changed,
            }
            if len(values) <= _SMALL_BYTES or name in self._changed:
                found[name]["values"] = base64.b64encode(values).decode("ascii")
        return found

    def _current(self) -> dict[str, torch.Tensor]:
        return persistent_buffers(self._model)

    def _refuse_other(self, name: str, entry: Mapping[str, Any]) -> None:
        try:
            owner, own_name = _owner_of(self._model, name), name.rpartition(".")[2]
        except AttributeError:
            owner, own_name = self._model, ""
        if own_name not in owner._buffers:
            raise CheckpointError(
                f"the seal holds a buffer {name} that the model does not have",
                why="the run was made with another model",
                remedy="attach the model the run was made with",
            )
        buffer = owner._buffers[own_name]
        if "values" not in entry and (
            buffer is None or _checksum(_bytes_of(name, buffer)) != entry["checksum"]
        ):
            raise CheckpointError(
                f"buffer {name} has other values than when the run was sealed",
                why="large buffers that training does not change are not in the seal, and what "
                "goes on would not be the same run",
                remedy="make the model with the same buffers as before",
            )


def stored_buffers(sealed: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The buffers whose values are in a seal.

    Raises:
        CheckpointError: an entry is not what was sealed.
    """
    found = {}
    for name, entry in sealed.items():
        if "values" not in entry:
            continue
        try:
            values = base64.b64decode(entry["values"], validate=True)
            dtype = getattr(torch, entry["dtype"])
            shape = [int(size) for size in entry["shape"]]
            if _checksum(values) != entry["checksum"]:
                raise ValueError("its checksum does not match")
            flat = torch.frombuffer(bytearray(values), dtype=torch.uint8) if values else None
            found[name] = (
                flat.view(dtype).reshape(shape)
                if flat is not None
                else torch.empty(shape, dtype=dtype)
            )
        except (AttributeError, binascii.Error, KeyError, RuntimeError, TypeError, ValueError) as e:
            raise CheckpointError(
                f"the buffer {name} in a seal cannot be read ({e})",
                why="it was not written by lohan, or by a later one",
                remedy="use the lohan that wrote it",
            ) from None
    return found


def changed_buffers(sealed: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The buffers in a seal that training changed: the others are as the model was made, where
    they may be known in a wider type. Raises as `stored_buffers`."""
    changed = {name: entry for name, entry in sealed.items() if entry["is_changed"]}
    return stored_buffers(changed)


def put_buffers(model: torch.nn.Module, values: Mapping[str, torch.Tensor]) -> None:
    """Give buffers of a model these values; where shape or type differ, another tensor."""
    for name, value in values.items():
        owner, own_name = _owner_of(model, name), name.rpartition(".")[2]
        buffer = owner._buffers[own_name]
        if buffer is None or buffer.shape != value.shape or buffer.dtype != value.dtype:
            device = buffer.device if buffer is not None else _device_of(model)
            owner._buffers[own_name] = value.to(device)
        else:
            put_value(buffer, value)


def _owner_of(model: torch.nn.Module, name: str) -> torch.nn.Module:
    return model.get_submodule(name.rpartition(".")[0])


def _device_of(model: torch.nn.Module) -> torch.device:
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def _bytes_of(name: str, buffer: torch.Tensor) -> bytes:
    if buffer.layout is not torch.strided or buffer.is_quantized:
        raise ConfigError(
            f"buffer {name} is {buffer.layout}, quantized: {buffer.is_quantized}",
            why="a seal holds the values of dense buffers",
            remedy="make it dense, or register it with persistent=False",
        )
    flat = buffer.detach().cpu().contiguous().reshape(-1)
    if not flat.numel():
        return b""
    content: bytes = flat.view(torch.uint8).numpy().tobytes()
    return content


def _checksum(content: bytes) -> int:
    memory = np.frombuffer(content, dtype=np.uint8)
    return checksum_memory(memory.ctypes.data, memory.size)
