"""Closed-form step time: how long each resource is busy, and the longest of them.

Two forms. `stage_seconds` is the paper's: forward and backward each last as long as their busiest
resource (docs/cost-model.md, equations 1-3). `step_load` is for plans that overlap over the whole
step: one maximum over it (equations 4 and 5). Both only guide a search; the simulator judges.
"""

from dataclasses import dataclass

from lohan.hardware.machine import Machine

OVERLAP_LOSS = 0.05
"""Share of a resource's time that shows although a longer one hides it, as the simulator has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What one step asks of the machine; bytes and FLOPs over all GPUs where they share a link."""

    forward_flops: float
    """Per GPU."""
    backward_flops: float
    recompute_flops: float
    num_parameters: float
    swapped_bytes: float
    """Activations GPU -> RAM and back, over the links of all GPUs."""
    spilled_bytes: float
    """The part of them that goes on to SSD and comes back."""
    state_read_bytes: float
    """State bytes the updates read from SSD."""
    state_written_bytes: float
    weight_read_bytes: float
    """P16 bytes one pass reads from SSD."""
    weight_copy_bytes: float
    """P16 bytes one pass copies to the GPUs."""


def stage_seconds(machine: Machine, traffic: Traffic, *, copy_interference: float = 0.0) -> float:
    """Step time when forward and backward follow each other (equations 1-3).

    `copy_interference` is the share of the compute rate lost while activations are copied.
    """
    flops = machine.gpu.flops_per_second
    read, write = machine.ssd_read_bytes_per_second, machine.ssd_write_bytes_per_second
    forward = max(
        traffic.forward_flops / flops
        + copy_interference * traffic.swapped_bytes / machine.gpu_to_ram_bytes_per_second,
        traffic.swapped_bytes / machine.gpu_to_ram_bytes_per_second,
        traffic.weight_copy_bytes / machine.ram_to_gpu_bytes_per_second,
        traffic.weight_read_bytes / read + traffic.spilled_bytes / write,
    )
    backward = max(
        (traffic.backward_flops + traffic.recompute_flops) / flops
        + copy_interference * traffic.swapped_bytes / machine.ram_to_gpu_bytes_per_second,
        traffic.weight_copy_bytes / machine.gpu_to_ram_bytes_per_second,
        (traffic.weight_copy_bytes + traffic.swapped_bytes) / machine.ram_to_gpu_bytes_per_second,
        (traffic.weight_read_bytes + traffic.state_read_bytes + traffic.spilled_bytes) / read
        + traffic.state_written_bytes / write,
    )
    return forward + backward


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLoad:
    """Busy seconds of each resource in one step."""

    gpu_seconds: float
    ram_to_gpu_seconds: float
    gpu_to_ram_seconds: float
    ssd_seconds: float
    cpu_seconds: float

    @property
    def longest_seconds(self) -> float:
        """The limit no order of the same work can beat."""
        return max(
            self.gpu_seconds,
            self.ram_to_gpu_seconds,
            self.gpu_to_ram_seconds,
            self.ssd_seconds,
            self.cpu_seconds,
        )

    @property
    def estimated_seconds(self) -> float:
        """The longest, plus what imperfect overlap of the others costs (equation 5)."""
        total = (
            self.gpu_seconds
            + self.ram_to_gpu_seconds
            + self.gpu_to_ram_seconds
            + self.ssd_seconds
            + self.cpu_seconds
        )
        return self.longest_seconds + OVERLAP_LOSS * (total - self.longest_seconds)


def step_load(machine: Machine, traffic: Traffic, *, weight_reads: float = 2.0) -> StepLoad:
    """Busy seconds per resource over a whole step (equation 4)."""
    reads = (
        weight_reads * traffic.weight_read_bytes + traffic.state_read_bytes + traffic.spilled_bytes
    ) / machine.ssd_read_bytes_per_second
    writes = (
        traffic.state_written_bytes + traffic.spilled_bytes
    ) / machine.ssd_write_bytes_per_second
    return StepLoad(
        gpu_seconds=(traffic.forward_flops + traffic.backward_flops + traffic.recompute_flops)
        / machine.gpu.flops_per_second,
        ram_to_gpu_seconds=(2 * traffic.weight_copy_bytes + traffic.swapped_bytes)
        / machine.ram_to_gpu_bytes_per_second,
        gpu_to_ram_seconds=(traffic.weight_copy_bytes + traffic.swapped_bytes)
        / machine.gpu_to_ram_bytes_per_second,
        ssd_seconds=max(reads, writes) if machine.ssd_path.is_duplex else reads + writes,
        cpu_seconds=traffic.num_parameters / machine.cpu_update_parameters_per_second,
    )
