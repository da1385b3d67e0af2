"""The equations of docs/cost-model.md, worked out by hand."""

from dataclasses import replace

import pytest

from lohan.plan.cost import OVERLAP_LOSS, Traffic, stage_seconds, step_load
from support.hand_made import machine

# Rates are 1e12 FLOPs, 1e9 bytes on every link and 1e9 parameters per second.
TRAFFIC = Traffic(
    forward_flops=1e12,
    backward_flops=2e12,
    recompute_flops=0.5e12,
    num_parameters=0.25e9,
    swapped_bytes=0.3e9,
    spilled_bytes=0.1e9,
    state_read_bytes=1.2e9,
    state_written_bytes=1.4e9,
    weight_read_bytes=0.2e9,
    weight_copy_bytes=0.2e9,
)


def test_stage_form_adds_the_longest_resource_of_each_pass() -> None:
    # Forward: GPU 1.0. Backward: GPU 2.5, drives 0.2 + 1.2 + 0.1 + 1.4 = 2.9.
    assert stage_seconds(machine(), TRAFFIC) == pytest.approx(1.0 + 2.9)
    # Copies of 0.3 s slow the GPU by half of that in each pass.
    slower = stage_seconds(machine(), TRAFFIC, copy_interference=0.5)
    assert slower == pytest.approx(1.15 + 2.9)


def test_step_form_gives_drives_and_cpu_the_whole_step() -> None:
    load = step_load(machine(), TRAFFIC)
    assert load.gpu_seconds == pytest.approx(3.5)
    assert load.ram_to_gpu_seconds == pytest.approx(0.7)
    assert load.gpu_to_ram_seconds == pytest.approx(0.5)
    assert load.cpu_seconds == pytest.approx(0.25)
    # Reads 2 x 0.2 + 1.2 + 0.1, writes 1.4 + 0.1, one after the other.
    assert load.ssd_seconds == pytest.approx(1.7 + 1.5)
    assert step_load(machine(is_duplex=True), TRAFFIC).ssd_seconds == pytest.approx(1.7)
    assert load.longest_seconds == pytest.approx(3.5)
    others = 0.7 + 0.5 + 0.25 + 3.2
    assert load.estimated_seconds == pytest.approx(3.5 + OVERLAP_LOSS * others)


def test_swapped_outputs_must_leave_within_the_forward_pass() -> None:
    load = step_load(machine(), replace(TRAFFIC, swapped_bytes=2e9, spilled_bytes=0))
    assert load.forward_seconds == pytest.approx(2.0)
    assert load.backward_seconds == pytest.approx(2.5)
    assert load.estimated_seconds > 4.5


def test_clipping_puts_every_update_into_the_forward_pass() -> None:
    load = step_load(machine(), TRAFFIC, clips=True)
    # The drives write what is swapped in the same pass.
    assert load.forward_seconds == pytest.approx(1.2 + 1.4 + 0.1)
    assert step_load(machine(), TRAFFIC).forward_seconds == pytest.approx(1.0)
    spilled = replace(TRAFFIC, gradient_spill_bytes=0.5e9)
    load = step_load(machine(), spilled, clips=True)
    # The gradient is read back by the update, and was written under the backward pass.
    assert load.forward_seconds == pytest.approx(1.2 + 0.5 + 1.4 + 0.1)
    assert load.ssd_seconds == pytest.approx(3.2 + 1.0)
