"""How a training system behaves: what it stores where, what overlaps, how fast it goes.

A `System` holds the properties of a whole system, fitted or stated once; never anything about a
single model, batch or machine. A policy combines it with a machine, a model and a workload into a
Plan. The schedule builder and the simulator read these fields; they never ask for a system's name.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from lohan.vocabulary import Tier


class UpdateTiming(StrEnum):
    """When the optimizer update of a block may run."""

    AFTER_BACKWARD = "after_backward"
    """A stage of its own once every gradient exists."""
    NAIVE = "naive"
    """Under the backward pass: read, compute, write, then the next block's read."""
    PIPELINED = "pipelined"
    """Under the backward pass: a block's write comes after the next block's read."""
    UNDER_NEXT_FORWARD = "under_next_forward"
    """Under the backward pass and the next forward pass: only the block itself must wait."""


class ActivationRule(StrEnum):
    """How the choices for activations are made."""

    HOLISTIC = "holistic"
    """Swap in order of FLOPs per byte while the predicted step gets shorter; RAM, then SSD."""
    HOLISTIC_RAM = "holistic_ram"
    """The same, but nothing may go to SSD."""
    INPUTS_TO_RAM = "inputs_to_ram"
    """Only what enters a block is swapped, to RAM; everything else is recomputed."""
    INPUTS_ON_GPU = "inputs_on_gpu"
    """Only what enters a block is kept, on the GPU; everything else is recomputed."""
    EVERYTHING = "everything"
    """Every output is swapped, RAM first, nothing is recomputed."""
    EVERYTHING_TO_SSD = "everything_to_ssd"
    """Every output is swapped to SSD, nothing is recomputed."""
    COPY_TIME = "copy_time"
    """Swap to RAM what a copy hides under the forward pass, blind to state traffic."""
    MEMORY_BOUND = "memory_bound"
    """Swap to RAM by FLOPs per byte up to the RAM that is left, blind to state traffic."""
    NOTHING = "nothing"
    """Activations stay on the GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateFormat:
    """Bytes per parameter of the stored training state."""

    weights_bytes: int
    """P16."""
    master_bytes: int
    """P32, or in the split state the low half that P16 lacks."""
    moments_bytes: int
    """OS32."""
    needs_weights_to_update: bool
    """The split master is rebuilt from P16 and its low half."""

    @property
    def stored_bytes(self) -> int:
        """Bytes on disk or in RAM for one slot of the state."""
        return self.weights_bytes + self.master_bytes + self.moments_bytes


PLAIN_STATE = StateFormat(
    weights_bytes=2, master_bytes=4, moments_bytes=8, needs_weights_to_update=False
)
SPLIT_STATE = StateFormat(
    weights_bytes=2, master_bytes=2, moments_bytes=8, needs_weights_to_update=True
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DrivingRates:
    """How well a system drives the machine: shares of its rates, and what it adds to them."""

    gpu_share: float = 1.0
    ssd_share: float = 1.0
    cpu_share: float = 1.0
    copy_share: float = 1.0
    activation_copy_bytes_per_second: float | None = None
    """Rate of activation copies where they go through pageable memory; None: the link's."""
    copy_interference: float = 0.0
    """Share of the compute rate lost while a copy to or from the GPU is under way."""
    staging_bytes_per_second: float | None = None
    """With several GPUs, each state byte is copied once more between processes at this rate."""
    shares_host_link: bool = True
    """The GPUs' copies share one host link rather than having one each."""
    partitions_over_gpus: bool = False
    """Copies and CPU updates are divided over the GPUs' processes."""
    seconds_per_block_pass: float = 0.0
    """Fixed cost of one block in one pass, during which nothing overlaps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Memory a published system needs, as fitted to what was reported to fit."""

    gpu_share: float = 0.912
    """Share of GPU memory that is usable; the rest is the driver's, fragments and workspaces."""
    gpu_bytes_per_block_parameter: float = 6.0
    gpu_bytes_per_block_parameter_parallel: float | None = None
    """The same with several GPUs."""
    gpu_bytes_per_model_parameter: float = 0.0
    gpu_logits_bytes: float = 0.0
    """Bytes per logit of the loss, held whole."""
    has_score_matrix: bool = False
    """Attention scores are materialised."""
    ram_share: float = 0.885
    """Share of RAM that is usable; the rest is the system's and cannot be pinned."""
    ram_fixed_bytes: float = 0.0
    ram_bytes_per_block_parameter: float = 0.0
    ram_bytes_per_model_parameter: float = 0.0
    ram_bytes_per_activation_byte: float = 1.0
    """RAM taken per byte of swapped activations."""
    max_tensor_bytes: float | None = None
    """Largest fp32 image of one weight matrix the system can move."""


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """A training system: name and properties."""

    name: str
    summary: str
    state: StateFormat
    home: Tier
    """Where P16, P32 and OS32 live unless the plan makes them resident higher up."""
    update_timing: UpdateTiming
    activations: ActivationRule
    update_tier: Tier = Tier.RAM
    """RAM: the CPU updates. GPU: states travel to the GPU."""
    spills_gradients: bool = False
    """Gradients go to SSD and come back for the update."""
    num_weight_slots: int = 2
    """Blocks of P16 on the GPU at a time."""
    num_gradient_slots: int = 2
    """Blocks of G16 on the GPU at a time."""
    num_ring_slots: int = 3
    """Blocks of P16 read ahead into RAM."""
    num_held_slots: int = 3
    """Blocks of P16 kept in RAM between the backward pass and the update that uses them again."""
    num_fresh_slots: int = 3
    """Blocks of P16 in RAM between an update under the next forward pass and that pass."""
    num_spill_slots: int = 3
    """Blocks of activations in RAM on their way to SSD or back."""
    num_state_slots: int = 2
    """Blocks (or parts of blocks) of state in RAM at a time."""
    is_serial: bool = False
    """Nothing overlaps: each task waits for the one before it."""
    has_barrier: bool = True
    """A step begins when everything of the step before it has ended."""
    skips_unneeded: bool = False
    """Operators whose value no backward operator needs are not recomputed."""
    uses_residency: bool = False
    """RAM that is left holds states, GPU memory that is left keeps activations."""
    rates: DrivingRates = field(default_factory=DrivingRates)
    footprint: Footprint = field(default_factory=Footprint)
