"""Trains a small model offloaded and in memory, in every case, and compares the bits.

Owns the order of runs, their seeds, the processes of other ranks (this one is the first), and
finding the step in which a difference began. What equal means is in `differences`, the judge in
`plain_loop`. Called by `lohan verify`.
"""

import contextlib
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lohan.attaching import attach
from lohan.engine.engine import Engine
from lohan.errors import ConfigError, DoesNotFit
from lohan.optimizer.torch_optimizer import AdamW
from lohan.store import StateLayout
from lohan.units import GIB, MIB
from lohan.verify.batches import states_loss
from lohan.verify.cases import Case, all_cases, even_machine, policy_of
from lohan.verify.differences import TOLERANCE, Difference, first_difference
from lohan.verify.plain_loop import (
    StepOutcome,
    TensorStates,
    Trained,
    train_in_memory,
)
from lohan.verify.small_copy import Loss, SmallCopy, make_small_copy

_SEED = 11
_END_SECONDS = 30.0
_LEARNING_RATE = 3e-3
_LEAST_RAM_BYTES, _MOST_RAM_BYTES = 4 * MIB, 2 * GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResult:
    """One case, run and judged."""

    case: Case
    difference: Difference | None
    seconds: float
    read_bytes: int
    written_bytes: int
    """Of the offloaded run, from and to SSD."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """All cases of a model."""

    copy: SmallCopy
    device: str
    reason: str
    """Why that device."""
    ram_bytes: int
    state_bytes: int
    """Of the small model's states on SSD, once."""
    num_steps: int
    tolerance: float | None
    """None: every bit was compared; else see `differences`, note "Tolerance"."""
    cases: tuple[CaseResult, ...]

    @property
    def is_equal(self) -> bool:
        """Whether offloading changed nothing."""
        return all(one.difference is None for one in self.cases)


@dataclass(slots=True, kw_only=True)
class _Offloaded:
    """What came out of one run of the engine."""

    trained: Trained
    layout: StateLayout
    device: torch.device
    device_name: str
    reason: str
    read_bytes: int
    written_bytes: int


@dataclass(slots=True)
class _Runs:
    """Settings of all runs."""

    copy: SmallCopy
    ssd: Sequence[Path]
    device: str | None
    ram_bytes: int
    is_ram_given: bool
    observe: Callable[[Engine], None] | None
    rank: int = 0
    num_ranks: int = 1

    def own_steps_of(self, case: Case, num_steps: int) -> list[list[dict[str, object]]]:
        """What this rank has of them: equally many micro-batches of every step."""
        own = slice(self.rank, None, self.num_ranks)
        return [batches[own] for batches in self.steps_of(case, num_steps)]

    def steps_of(self, case: Case, num_steps: int) -> list[list[dict[str, object]]]:
        """The same batches whatever the case, dealt out to micro-batches."""
        count = case.num_micro_batches
        return [
            [self.copy.make_batch(count * step + number) for number in range(count)]
            for step in range(num_steps)
        ]

    def loss_of(self, case: Case) -> Loss | None:
        """None: the model's own.

        Raises:
            ConfigError: the loss is to read hidden states, and the model gives none.
        """
        if not case.reads_states:
            return self.copy.loss_fn
        if not self.copy.gives_states:
            raise ConfigError(
                f"{self.copy.architecture} gives no hidden states",
                why="its forward takes no output_hidden_states, or its loss is no part of it",
                remedy="leave out --hidden-states",
            )
        return states_loss

    def offloaded(self, case: Case, num_steps: int) -> _Offloaded:
        """Run on the engine; if no budget was given, in the smallest that will do."""
        while True:
            try:
                return self._offloaded(case, num_steps)
            except DoesNotFit:
                if self.is_ram_given or self.ram_bytes >= _MOST_RAM_BYTES:
                    raise
                self.ram_bytes *= 2

    def _offloaded(self, case: Case, num_steps: int) -> _Offloaded:
        with seeded():
            model = self.copy.make()
            engine = attach(
                model,
                optimizer_for(model, case),
                ssd=self.ssd,
                ram=self.ram_bytes,
                device=self.device,
                policy=policy_of(case),
                machine=even_machine(len(self.ssd)),
                weights=self.copy.values(model),
                example=self.copy.make_batch(0),
                loss_fn=self.loss_of(case),
            )
            try:
                # Making the model draws random numbers; training starts from the seed.
                torch.manual_seed(_SEED)
                results = [engine.step(own) for own in self.own_steps_of(case, num_steps)]
                if self.observe is not None:
                    self.observe(engine)
                masters = {name: master.clone() for name, master in engine.weights()}
                states = {
                    name: TensorStates(
                        master=masters[name], first_moment=m.clone(), second_moment=v.clone()
                    )
                    for name, m, v in engine.moments()
                }
                return _Offloaded(
                    trained=Trained(
                        steps=[
                            StepOutcome(losses=one.losses, grad_norm=one.grad_norm)
                            for one in results
                        ],
                        states={num_steps: states},
                    ),
                    layout=engine.layout,
                    device=engine.device.torch_device,
                    device_name=engine.device.name,
                    reason=engine.device.reason,
                    read_bytes=sum(one.read_bytes for one in results),
                    written_bytes=sum(one.written_bytes for one in results),
                )
            finally:
                engine.close(should_delete=True)

    def in_memory(self, case: Case, num_steps: int, like: _Offloaded) -> Trained:
        """The judge's run of a case; that of all cases that differ in activations alone."""
        with seeded():
            model = self.copy.in_memory(like.device)
            torch.manual_seed(_SEED)
            return train_in_memory(
                model,
                optimizer_for(model, case),
                [
                    [_moved(batch, like.device) for batch in batches]
                    for batches in self.steps_of(case, num_steps)
                ],
                layout=like.layout,
                loss_fn=self.loss_of(case),
                reduction_groups=self.num_ranks,
            )

    def of_itself(
        self, case: Case, judge: Trained, like: _Offloaded, tolerance: float | None
    ) -> Difference | None:
        """How the model differs from its own second run in memory, if it does."""
        again = self.in_memory(case, len(judge.steps), like)
        return first_difference(judge, again, tolerance=tolerance)


