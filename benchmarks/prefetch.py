"""How long a prefetch takes behind queued compute, on the test accelerator; now and as it was.

    python benchmarks/prefetch.py [--compute-ms 200] [--repeats 5]

A copy of 1 MiB into fresh device memory is asked for while that much compute is queued. "before":
memory from the compute stream's pool, with both copy streams waiting for what compute has queued;
"now": the device as it is (`device/accelerator.py`, note "Memory of no queue"). Medians; the last
line is one JSON object.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch

from lohan.device.accelerator import AcceleratorDevice
from lohan.device.memory import DeviceMemory, allocate_flat
from lohan.vocabulary import Lane

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support import accelerator

NUM_BYTES = 1 << 20
NUM_KERNELS = 10


class AsItWas(AcceleratorDevice):
    """Memory from the compute stream's pool."""

    def alloc(self, nbytes: int) -> DeviceMemory:
        """Copies queued from now on start after the compute queued so far."""
        with self._on(self._compute_stream):
            memory = DeviceMemory(allocate_flat(nbytes, self.torch_device, self.name))
        born = self._event_on(self._compute_stream)
        for stream in self._copy_streams.values():
            stream.wait_event(born.event)
        return memory


def measure(device: AcceleratorDevice, compute_ms: float) -> float:
    ram = torch.zeros(NUM_BYTES, dtype=torch.uint8)
    device.pin(ram.data_ptr(), NUM_BYTES)
    accelerator.calls().set_delay(0, round(1000 * compute_ms / NUM_KERNELS))
    with device.compute():
        values = torch.zeros(8, device=device.torch_device)
        for _ in range(NUM_KERNELS - 1):
            values = values + 1
    started = time.perf_counter()
    memory = device.alloc(NUM_BYTES)
    device.wait(device.copy_async(memory, ram, lane=Lane.RAM_TO_GPU))
    seconds = time.perf_counter() - started
    accelerator.calls().set_delay(0, 0)
    device.synchronize()
    device.free(memory)
    device.unpin(ram.data_ptr())
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compute-ms", type=float, default=200.0)
    parser.add_argument("--repeats", type=int, default=5)
    asked = parser.parse_args()
    accelerator.load()
    found = {}
    for name, kind in (("before", AsItWas), ("now", AcceleratorDevice)):
        with kind() as device:
            times = [measure(device, asked.compute_ms) for _ in range(asked.repeats)]
        found[f"{name}_ms"] = round(1000 * statistics.median(times), 2)
        print(f"{name}: {found[f'{name}_ms']} ms behind {asked.compute_ms} ms of compute")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
