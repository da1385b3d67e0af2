"""What fits: answers fit, and the next larger one tried does not."""

from dataclasses import replace

import pytest

from lohan.hardware import machine_named
from lohan.model import shape_of
from lohan.paper import POLICIES, policy_named
from lohan.plan import Workload, make_plan
from lohan.plan.limits import (
    Question,
    largest_batch,
    largest_model,
    least_machine,
    nearest_fits,
)
from lohan.units import GIB, MIB
from lohan.vocabulary import Tier
from support.small_machines import desktop_with_drive_of


def question(policy: str = "lohan", model: str = "gpt-13b", batch: int = 8) -> Question:
    return Question(
        policy=policy_named(policy),
        machine=machine_named("paper-4090"),
        shape=shape_of(model),
        workload=Workload(batch=batch, sequence=1024),
    )


def fits(asked: Question, batch: int) -> bool:
    return asked.fits(workload=replace(asked.workload, batch=batch))


@pytest.mark.parametrize("policy", ["lohan", "zero-infinity", "lohan+static-activations"])
@pytest.mark.parametrize("asked_batch", [1, 7, 4096])
def test_largest_batch_fits_and_a_sixteenth_more_does_not(policy: str, asked_batch: int) -> None:
    asked = question(policy, batch=asked_batch)
    largest = largest_batch(asked)
    assert largest is not None
    assert fits(asked, largest)
    assert not fits(asked, largest + max(1, largest // 16) + 1)


def test_largest_batch_is_a_multiple_of_the_gpus() -> None:
    asked = question(batch=8)
    largest = largest_batch(replace(asked, machine=asked.machine.with_gpus(4)))
    assert largest is not None
    assert largest % 4 == 0


def test_model_that_fits_with_no_batch_has_no_largest_one() -> None:
    assert largest_batch(question("flashneuron", "gpt-175b")) is None


def test_largest_model_is_the_published_one() -> None:
    shapes = [shape_of(f"gpt-{size}") for size in ("6b", "13b", "70b", "135b", "276b", "412b")]
    asked = question(batch=1)
    found = largest_model(asked, shapes)
    assert found is not None
    assert found.name == "gpt-276b"
    assert largest_model(question("gpu-only", batch=1), shapes) is None


@pytest.mark.parametrize("policy", ["lohan", "lohan+", "zero-offload"])
def test_least_ram_fits_and_one_gib_less_does_not(policy: str) -> None:
    asked = question(policy)
    least = least_machine(asked, [Tier.RAM])
    assert least is not None
    assert asked.fits(machine=least)
    assert not asked.fits(machine=least.with_ram(least.ram_bytes - GIB))


def test_ram_alone_does_not_help_where_the_gpu_is_short() -> None:
    assert least_machine(question("flashneuron", "gpt-175b"), [Tier.RAM]) is None


@pytest.mark.parametrize(
    ("model", "drive_bytes", "ram_bytes"),
    [
        ("gpt2", 500 * 10**6, 128 * MIB),
        pytest.param("llama-3.1-405b", 2 * 10**12, 8 * GIB, marks=pytest.mark.long),
    ],
)
def test_machine_with_just_enough_of_everything_short_fits(
    model: str, drive_bytes: int, ram_bytes: int
) -> None:
    machine = desktop_with_drive_of(drive_bytes).with_ram(ram_bytes)
    asked = replace(question("lohan+", model, 1), machine=machine)
    plan = make_plan(asked.policy, asked.machine, asked.shape, asked.workload)
    short = sorted(plan.ledger.shortages())
    assert short == [Tier.RAM, Tier.SSD]
    grown = least_machine(asked, short)
    assert grown is not None
    assert asked.fits(machine=grown)
    assert not asked.fits(machine=grown.with_ssds(len(grown.ssds) - 1))


def test_nearest_fits_all_fit_and_begin_with_the_smaller_batch() -> None:
    asked = question("lohan", batch=4096)
    offers = nearest_fits(
        asked, [Tier.GPU], [shape_of("gpt-6b"), shape_of("gpt-70b")], POLICIES.values()
    )
    assert offers[0].option.startswith("--batch ")
    assert fits(asked, int(offers[0].option.split()[1]))
    # Larger models are no remedy.
    assert all("70b" not in offer.option for offer in offers)