def verify_copy(
    copy: SmallCopy,
    *,
    ssd: Sequence[Path] = (),
    device: str | None = None,
    ram_bytes: int | None = None,
    num_steps: int = 5,
    cases: Sequence[Case] | None = None,
    report: Callable[[str], None] | None = None,
    observe: Callable[[Engine], None] | None = None,
    num_ranks: int = 1,
    trust_remote_code: bool = False,
) -> Verification:
    """Train a small model in every case, offloaded and in memory, and compare.

    Args:
        ssd: directories for the states, which are removed again; none: a temporary directory.
        device: as in `lohan.attach`.
        ram_bytes: budget of the engine; None: the smallest power of two that will do.
        num_steps: optimizer steps per run.
        cases: other ones than all.
        report: is told of every case as it ends.
        observe: is given each engine once its steps are taken.
        num_ranks: processes that train together; the judge adds up as many reduction groups.
        trust_remote_code: for the other ranks, which make the model anew.

    Raises:
        ConfigError: the engine cannot drive the model, or the model itself is not deterministic.
        DoesNotFit: the budget is too small.
        StorageError: a directory cannot be used.
    """
    with contextlib.ExitStack() as stack:
        places = list(ssd) or stack.enter_context(_temporary_places())
        stack.enter_context(deterministic_algorithms())
        stack.enter_context(one_thread())
        ram = ram_bytes if ram_bytes is not None else _LEAST_RAM_BYTES
        chosen = list(cases) if cases is not None else all_cases(counts=(num_ranks, 2 * num_ranks))
        if num_ranks > 1:
            _refuse_uneven(chosen, num_ranks)
            device = device or "cpu"
            words = (copy.name, trust_remote_code, places, device, ram, ram_bytes is not None)
            stack.enter_context(_other_ranks(num_ranks, _follow, words, chosen, num_steps))
        runs = _Runs(copy, places, device, ram, ram_bytes is not None, observe, num_ranks=num_ranks)
        judged: dict[tuple[int, float | None, bool], Trained] = {}
        results: list[CaseResult] = []
        last: _Offloaded | None = None
        tolerance: float | None = None
        for case in chosen:
            started = time.perf_counter()
            last = runs.offloaded(case, num_steps)
            key = (case.num_micro_batches, case.max_grad_norm, case.reads_states)
            if key not in judged:
                judged[key] = runs.in_memory(case, num_steps, last)
            difference = first_difference(judged[key], last.trained, tolerance=tolerance)
            if (
                difference is not None
                and (tolerance, last.device.type == "cpu") == (None, False)
                and runs.of_itself(case, judged[key], last, None) is not None
            ):
                tolerance = TOLERANCE  # its bits differ by themselves
                difference = first_difference(judged[key], last.trained, tolerance=tolerance)
            if difference is not None and num_ranks == 1:
                difference = _traced_back(runs, case, judged[key], last, difference, tolerance)
            results.append(
                CaseResult(
                    case=case,
                    difference=difference,
                    seconds=time.perf_counter() - started,
                    read_bytes=last.read_bytes,
                    written_bytes=last.written_bytes,
                )
            )
            if report is not None:
                report(f"{case.words}: {'equal' if difference is None else difference.words}")
        assert last is not None
        return Verification(
            copy=copy,
            device=last.device_name,
            reason=last.reason,
            ram_bytes=runs.ram_bytes,
            state_bytes=last.layout.slot_bytes() + last.layout.frozen_bytes(),
            num_steps=num_steps,
            tolerance=tolerance,
            cases=tuple(results),
        )


def _refuse_uneven(cases: Sequence[Case], num_ranks: int) -> None:
    uneven = [one.num_micro_batches for one in cases if one.num_micro_batches % num_ranks]
    if uneven:
        raise ConfigError(
            f"{uneven[0]} micro-batches are to be dealt to {num_ranks} ranks",
            why="every rank is compared with equally many",
            remedy=f"give multiples of {num_ranks}",
        )


