"""Which batch to take: doubled while it pays, said when it is worth it."""

from dataclasses import replace

import pytest

from lohan.hardware.presets import machine_named
from lohan.model.names import shape_of
from lohan.plan import make_plan
from lohan.plan.limits import Question
from lohan.plan.workload import Workload
from lohan.simulate.answers.batch_advice import advised, batch_choices
from lohan.simulate.quick import quick_step
from lohan.simulate.result import SimulatedStep


def question(batch: int, parts: int | None = None) -> Question:
    return Question(
        policy="lohan+",
        machine=machine_named("desktop-4090"),
        shape=shape_of("gpt-1.55b"),
        workload=Workload(batch=batch, sequence=1024, num_micro_batches=parts),
    )


def step_of(asked: Question) -> SimulatedStep:
    return quick_step(
        make_plan(asked.policy, asked.machine, asked.shape, asked.workload), asked.machine
    )


def test_the_choices_are_the_plans_of_those_batches() -> None:
    asked = question(1)
    choices = batch_choices(asked, step_of(asked), step_of)
    assert [choice.batch for choice in choices] == [2**n for n in range(len(choices))]
    for choice in choices:
        alone = step_of(question(choice.batch))
        assert choice.step.step_seconds == alone.step_seconds
        assert choice.faster == pytest.approx(
            alone.tokens_per_second / choices[0].step.tokens_per_second, rel=1e-12
        )
    assert advised(choices).batch > 1
    assert advised(choices).is_worth_saying


def fake(rate: float, written: int, batch: int, like: SimulatedStep) -> SimulatedStep:
    return replace(like, num_tokens=batch, step_seconds=batch / rate, written_bytes=written)


def test_where_more_brings_little_the_batch_stays() -> None:
    asked = question(8)
    now = fake(100.0, 0, 8, step_of(asked))
    rates = {16: 105.0, 32: 200.0}
    choices = batch_choices(
        asked, now, lambda q: fake(rates[q.workload.batch], 0, q.workload.batch, now)
    )
    assert [choice.batch for choice in choices] == [8, 16]
    assert advised(choices).batch == 8
    assert not advised(choices).is_worth_saying


def test_half_the_wear_is_worth_saying_at_equal_speed() -> None:
    asked = question(8)
    now = fake(100.0, 800, 8, step_of(asked))
    choices = batch_choices(
        asked, now, lambda q: fake(100.0, 800, q.workload.batch, now) if q.workload.batch < 32
        else None
    )  # fmt: skip
    assert [round(choice.wear, 9) for choice in choices] == [1.0, 0.5]
    assert advised(choices) is choices[1]
    assert choices[1].is_worth_saying


def test_accumulated_batches_grow_by_more_micro_batches_of_the_same_size() -> None:
    asked = question(8, parts=4)
    now = step_of(question(8))
    seen = []

    def note(changed: Question) -> None:
        seen.append((changed.workload.batch, changed.workload.num_micro_batches))

    assert len(batch_choices(asked, now, note)) == 1
    assert seen == [(16, 8)]
