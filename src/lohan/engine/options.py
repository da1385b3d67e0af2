"""What is chosen about a run before it begins: one type from the trainer down to the engine.

Owns the names and defaults. `lohan.attach` and the trainers fill it in, `attaching` puts what this
machine has in place of what was left out, `attach` and the engine read it. Decides nothing.
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lohan.device.device import Device
from lohan.drive import LossFunction
from lohan.engine.planning.known_drives import KnownDrives
from lohan.engine.planning.plan_run import PlannedRun
from lohan.engine.planning.write_limit import WriteLimit
from lohan.hardware.machine import Machine
from lohan.parallel.peers import Peers
from lohan.plan.policies import Policy
from lohan.ssd import CHUNK_BYTES, IoEngine
from lohan.store import MasterFormat
from lohan.store.initial import Moments


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Places, budgets and what is told; see `lohan.attach` for each."""

    ssd: Sequence[str | os.PathLike[str]]
    ram_bytes: int | None = None
    """None: most of what is free."""
    gpu_bytes: int | None = None
    """None: what the device has free."""
    device: str | Device | None = None
    owns_device: bool = False
    """Whether the engine closes a device it was given open."""
    machine: Machine | KnownDrives | None = None
    """None: this machine, measured as far as it must be."""
    ssd_rated_bytes: Sequence[int] | None = None
    """What drives are rated for, one figure for all or one per directory."""
    policy: str | Policy = "lohan+"
    example: Any | None = None
    largest_step: Sequence[Any] | None = None
    write_limit: WriteLimit | None = None
    loss_fn: LossFunction | None = None
    should_chunk_loss: bool = False
    nonfinite: str = "stop"
    num_slots: int = 2
    reduction_groups: int | None = None
    """None: as many as there are ranks, or as the run was made with."""
    peers: Peers | None = None
    """None: this process alone."""
    num_threads: int | None = None
    """None: all cores, or half of them where the processor computes too."""
    progress: Callable[[str], None] | None = None
    is_tracing: bool = False
    on_planned: Callable[[PlannedRun], None] | None = None
    master_format: MasterFormat | None = None
    """None: that of the policy; a function as policy gets split ones where it can."""
    io: IoEngine | None = None
    chunk_bytes: int = CHUNK_BYTES
    update_parameters_per_second: float | None = None
    """CPU updates are held back to this rate, for emulated machines."""

    def tell(self, sentence: str) -> None:
        """Say what is going on, if anybody listens."""
        if self.progress is not None:
            self.progress(sentence)


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstStates:
    """What training goes on from: a run, a copy of one, given weights, or the model's own."""

    run: str | None = None
    """Its last seal; all else is then found there."""
    weights: Iterable[tuple[str, torch.Tensor]] | None = None
    moments: Moments | None = None
    counters: Mapping[str, Any] | None = None
    buffers: Mapping[str, Any] | None = None
