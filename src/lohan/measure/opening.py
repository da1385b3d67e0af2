"""What is checked and opened before anything is measured.

Owns the refusals of impossible requests and the life of a device that was given by name.
"""

from lohan.device import Device, open_device
from lohan.errors import ConfigError


def check_numbers(seconds: float, sustained_seconds: float | None, num_threads: int | None) -> None:
    """Refuse times and counts that cannot be.

    Raises:
        ConfigError: naming the one.
    """
    for name, value in (("seconds", seconds), ("sustained_seconds", sustained_seconds)):
        if value is not None and not 0 < value <= 3600:
            raise ConfigError(
                f"{name} is {value}",
                why="a measurement takes some time, and at most an hour",
                remedy="give seconds, such as 0.5",
            )
    if num_threads is not None and num_threads < 1:
        raise ConfigError(
            f"num_threads is {num_threads}",
            why="an update runs on one thread or more",
            remedy="give 1 or more, or leave it out",
        )


class OpenedDevice:
    """A device by name, opened and closed; or one that is open already, left open."""

    def __init__(self, device: str | Device | None, gpu_bytes: int | None) -> None:
        self._is_own = device is None or isinstance(device, str)
        if device is None or isinstance(device, str):
            device = open_device(device, memory_bytes=gpu_bytes)
        self._device = device

    def __enter__(self) -> Device:
        return self._device

    def __exit__(self, *_: object) -> None:
        if self._is_own:
            self._device.close()