def _follow(
    rank: int,
    num_ranks: int,
    words: tuple[str, bool, Sequence[Path], str, int, bool],
    cases: Sequence[Case],
    num_steps: int,
) -> None:
    """Take part in the runs of all cases, as another rank than the first."""
    name, trust_remote_code, places, device, ram_bytes, is_ram_given = words
    copy = make_small_copy(name, trust_remote_code=trust_remote_code)
    with deterministic_algorithms(), one_thread():
        runs = _Runs(copy, places, device, ram_bytes, is_ram_given, None, rank, num_ranks)
        for case in cases:
            runs.offloaded(case, num_steps)


def optimizer_for(model: nn.Module, case: Case) -> AdamW:
    """Two groups with rates of their own, as people have them: no decay for vectors."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [one for one in trained if one.dim() > 1], "weight_decay": 0.1},
        {
            "params": [one for one in trained if one.dim() <= 1],
            "weight_decay": 0.0,
            "lr": 2 * _LEARNING_RATE,
        },
    ]
    return AdamW(
        [group for group in groups if group["params"]],
        lr=_LEARNING_RATE,
        max_grad_norm=case.max_grad_norm,
    )


def _traced_back(
    runs: _Runs,
    case: Case,
    judge: Trained,
    like: _Offloaded,
    found: Difference,
    tolerance: float | None,
) -> Difference:
    """The step in which a difference began: runs that end after the first step, the second, and
    so on, so that looking at the states does not change what overlaps.

    Raises:
        ConfigError: in memory the model differs from itself, so nothing can be judged.
    """
    of_itself = runs.of_itself(case, judge, like, tolerance)
    if of_itself is not None:
        raise ConfigError(
            f"{runs.copy.architecture} trained twice in memory gives different numbers "
            f"({of_itself.words})",
            why="its own operators are not deterministic, so a comparison would show nothing",
            remedy="look for random numbers drawn outside torch, or operators without a "
            "deterministic form",
        )
    for num_steps in range(1, len(judge.steps) + 1):
        one = runs.offloaded(case, num_steps)
        difference = first_difference(judge, one.trained, tolerance=tolerance)
        if difference is not None:
            return difference
    return found


@contextlib.contextmanager
def seeded() -> Iterator[None]:
    """Random numbers from the same seed; the caller's go on afterwards as if nothing was drawn."""
    devices = list(range(torch.accelerator.device_count()))
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(_SEED)
        yield


@contextlib.contextmanager
def deterministic_algorithms() -> Iterator[None]:
    """On a GPU: kernels that give the same bits from run to run, where there are such.

    The processor's are so already. An operator without such a kernel is left to warn: the model's
    second run in memory tells whether it matters.
    """
    if not torch.accelerator.is_available():
        yield
        return
    # Must be known before the first product; what the user has set is left.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    is_on = torch.are_deterministic_algorithms_enabled()
    is_warning = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(is_on, warn_only=is_warning)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Torch computes with one thread: for tensors this small more of them only wait for others."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def _other_ranks(num_ranks: int, follow: Callable[..., None], *given: Any) -> Iterator[None]:
    """Processes that call `follow(rank, num_ranks, *given)` while this one is the first rank.

    Raises:
        ConfigError: this process is a rank of something else already.
    """
    if dist.is_initialized():
        raise ConfigError(
            "this process is in a process group already",
            why="ranks that are compared are started here",
            remedy="start it by itself, without torchrun",
        )
    # A process that has computed cannot be forked: its threads would be missing.
    started = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="lohan-verify-ranks-") as place:
        store = f"file://{place}/store"
        others = [
            started.Process(
                target=_run_rank, args=(store, rank, num_ranks, follow, given), daemon=True
            )
            for rank in range(1, num_ranks)
        ]
        try:
            for other in others:
                other.start()
            dist.init_process_group("gloo", init_method=store, rank=0, world_size=num_ranks)
            yield
            for other in others:
                other.join(_END_SECONDS)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            for other in others:
                if other.is_alive():
                    other.terminate()


def _run_rank(
    store: str, rank: int, num_ranks: int, follow: Callable[..., None], given: tuple[Any, ...]
) -> None:
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=num_ranks)
    follow(rank, num_ranks, *given)
    dist.destroy_process_group()


@contextlib.contextmanager
def _temporary_places() -> Iterator[list[Path]]:
    """Two directories, so that states are striped."""
    with tempfile.TemporaryDirectory(prefix="lohan-verify-") as directory:
        places = [Path(directory) / name for name in ("ssd0", "ssd1")]
        for place in places:
            place.mkdir()
        yield places


def _moved(batch: dict[str, object], device: torch.device) -> dict[str, object]:
    from torch.utils._pytree import tree_map

    moved: dict[str, object] = tree_map(
        lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, batch
    )
    return moved
