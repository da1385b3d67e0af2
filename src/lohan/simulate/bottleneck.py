"""What holds a step up, in words: the same of a simulated step and of one that was measured.

Owns the names of lanes in sentences, and when one of them is the limit rather than their waiting
for each other. Given how long each lane works in a step when it has its link to itself.
"""

import re
from collections.abc import Mapping

from lohan.hardware.machine import Machine
from lohan.vocabulary import Lane

GPU_WORDS = "GPU compute"
PROCESSOR_WORDS = "the processor"
HOST_WORDS = "launching work by the host"
HOST_REMEDY = "larger micro-batches give the GPU more to do for each operator launched"
_WORDS = {
    Lane.GPU: GPU_WORDS,
    Lane.GPU_TO_RAM: "GPU-to-RAM copies",
    Lane.RAM_TO_GPU: "RAM-to-GPU copies",
    Lane.SSD_READ: "SSD reads",
    Lane.SSD_WRITE: "SSD writes",
    Lane.CPU: "CPU updates",
    Lane.PEER: "what ranks send each other",
}
_PROCESSOR_WORDS = _WORDS | {
    Lane.GPU: PROCESSOR_WORDS,
    Lane.GPU_TO_RAM: "copies from compute",
    Lane.RAM_TO_GPU: "copies to compute",
}
_LIMIT_SHARE = 0.85
"""A resource that is busy for less of the step is not the limit: something waits."""


def lane_words(machine: Machine) -> Mapping[Lane, str]:
    """Lanes as they are called on a machine; one without a GPU is not told of it."""
    return _PROCESSOR_WORDS if machine.gpu.is_processor else _WORDS


def busiest_resource(
    alone: Mapping[Lane, float], machine: Machine, launch_seconds: float = 0.0
) -> tuple[str, float]:
    """The resource that works longest, and how long. A simplex SSD path is one for both ways.

    `launch_seconds`: how long the host launches work for the GPU lane. If that is what the lane's
    time is, the host is the resource.
    """
    words = _words(alone, machine, launch_seconds)
    resources = {words[lane]: seconds for lane, seconds in alone.items()}
    if not machine.ssd_path.is_duplex:
        resources["the SSDs"] = alone.get(Lane.SSD_READ, 0.0) + alone.get(Lane.SSD_WRITE, 0.0)
    resource = max(resources, key=lambda name: resources[name])
    return resource, resources[resource]


def _words(
    alone: Mapping[Lane, float], machine: Machine, launch_seconds: float
) -> Mapping[Lane, str]:
    words = lane_words(machine)
    is_host = launching_is_all(launch_seconds, alone.get(Lane.GPU, 0.0))
    return {**words, Lane.GPU: HOST_WORDS} if is_host else words


def launching_is_all(launch_seconds: float, gpu_seconds: float) -> bool:
    """Whether the GPU lane takes as long as it does because the host launches its work."""
    return launch_seconds >= _LIMIT_SHARE * gpu_seconds > 0


def bottleneck_words(
    alone: Mapping[Lane, float],
    step_seconds: float,
    machine: Machine,
    launch_seconds: float = 0.0,
) -> str:
    """What a step waits for. `alone`: seconds each lane works, as if nothing shared its link;
    `launch_seconds` as `busiest_resource` takes it."""
    resource, seconds = busiest_resource(alone, machine, launch_seconds)
    if seconds >= _LIMIT_SHARE * step_seconds:
        return f"{resource} ({min(1.0, seconds / step_seconds):.0%} of the step)"
    words = _words(alone, machine, launch_seconds)
    busiest = sorted(alone, key=lambda lane: -alone[lane])[:2]
    parts = " and ".join(f"{words[lane]} ({alone[lane] / step_seconds:.0%})" for lane in busiest)
    return f"waiting of {parts} for each other"


def with_remedy(bottleneck: str) -> str:
    """A bottleneck with what helps against it, where that is not bought."""
    return f"{bottleneck}: {HOST_REMEDY}" if HOST_WORDS in bottleneck else bottleneck


def without_shares(bottleneck: str) -> str:
    """The words of a bottleneck without its shares, which differ from step to step."""
    return re.sub(r" \([^)]*\)", "", bottleneck)


def plain_limit(bottleneck: str) -> str:
    """The names alone: of lanes that wait for each other, both."""
    return without_shares(bottleneck).removeprefix("waiting of ").removesuffix(" for each other")
