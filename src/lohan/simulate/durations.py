"""How long a task takes when it has its lane and its link to itself.

Turns bytes, FLOPs and parameters into seconds with the rates of a machine and the shares of them a
system reaches. Owns no clock and no contention; the simulator adds both.
"""

from lohan.hardware.machine import Machine
from lohan.plan.system import DrivingRates
from lohan.schedule.task import Compute, Move, Task
from lohan.vocabulary import ComputeKind, Lane, TensorKind


class Durations:
    """Seconds of each task on one machine, driven by one system."""

    def __init__(self, machine: Machine, rates: DrivingRates) -> None:
        self._machine, self._rates = machine, rates
        per_byte = {
            Lane.SSD_READ: 1 / (machine.ssd_read_bytes_per_second * rates.ssd_share),
            Lane.SSD_WRITE: 1 / (machine.ssd_write_bytes_per_second * rates.ssd_share),
            Lane.GPU_TO_RAM: 1 / (machine.gpu_to_ram_bytes_per_second * rates.copy_share),
            Lane.RAM_TO_GPU: 1 / (machine.ram_to_gpu_bytes_per_second * rates.copy_share),
            Lane.PEER: 1
            / (
                machine.peer_bytes_per_second
                or machine.ram_to_gpu_bytes_per_second * rates.copy_share
            ),
        }
        if machine.num_gpus > 1 and rates.staging_bytes_per_second is not None:
            for lane in (Lane.SSD_READ, Lane.SSD_WRITE):
                per_byte[lane] += 1 / rates.staging_bytes_per_second
        if rates.partitions_over_gpus:
            for lane in (Lane.GPU_TO_RAM, Lane.RAM_TO_GPU):
                per_byte[lane] /= machine.num_gpus
        self._seconds_per_byte = per_byte
        processes = machine.num_gpus if rates.partitions_over_gpus else 1
        self._seconds_per_update = 1 / (
            machine.cpu_update_parameters_per_second * rates.cpu_share * processes
        )
        self._seconds_per_flop = 1 / (machine.gpu.flops_per_second * rates.gpu_share)
        self._seconds_per_touched_byte = 1 / machine.gpu.memory_bytes_per_second

    def of(self, task: Task) -> float:
        """Seconds of one task alone on its lane and link."""
        action = task.action
        if isinstance(action, Move):
            return task.fixed_seconds + self._of_move(action, task.lane)
        return task.fixed_seconds + self._of_compute(action, task.lane)

    def launching(self, task: Task) -> float:
        """Seconds the host launches operators for a task; they are part of its time."""
        action = task.action
        launches = action.num_launches if isinstance(action, Compute) else 0
        return launches * self._machine.launch_seconds

    def _of_move(self, move: Move, lane: Lane) -> float:
        pageable = self._rates.activation_copy_bytes_per_second
        is_copy = lane in (Lane.GPU_TO_RAM, Lane.RAM_TO_GPU)
        if pageable is not None and is_copy and move.kind is TensorKind.A16:
            # Each process copies its own activations; pageable copies do not share a link.
            return move.nbytes / (pageable * self._machine.num_gpus)
        return move.nbytes * self._seconds_per_byte[lane]

    def _of_compute(self, compute: Compute, lane: Lane) -> float:
        if lane is Lane.GPU:
            device_seconds = (
                compute.flops * self._seconds_per_flop
                + compute.touched_bytes * self._seconds_per_touched_byte
            )
            return self._machine.compute_seconds(device_seconds, compute.num_launches)
        if compute.kind is ComputeKind.REDUCE:
            # Adding a 16-bit gradient touches 6 bytes where an update touches 28.
            return compute.num_parameters * self._seconds_per_update * 6 / 28
        return compute.num_parameters * self._seconds_per_update
