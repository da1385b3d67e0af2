"""The test accelerator at the speed of another one: its compute and copies take set times."""

import contextlib
from collections.abc import Iterator

from lohan.device.accelerator import AcceleratorDevice
from lohan.device.emulated import EmulatedRates
from lohan.vocabulary import Lane
from support import accelerator


class PacedAccelerator(AcceleratorDevice):
    """As the emulated device with these rates, but asynchronous: launching takes what it takes."""

    def __init__(self, *, memory_bytes: int, rates: EmulatedRates) -> None:
        super().__init__(memory_bytes=memory_bytes)
        self.rates = rates
        calls = accelerator.calls()
        calls.set_poison(False)
        calls.set_rate(self._copy_stream_id(Lane.GPU_TO_RAM), rates.gpu_to_ram_bytes_per_second)
        calls.set_rate(self._copy_stream_id(Lane.RAM_TO_GPU), rates.ram_to_gpu_bytes_per_second)

    @contextlib.contextmanager
    def compute(self) -> Iterator[None]:
        """What was launched before a task and not charged is no part of it."""
        with super().compute():
            accelerator.calls().pace(self._compute_stream.stream_id, 0)
            yield

    def charge(
        self, *, num_flops: float = 0.0, num_bytes: float = 0.0, fixed_seconds: float = 0.0
    ) -> None:
        """What was launched since the last charge takes at least as long as it would."""
        assert self.rates.flops_per_second is not None
        seconds = num_flops / self.rates.flops_per_second + fixed_seconds
        accelerator.calls().pace(self._compute_stream.stream_id, round(1e9 * seconds))

    def take_gaps(self) -> list[float]:
        """Microseconds for which compute had nothing to do between each two pieces so far."""
        found: list[float] = accelerator.calls().take_gaps(self._compute_stream.stream_id)
        return found

    def close(self) -> None:
        """Poison again."""
        super().close()
        accelerator.calls().set_poison(True)

    def _copy_stream_id(self, lane: Lane) -> int:
        number: int = self._copy_streams[lane].stream_id
        return number
