"""The engine on the test accelerator against the plain loop on it: every bit the same."""

import gc
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lohan.device.accelerator import AcceleratorDevice
from lohan.drive.surroundings.randomness import Draw
from lohan.drive.weights.parameter_views import ParameterSet
from lohan.errors import DoesNotFit
from lohan.lanes.activation_moves import SwappedActivations
from lohan.vocabulary import Choice
from support import accelerator
from support.accelerator_cases import (
    ODD_KERNELS,
    PACKED,
    PADDED,
    on_accelerator,
    parameters,
    slow_compute,
)
from support.engine_runs import (
    MIB,
    EngineCase,
    assert_same,
    attach,
    batches_of,
    build,
    optimizer_for,
    run_case,
)
from support.pairwise import pairwise

EVERYTHING: dict[str, list[Any]] = {
    "model": [*PACKED, *PADDED, "bart", "dit"],
    "choice": [Choice.KEEP, Choice.SWAP_TO_RAM, Choice.SWAP_TO_SSD, Choice.RECOMPUTE],
    "num_micro_batches": [1, 3],
    "max_grad_norm": [None, 1.0],
    "num_parts": [1, 3],
}
PAIRS = [on_accelerator(**chosen) for chosen in pairwise(EVERYTHING)]


@pytest.mark.parametrize("case", parameters(PAIRS))
def test_combinations_of_any_two_values_change_no_bit(case: EngineCase, tmp_path: Path) -> None:
    outcome, expected = run_case(case, tmp_path)
    assert_same(outcome, expected, norms=case.max_grad_norm is not None)


@pytest.mark.parametrize("choice", [Choice.SWAP_TO_SSD, Choice.RECOMPUTE])
@pytest.mark.parametrize("model", ODD_KERNELS)
def test_experts_and_complex_numbers_change_no_bit(
    model: str, choice: Choice, tmp_path: Path
) -> None:
    case = on_accelerator(model=model, choice=choice, num_micro_batches=2)
    outcome, expected = run_case(case, tmp_path)
    assert_same(outcome, expected)


@pytest.mark.parametrize("choice", EVERYTHING["choice"])
def test_late_kernels_change_no_bit(choice: Choice, tmp_path: Path) -> None:
    case = on_accelerator(model="llama_packed", choice=choice, num_micro_batches=2)
    with slow_compute():
        outcome, expected = run_case(case, tmp_path)
    assert_same(outcome, expected)


