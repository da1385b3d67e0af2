"""How fast the processor updates parameters: the AdamW kernel on the split state, in main memory.

Owns the timed loop. The state is made larger than the processor's caches, as it is in training.
Called by `machine.py`.
"""

import numpy as np

from lohan.measure.figure import Clock, Figure, measure_rounds
from lohan.optimizer import AdamWSettings, MemoryRange, NumberFormat, SplitState, update_states

NUM_PARAMETERS = 8 * 2**20
BYTES_PER_PARAMETER = 14
"""12 of state and 2 of gradient."""
_LEAST_PARAMETERS = 2**16


def measure_updates(
    *,
    num_threads: int,
    seconds: float,
    clock: Clock,
    room_bytes: int | None = None,
    num_parameters: int = NUM_PARAMETERS,
) -> Figure:
    """Parameters per second of `update_states`. Runs on: the caller and the kernel's threads.

    `room_bytes` is how much memory there is for it.
    """
    if room_bytes is not None:
        num_parameters = min(num_parameters, room_bytes // BYTES_PER_PARAMETER)
    num_parameters = max(num_parameters, _LEAST_PARAMETERS)
    # bf16 numbers around 0.01, both signs: zeros or denormals would be timed otherwise.
    noise = np.random.default_rng(0).normal(0.0, 0.01, num_parameters).astype(np.float32)
    gradients = (noise.view(np.uint32) >> 16).astype(np.uint16)
    weights, low = gradients.copy(), np.zeros(num_parameters, np.uint16)
    first, second = (np.zeros(num_parameters, np.float32) for _ in range(2))
    state = SplitState(p16=weights, lo16=low, m32=first, v32=second)
    grad = MemoryRange(
        address=gradients.ctypes.data,
        num_elements=num_parameters,
        number_format=NumberFormat.BF16,
    )
    settings, step = AdamWSettings(lr=1e-4), 0

    def update() -> float:
        nonlocal step
        step += 1
        update_states(grad, state, settings=settings, step=step, num_threads=num_threads)
        return num_parameters

    update()
    return measure_rounds(update, seconds=seconds, clock=clock)
