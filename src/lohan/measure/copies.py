"""How fast bytes go between main memory and the device, each way alone and both at once.

Owns the timed loops over the device's two copy lanes, with main memory pinned where the device can.
Called by `machine.py`; calls `lohan.device` only, so every kind of device is measured alike.
"""

import ctypes
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from lohan.device import Device, DeviceMemory, Event
from lohan.errors import HardwareError
from lohan.measure.figure import NUM_ROUNDS, Clock, Figure, measure_rounds, rate_of
from lohan.ssd import Buffer, BufferPool
from lohan.units import MIB
from lohan.vocabulary import Lane

PIECE_BYTES = 64 * MIB
_LEAST_PIECE_BYTES = MIB
_NUM_IN_FLIGHT = 2
_COPY_LANES = (Lane.RAM_TO_GPU, Lane.GPU_TO_RAM)


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyFigures:
    """What the links between RAM and GPU do."""

    ram_to_gpu: Figure
    gpu_to_ram: Figure
    both_ways_slowdown: float
    """How much longer equal bytes both ways take than the slower way alone; 1 is not at all."""
    is_pinned: bool

    @property
    def ram_to_gpu_per_second(self) -> float:
        """Rate that holds while the other way is busy too."""
        return self.ram_to_gpu.per_second / self.both_ways_slowdown

    @property
    def gpu_to_ram_per_second(self) -> float:
        """Rate that holds while the other way is busy too."""
        return self.gpu_to_ram.per_second / self.both_ways_slowdown


def measure_copies(
    device: Device, *, seconds: float, clock: Clock, piece_bytes: int = PIECE_BYTES
) -> CopyFigures:
    """Copy pieces for a while. Runs on: the caller. May block: on the copies.

    Raises:
        DoesNotFit: there is no room for even a small piece.
        HardwareError: a copy failed.
    """
    if device.memory_bytes is not None:
        # Four pieces live on the device: an eighth each leaves half to whoever else is there.
        piece_bytes = min(piece_bytes, max(device.memory_bytes // 8, _LEAST_PIECE_BYTES))
        piece_bytes = piece_bytes // 4096 * 4096
    with _ends(device, piece_bytes) as ends:
        alone = {
            lane: measure_rounds(
                lambda lane=lane: _copy(device, ends, (lane,)),  # type: ignore[misc]
                seconds=seconds,
                clock=clock,
            )
            for lane in _COPY_LANES
        }
        slowdown = 1.0
        if not device.shares_ram:
            slowdown = _both_ways_slowdown(device, ends, alone, seconds, clock)
        return CopyFigures(
            ram_to_gpu=alone[Lane.RAM_TO_GPU],
            gpu_to_ram=alone[Lane.GPU_TO_RAM],
            both_ways_slowdown=slowdown,
            is_pinned=ends.is_pinned,
        )


def measure_ram_copies(*, seconds: float, clock: Clock, piece_bytes: int = PIECE_BYTES) -> Figure:
    """How fast one thread copies main memory: no drive gets its bytes into RAM faster."""
    pool = BufferPool("measure copies")
    buffers = [pool.allocate(piece_bytes) for _ in range(2)]
    try:
        source, target = (buffer.address for buffer in buffers)

        def copy() -> float:
            ctypes.memmove(target, source, piece_bytes)
            return piece_bytes

        copy()
        return measure_rounds(copy, seconds=seconds, clock=clock)
    finally:
        for buffer in buffers:
            pool.take_back(buffer)
        pool.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ends:
    """Memory of both sides, of its own for every copy in flight."""

    ram: dict[Lane, list[Buffer]]
    gpu: dict[Lane, list[DeviceMemory]]
    piece_bytes: int
    is_pinned: bool


@contextmanager
def _ends(device: Device, piece_bytes: int) -> Iterator[_Ends]:
    with ExitStack() as undo:
        pool = BufferPool("measure copies")
        undo.callback(pool.close)
        ram: dict[Lane, list[Buffer]] = {lane: [] for lane in _COPY_LANES}
        gpu: dict[Lane, list[DeviceMemory]] = {lane: [] for lane in _COPY_LANES}
        for lane in _COPY_LANES:
            for _ in range(_NUM_IN_FLIGHT):
                buffer = pool.allocate(piece_bytes)
                undo.callback(pool.take_back, buffer)
                buffer.array()[:] = 0
                ram[lane].append(buffer)
                memory = device.alloc(piece_bytes)
                undo.callback(device.free, memory)
                gpu[lane].append(memory)
        is_pinned = _pin(device, [one for lane in ram.values() for one in lane], undo)
        # Copies still under way after a failure own both ends.
        undo.callback(device.synchronize)
        ends = _Ends(ram=ram, gpu=gpu, piece_bytes=piece_bytes, is_pinned=is_pinned)
        _copy(device, ends, _COPY_LANES)  # the first touch of memory is slower
        yield ends


def _pin(device: Device, buffers: list[Buffer], undo: ExitStack) -> bool:
    if device.shares_ram:
        return False
    try:
        for buffer in buffers:
            device.pin(buffer.address, buffer.nbytes)
            undo.callback(device.unpin, buffer.address)
    except HardwareError:
        return False
    return True


def _copy(device: Device, ends: _Ends, lanes: tuple[Lane, ...]) -> float:
    """Copy every piece of the lanes once and wait; returns the bytes of one lane."""
    events: list[Event] = []
    for number in range(_NUM_IN_FLIGHT):
        for lane in lanes:
            ram, gpu = ends.ram[lane][number], ends.gpu[lane][number]
            target, source = (gpu, ram) if lane is Lane.RAM_TO_GPU else (ram, gpu)
            events.append(device.copy_async(target, source, lane=lane))
    for event in events:
        device.wait(event)
    return _NUM_IN_FLIGHT * ends.piece_bytes


def _both_ways_slowdown(
    device: Device, ends: _Ends, alone: dict[Lane, Figure], seconds: float, clock: Clock
) -> float:
    slower = min(figure.per_second for figure in alone.values())
    samples = []
    for _ in range(NUM_ROUNDS):
        started, nbytes = clock(), 0.0
        while not nbytes or clock() - started < seconds:
            nbytes += _copy(device, ends, _COPY_LANES)
        samples.append(rate_of(nbytes, clock() - started))
    return max(1.0, slower / Figure(samples=tuple(samples)).per_second)
