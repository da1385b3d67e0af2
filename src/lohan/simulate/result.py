"""What a simulated run says: step time, lanes, bytes, wear, money, and the limit of the hardware.

Owns the numbers derived from one replay of a schedule. Reading and printing them is the command
line's business.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from lohan.vocabulary import Lane, Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStep:
    """One step in the steady state."""

    policy: str
    model: str
    machine: str
    step_seconds: float
    forward_seconds: float
    backward_seconds: float
    """From the end of the forward pass to the last gradient."""
    optimizer_seconds: float
    """From the last gradient to the start of the next forward pass."""
    num_tokens: int
    num_sequences: int
    nominal_parameters: float
    model_flops: int
    """FLOPs the model itself needs: forward and backward, nothing recomputed, all GPUs."""
    busy_seconds: Mapping[Lane, float]
    launch_seconds: float
    """How long the host launches work for each GPU."""
    roofline_seconds: float
    roofline_resource: str
    read_bytes: int
    written_bytes: int
    gpu_to_ram_bytes: int
    ram_to_gpu_bytes: int
    peak_bytes: Mapping[Tier, int]
    endurance_bytes: int
    price_dollars: float
    bottleneck: str

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second in the steady state."""
        return self.num_tokens / self.step_seconds

    @property
    def sequences_per_second(self) -> float:
        """Sequences (for diffusion models: images) per second."""
        return self.num_sequences / self.step_seconds

    @property
    def paper_tflops(self) -> float:
        """The paper's metric: 8 FLOPs per nominal parameter and token, whatever was recomputed."""
        return self.tokens_per_second * 8 * self.nominal_parameters / 1e12

    @property
    def model_tflops(self) -> float:
        """FLOPs the model itself needs, per second."""
        return self.model_flops / self.step_seconds / 1e12

    @property
    def roofline_share(self) -> float:
        """How close the step comes to what no order of the same work can beat."""
        return self.roofline_seconds / self.step_seconds

    @property
    def endurance_share_per_step(self) -> float:
        """Share of the drives' rated life one step uses."""
        return self.written_bytes / self.endurance_bytes

    def busy_share(self, lane: Lane) -> float:
        """Share of the step a lane works."""
        return self.busy_seconds.get(lane, 0.0) / self.step_seconds

    def num_steps_for(self, num_tokens: float) -> float:
        """Steps to see a number of tokens."""
        return num_tokens / self.num_tokens

    def to_json_fields(self) -> dict[str, object]:
        """Every number as plain values, without the trace."""
        return {
            "policy": self.policy,
            "model": self.model,
            "machine": self.machine,
            "simulated": True,
            "step_seconds": self.step_seconds,
            "forward_seconds": self.forward_seconds,
            "backward_seconds": self.backward_seconds,
            "optimizer_seconds": self.optimizer_seconds,
            "tokens_per_second": self.tokens_per_second,
            "paper_tflops": self.paper_tflops,
            "model_tflops": self.model_tflops,
            "busy_share": {lane.value: self.busy_share(lane) for lane in self.busy_seconds},
            "launch_seconds": self.launch_seconds,
            "roofline_seconds": self.roofline_seconds,
            "roofline_share": self.roofline_share,
            "roofline_resource": self.roofline_resource,
            "bottleneck": self.bottleneck,
            "read_bytes_per_step": self.read_bytes,
            "written_bytes_per_step": self.written_bytes,
            "gpu_to_ram_bytes_per_step": self.gpu_to_ram_bytes,
            "ram_to_gpu_bytes_per_step": self.ram_to_gpu_bytes,
            "peak_bytes": {tier.value: peak for tier, peak in self.peak_bytes.items()},
            "endurance_share_per_step": self.endurance_share_per_step,
            "price_dollars": self.price_dollars,
        }