@pytest.mark.parametrize("choice", EVERYTHING["choice"])
def test_dropout_draws_what_the_plain_loop_draws(
    choice: Choice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no kernel is run again to know where a later micro-batch begins to draw."""
    monkeypatch.delattr(Draw, "repeat")
    case = on_accelerator(model="dit", choice=choice, num_micro_batches=2, dropout=0.3)
    outcome, expected = run_case(case, tmp_path)
    assert_same(outcome, expected)


def test_states_that_stay_in_ram_change_no_bit(tmp_path: Path) -> None:
    case = replace(on_accelerator(model="llama_packed"), residents=None)
    outcome, expected = run_case(case, tmp_path)
    assert_same(outcome, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_both_formats_change_no_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    case = on_accelerator(model="gpt2_packed", choice=Choice.SWAP_TO_RAM, dtype=dtype)
    outcome, expected = run_case(case, tmp_path)
    assert_same(outcome, expected)


def test_what_lives_on_the_device_stays_within_its_budget(tmp_path: Path) -> None:
    case = replace(
        on_accelerator(model="llama_packed", choice=Choice.SWAP_TO_SSD), gpu_bytes=MIB // 2
    )
    model = build(case)
    with attach(case, model, optimizer_for(case, model), tmp_path) as engine:
        for batches in batches_of(case):
            engine.step(batches)
        assert engine.plan is not None
        peak, planned = engine.gpu_peak_bytes, engine.plan.ledger
        assert peak is not None
        assert 0 < peak <= case.gpu_bytes, planned
        engine.close(should_delete=True)


@pytest.mark.parametrize("num_parts", [1, 3])
def test_what_compute_reads_lies_as_torchs_own_memory_does(
    num_parts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Defect B2: libraries of GPUs choose kernels by alignment. Tiny vectors put all out of it."""
    bind, get = ParameterSet.bind, SwappedActivations.get
    starts: dict[str, list[int]] = {"weights": [], "activations": []}

    def bound(self: Any, flat: torch.Tensor, layout: Any = None) -> None:
        bind(self, flat, layout)
        parameters = [self.parameters[name] for name in (layout or self.layout).names()]
        starts["weights"] += [one.data_ptr() % 256 for one in parameters]

    def got(self: Any, key: Any) -> torch.Tensor:
        found = get(self, key)
        if key not in self._kept:  # those lie where the model's own code has put them
            starts["activations"].append(found.data_ptr() % 256)
        return found

    monkeypatch.setattr(ParameterSet, "bind", bound)
    monkeypatch.setattr(SwappedActivations, "get", got)
    case = on_accelerator(
        model="gpt2", choice=Choice.SWAP_TO_SSD, num_micro_batches=2, num_parts=num_parts
    )
    outcome, expected = run_case(replace(case, residents=None), tmp_path)
    assert_same(outcome, expected)
    assert {kind: set(found) for kind, found in starts.items()} == {
        "weights": {0},
        "activations": {0},
    }


def test_nothing_of_a_step_stays_on_the_device(tmp_path: Path) -> None:
    case = on_accelerator(model="llama", choice=Choice.SWAP_TO_RAM, num_micro_batches=2)
    model = build(case)
    found = []
    gc.collect()
    gc.disable()  # whatever needs it stays for as long as it likes
    try:
        with attach(case, model, optimizer_for(case, model), tmp_path) as engine:
            for batches in batches_of(case):
                engine.step(batches)
                engine.synchronize()
                found.append(engine.device.bytes_in_use)
            engine.close(should_delete=True)
    finally:
        gc.enable()
    assert len(set(found[1:])) == 1, found


def test_memory_of_a_plan_is_given_back_before_the_next(tmp_path: Path) -> None:
    """Defect M1: blocks cached in sizes of the old plan are holes in the new one."""
    case = on_accelerator(model="llama_packed", choice=Choice.SWAP_TO_RAM)
    model, batches = build(case), batches_of(case)[0]

    def cached_bytes() -> int:
        return torch.accelerator.memory_reserved() - torch.accelerator.memory_allocated()

    with attach(case, model, optimizer_for(case, model), tmp_path) as engine:
        engine.step(batches)
        before_bytes = cached_bytes()
        engine.prepare([*batches, *batches])
        # A new batch of tokens is brought to the device, and is dropped again.
        assert cached_bytes() < before_bytes // 10
        engine.close(should_delete=True)


def test_a_device_too_small_for_a_block_is_refused_before_a_step(tmp_path: Path) -> None:
    case = replace(on_accelerator(model="llama_packed"), gpu_bytes=16 << 10)
    model = build(case)
    with pytest.raises(DoesNotFit, match="GPU"):
        attach(
            case,
            model,
            optimizer_for(case, model),
            tmp_path,
            largest_step=batches_of(case)[0],
        )
    assert not list(tmp_path.rglob("lohan-*")), "nothing was written"


def test_blocks_are_captured_though_a_kernel_adds_up_in_any_order(tmp_path: Path) -> None:
    """As the backward of attention does on GPUs: no two runs of a block have the same gradients."""
    case = on_accelerator(model="llama_packed", choice=Choice.SWAP_TO_RAM)
    model, said = build(case), list[str]()
    accelerator.calls().set_unordered(True)
    try:
        with attach(
            case, model, optimizer_for(case, model), tmp_path, progress=said.append
        ) as engine:
            for batches in batches_of(case):
                engine.step(batches)
            blocks = engine.captured_blocks
            engine.close(should_delete=True)
    finally:
        accelerator.calls().set_unordered(False)
    assert blocks
    assert all(one.endswith(": captured") for one in blocks), blocks
    assert sum("other bits in every run" in sentence for sentence in said) == 1, said


def test_main_memory_is_pinned_before_the_first_step_and_not_by_lanes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pins: list[tuple[str, int]] = []
    said: list[str] = []
    pin = AcceleratorDevice.pin

    def noted(self: Any, address: int, nbytes: int) -> None:
        pins.append((threading.current_thread().name, nbytes))
        pin(self, address, nbytes)

    monkeypatch.setattr(AcceleratorDevice, "pin", noted)
    case = on_accelerator(model="llama_packed", choice=Choice.SWAP_TO_SSD, num_micro_batches=2)
    model = build(case)
    with attach(case, model, optimizer_for(case, model), tmp_path, progress=said.append) as engine:
        for batches in batches_of(case):
            engine.step(batches)
        held_bytes = engine.ram_peak_bytes
        engine.close(should_delete=True)
    assert [name for name, _ in pins] == ["MainThread"]
    assert pins[0][1] <= held_bytes
    assert sum(one.startswith("pinning ") for one in said) == 1, said
    assert accelerator.calls().pinned_bytes() == 0
