"""The published systems as properties: where things live, what overlaps, what they reach.

Each value is a fact from the system's description, or fitted once to many published figures and
marked (fitted) with what it explains; docs/reproduction.md tells how. Nothing here depends on a
model, a batch or a figure.
"""

from dataclasses import replace

from lohan.plan.system import (
    PLAIN_STATE,
    ActivationRule,
    DrivingRates,
    Footprint,
    System,
    UpdateTiming,
)
from lohan.units import GB, GIB
from lohan.vocabulary import Tier

# (fitted) Slope of ZeRO-Infinity's step time over the batch, less its GPU time: checkpointed
# activations are copied through pageable memory.
_PAGEABLE_BYTES_PER_SECOND = 2.6e9

LOHAN = System(
    name="lohan",
    summary="the paper's system: states on SSD, updates under the backward pass",
    state=PLAIN_STATE,
    home=Tier.SSD,
    update_timing=UpdateTiming.PIPELINED,
    activations=ActivationRule.HOLISTIC,
    # (fitted) Step times grow by the copy time of the weights: one block's weights on the GPU.
    num_weight_slots=1,
    rates=DrivingRates(
        # (fitted) Rise of the step time per swapped byte where nothing else is busy (Fig 9b).
        copy_interference=0.22,
        # (fitted) What step times of small and large blocks have in common.
        seconds_per_block_pass=0.02,
        # (fitted) Floor of a step with two and with four GPUs, 13B and 70B alike.
        staging_bytes_per_second=33e9,
    ),
    footprint=Footprint(
        # (fitted) P16 twice and G16 of one block: 276B runs on 16 GB.
        gpu_bytes_per_block_parameter=6.0,
        # (fitted) 70B runs with 24 sequences per GPU on two GPUs, not with 32.
        gpu_bytes_per_block_parameter_parallel=19.5,
        # (fitted) 276B runs in 256 GB, 135B with one sequence does not run in 128 GB.
        ram_bytes_per_block_parameter=80.5,
        # (fitted) 412B does not run however much memory there is; its largest weight matrix as
        # 4-byte gradients is the first to reach 4 GiB.
        max_tensor_bytes=4 * GIB,
    ),
)

FUYOU = replace(
    LOHAN,
    name="fuyou",
    summary="the paper's first version: the same overlap with a prefetcher in spare GPU memory",
    num_weight_slots=2,
)

LOHAN_SERIAL = replace(
    LOHAN,
    name="lohan+serial-optimizer",
    summary="lohan with the updates as a stage after the backward pass",
    update_timing=UpdateTiming.AFTER_BACKWARD,
)
LOHAN_NAIVE = replace(
    LOHAN,
    name="lohan+naive-pipeline",
    summary="lohan whose updates read, compute and write in turn",
    update_timing=UpdateTiming.NAIVE,
)
LOHAN_RAM = replace(
    LOHAN,
    name="lohan+ram-activations",
    summary="lohan that never swaps activations to SSD",
    activations=ActivationRule.HOLISTIC_RAM,
    footprint=replace(
        LOHAN.footprint,
        # (fitted) Largest models of Fig 8: buffers for activations in flight beside those held.
        ram_bytes_per_activation_byte=4.7,
    ),
)
# (fitted) 70B runs with 16 sequences in 128 GB, not with 32.
_BLIND = replace(LOHAN.footprint, ram_bytes_per_activation_byte=2.6)
LOHAN_STATIC = replace(
    LOHAN,
    name="lohan+static-activations",
    summary="lohan that swaps only the tensors between blocks, to RAM",
    activations=ActivationRule.INPUTS_TO_RAM,
    footprint=_BLIND,
)
LOHAN_CAPUCHIN = replace(
    LOHAN,
    name="lohan+capuchin",
    summary="lohan with Capuchin's choice: swap what a copy hides, blind to state traffic",
    activations=ActivationRule.COPY_TIME,
    footprint=_BLIND,
)
LOHAN_CHECKMATE = replace(
    LOHAN,
    name="lohan+checkmate",
    summary="lohan with Checkmate's choice: least recomputation that RAM allows",
    activations=ActivationRule.MEMORY_BOUND,
    footprint=_BLIND,
)
LOHAN_G10 = replace(
    LOHAN,
    name="lohan+g10",
    summary="lohan with G10's choice: everything to SSD, nothing recomputed",
    activations=ActivationRule.EVERYTHING_TO_SSD,
)

