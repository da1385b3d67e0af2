"""Closed-form step time: how long each resource is busy, and the longest of them.

Two forms. `stage_seconds` is the paper's: forward and backward each last as long as their busiest
resource (docs/cost-model.md, equations 1-3). `step_load` is for plans whose updates overlap both
passes: drives and CPU have the whole step, the GPU and its link one pass at a time (equations 4 to
6). Both only guide a search; the simulator judges.
"""

from dataclasses import dataclass

from lohan.hardware.machine import Machine

OVERLAP_LOSS = 0.05
"""Share of a resource's time that shows although a longer one hides it, as the simulator has it."""

BACKWARD_LAUNCHES = 2
"""Operators of a backward pass per one of the forward pass. Counted: 1.9 (Llama, Qwen3), 1.3
(GPT-2)."""


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
    gradient_spill_bytes: float = 0.0
    """G16 bytes that wait for the norm on SSD: written in the backward pass, read by updates."""
    forward_launches: float = 0.0
    """Operators the host launches for each GPU in the forward pass, over all micro-batches."""


def stage_seconds(machine: Machine, traffic: Traffic, *, copy_interference: float = 0.0) -> float:
    """Step time when forward and backward follow each other (equations 1-3).

    `copy_interference` is the share of the compute rate lost while activations are copied.
    """
    forward_compute, backward_compute = _compute_seconds(machine, traffic)
    read, write = machine.ssd_read_bytes_per_second, machine.ssd_write_bytes_per_second
    forward = max(
        forward_compute
        + copy_interference * traffic.swapped_bytes / machine.gpu_to_ram_bytes_per_second,
        traffic.swapped_bytes / machine.gpu_to_ram_bytes_per_second,
        traffic.weight_copy_bytes / machine.ram_to_gpu_bytes_per_second,
        traffic.weight_read_bytes / read + traffic.spilled_bytes / write,
    )
    backward = max(
        backward_compute
        + copy_interference * traffic.swapped_bytes / machine.ram_to_gpu_bytes_per_second,
        traffic.weight_copy_bytes / machine.gpu_to_ram_bytes_per_second,
        (traffic.weight_copy_bytes + traffic.swapped_bytes) / machine.ram_to_gpu_bytes_per_second,
        (traffic.weight_read_bytes + traffic.state_read_bytes + traffic.spilled_bytes) / read
        + traffic.state_written_bytes / write,
    )
    return forward + backward


def _compute_seconds(machine: Machine, traffic: Traffic) -> tuple[float, float]:
    """Of the forward and of the backward pass; what is run again counts as FLOPs alone."""
    rate, launches = machine.gpu.flops_per_second, traffic.forward_launches
    backward_flops = traffic.backward_flops + traffic.recompute_flops
    return (
        machine.compute_seconds(traffic.forward_flops / rate, launches),
        machine.compute_seconds(backward_flops / rate, BACKWARD_LAUNCHES * launches),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLoad:
    """Busy seconds of each resource in one step, and how long its two passes last at least."""

    gpu_seconds: float
    ram_to_gpu_seconds: float
    gpu_to_ram_seconds: float
    ssd_seconds: float
    cpu_seconds: float
    forward_seconds: float
    """The forward pass as long as its busiest resource: swapped outputs leave in it."""
    backward_seconds: float
    """The backward pass likewise: swapped outputs come back in it."""

    @property
    def longest_seconds(self) -> float:
        """Busy time of the busiest resource: no order of the same work can beat it."""
        return max(
            self.gpu_seconds,
            self.ram_to_gpu_seconds,
            self.gpu_to_ram_seconds,
            self.ssd_seconds,
            self.cpu_seconds,
        )

    @property
    def estimated_seconds(self) -> float:
        """The longer of passes and resources, plus what imperfect overlap costs (equation 6)."""
        total = (
            self.gpu_seconds
            + self.ram_to_gpu_seconds
            + self.gpu_to_ram_seconds
            + self.ssd_seconds
            + self.cpu_seconds
        )
        bound = max(self.longest_seconds, self.forward_seconds + self.backward_seconds)
        return bound + OVERLAP_LOSS * (total - self.longest_seconds)


def ssd_rates_of(machine: Machine) -> tuple[float, float]:
    """Bytes per second that all drives read, and that they write."""
    return machine.ssd_read_bytes_per_second, machine.ssd_write_bytes_per_second


def step_load(
    machine: Machine,
    traffic: Traffic,
    *,
    weight_reads: float = 2.0,
    clips: bool = False,
    ssd_rates: tuple[float, float] | None = None,
) -> StepLoad:
    """Busy seconds per resource over a whole step, and of its passes (equations 4 and 5).

    `clips`: every update waits for the norm, so it runs under the next forward pass. `ssd_rates`:
    what the machine's drives read and write together, for a search that asks a thousand times.
    """
    forward_compute, backward_compute = _compute_seconds(machine, traffic)
    up, down = machine.ram_to_gpu_bytes_per_second, machine.gpu_to_ram_bytes_per_second
    read, write = ssd_rates or ssd_rates_of(machine)

    def drives(read_bytes: float, written_bytes: float) -> float:
        seconds = read_bytes / read, written_bytes / write
        return max(seconds) if machine.ssd_path.is_duplex else sum(seconds)

    gradients = traffic.gradient_spill_bytes
    cpu_seconds = traffic.num_parameters / machine.cpu_update_parameters_per_second
    forward = max(
        forward_compute,
        traffic.weight_copy_bytes / up,
        traffic.swapped_bytes / down,
        traffic.spilled_bytes / write,
    )
    if clips:
        # The drives carry updates and swapped outputs in the same pass.
        forward = max(
            forward,
            cpu_seconds,
            drives(
                traffic.state_read_bytes + gradients,
                traffic.state_written_bytes + traffic.spilled_bytes,
            ),
        )
    backward = max(
        backward_compute,
        (traffic.weight_copy_bytes + traffic.swapped_bytes) / up,
        traffic.weight_copy_bytes / down,
        drives(traffic.weight_read_bytes + traffic.spilled_bytes, gradients),
    )
    return StepLoad(
        gpu_seconds=forward_compute + backward_compute,
        ram_to_gpu_seconds=(2 * traffic.weight_copy_bytes + traffic.swapped_bytes) / up,
        gpu_to_ram_seconds=(traffic.weight_copy_bytes + traffic.swapped_bytes) / down,
        ssd_seconds=drives(
            weight_reads * traffic.weight_read_bytes
            + traffic.state_read_bytes
            + traffic.spilled_bytes
            + gradients,
            traffic.state_written_bytes + traffic.spilled_bytes + gradients,
        ),
        cpu_seconds=cpu_seconds,
        forward_seconds=forward,
        backward_seconds=backward,
    )