ZERO_INFINITY = System(
    name="zero-infinity",
    summary="DeepSpeed ZeRO-Infinity: states on SSD, stages one after another",
    state=PLAIN_STATE,
    home=Tier.SSD,
    update_timing=UpdateTiming.AFTER_BACKWARD,
    activations=ActivationRule.INPUTS_TO_RAM,
    spills_gradients=True,
    is_serial=True,
    rates=DrivingRates(
        activation_copy_bytes_per_second=_PAGEABLE_BYTES_PER_SECOND,
        shares_host_link=False,
        partitions_over_gpus=True,
        # (fitted) The optimizer stage: less than what direct I/O gets out of the drives.
        ssd_share=0.85,
        # (fitted) Constant part of a step beyond its copies and I/O.
        seconds_per_block_pass=0.03,
    ),
    footprint=Footprint(
        # (fitted) 135B runs on 24 GB and not on 16 GB.
        gpu_bytes_per_block_parameter=9.8,
        gpu_logits_bytes=4.0,
        has_score_matrix=True,
        # (fitted) Largest models at 128, 256, 512 and 768 GB: buffers of a fixed size, and a
        # share of the states.
        ram_fixed_bytes=62 * GB,
        ram_bytes_per_model_parameter=4.8,
    ),
)

ZERO_OFFLOAD = System(
    name="zero-offload",
    summary="DeepSpeed ZeRO-Offload: states in RAM, CPU update after the backward pass",
    state=PLAIN_STATE,
    home=Tier.RAM,
    update_timing=UpdateTiming.AFTER_BACKWARD,
    activations=ActivationRule.INPUTS_TO_RAM,
    is_serial=True,
    rates=DrivingRates(
        activation_copy_bytes_per_second=_PAGEABLE_BYTES_PER_SECOND,
        shares_host_link=False,
        partitions_over_gpus=True,
    ),
    footprint=Footprint(
        # (fitted) 13B runs with 16 sequences on 24 GB, not with 32.
        gpu_bytes_per_block_parameter=16.0,
        gpu_logits_bytes=4.0,
        has_score_matrix=True,
        # 16 bytes of state and 4 of gradient, (fitted) 0.5 of buffers.
        ram_bytes_per_model_parameter=20.5,
    ),
)

COLOSSAL_AI = System(
    name="colossal-ai",
    summary="Colossal-AI Gemini: state chunks in RAM and on SSD, checkpoints on the GPU",
    state=PLAIN_STATE,
    home=Tier.SSD,
    update_timing=UpdateTiming.AFTER_BACKWARD,
    activations=ActivationRule.INPUTS_ON_GPU,
    is_serial=True,
    rates=DrivingRates(
        # (fitted) 13B on two GPUs of different speed.
        gpu_share=0.6,
        ssd_share=0.25,
        shares_host_link=False,
        partitions_over_gpus=True,
    ),
    footprint=Footprint(
        # (fitted) 30B runs on 16 GB, 70B not on 24 GB: a share of the chunks stays on the GPU.
        gpu_bytes_per_model_parameter=0.42,
        gpu_bytes_per_block_parameter=1.0,
        gpu_logits_bytes=4.0,
        has_score_matrix=True,
        ram_bytes_per_model_parameter=6.0,
    ),
)

FLASHNEURON = System(
    name="flashneuron",
    summary="FlashNeuron: states on the GPU, activations to SSD",
    state=PLAIN_STATE,
    home=Tier.GPU,
    update_timing=UpdateTiming.AFTER_BACKWARD,
    activations=ActivationRule.EVERYTHING_TO_SSD,
    update_tier=Tier.GPU,
    # P16, P32 and OS32 of the whole model; gradients one block at a time.
    footprint=Footprint(gpu_bytes_per_model_parameter=14.0, gpu_bytes_per_block_parameter=2.0),
)

G10 = System(
    name="g10",
    summary="G10: one space over GPU, RAM and SSD; update on the GPU; no recomputation",
    state=PLAIN_STATE,
    home=Tier.SSD,
    update_timing=UpdateTiming.AFTER_BACKWARD,
    activations=ActivationRule.EVERYTHING,
    update_tier=Tier.GPU,
    num_weight_slots=4,
    # Its published times are simulated by its authors with the drives' printed rate.
    rates=DrivingRates(ssd_share=1.4),
    footprint=Footprint(gpu_bytes_per_block_parameter=18.0),
)

GPU_ONLY = System(
    name="gpu-only",
    summary="plain training: states and activations on the GPU",
    state=PLAIN_STATE,
    home=Tier.GPU,
    update_timing=UpdateTiming.AFTER_BACKWARD,
    activations=ActivationRule.NOTHING,
    update_tier=Tier.GPU,
    footprint=Footprint(gpu_bytes_per_model_parameter=16.0, gpu_bytes_per_block_parameter=0.0),
)

PUBLISHED_SYSTEMS = {
    system.name: system
    for system in (
        LOHAN,
        FUYOU,
        ZERO_INFINITY,
        ZERO_OFFLOAD,
        COLOSSAL_AI,
        FLASHNEURON,
        G10,
        GPU_ONLY,
        LOHAN_SERIAL,
        LOHAN_NAIVE,
        LOHAN_STATIC,
        LOHAN_CAPUCHIN,
        LOHAN_G10,
        LOHAN_CHECKMATE,
        LOHAN_RAM,
    )
}
