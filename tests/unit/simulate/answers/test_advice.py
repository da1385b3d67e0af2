"""One sentence on what limited a run, judged by planning and simulating the change itself."""

from dataclasses import replace

import pytest

from lohan.hardware import machine_named
from lohan.model.shape import Growth
from lohan.plan import Workload, make_plan
from lohan.plan.cost import OVERLAP_LOSS
from lohan.plan.limits import Question
from lohan.simulate.answers.advice import Advice, advice_for, limit_sentence, question_of
from lohan.simulate.choose import best_plan
from lohan.simulate.quick import quick_step
from support.hand_made import block, model, operator

ONE_DRIVE = machine_named("desktop-4090").with_ssds(1).with_ram(4 << 30)
GROWING = replace(
    operator(0),
    output_bytes=Growth(per_sequence=4e6),
    forward_flops=Growth(per_sequence=2e11),
    backward_flops=Growth(per_sequence=4e11),
)
SHAPE = model(*[block(GROWING, num_parameters=2 * 10**8) for _ in range(4)])


def asked(batch: int, num_micro_batches: int = 1) -> Question:
    workload = Workload(batch=batch, sequence=1024, num_micro_batches=num_micro_batches)
    return Question(policy="lohan+", machine=ONE_DRIVE, shape=SHAPE, workload=workload)


def advise(question: Question) -> list[Advice]:
    plan = best_plan(question.policy, question.machine, question.shape, question.workload)
    return advice_for(plan, question.machine)


def rate(question: Question) -> float:
    plan = best_plan(question.policy, question.machine, question.shape, question.workload)
    return quick_step(plan, question.machine).tokens_per_second


def test_advice_promises_no_more_than_planning_the_change_gives() -> None:
    question = asked(4)
    found = {one.change: one.factor for one in advise(question)}
    judged = rate(replace(question, machine=ONE_DRIVE.with_ssds(2))) / rate(question)
    # Changes are not searched thoroughly: the estimate's own plan may be slower by what it makes of
    # imperfect overlap.
    assert judged * (1 - OVERLAP_LOSS) <= found["one more drive"] <= judged * (1 + 1e-9)
    batch = next(change for change in found if change.startswith("a batch of "))
    rows = int(batch.removeprefix("a batch of ").removesuffix(" rows"))
    larger = replace(question, workload=asked(rows, rows // 4).workload)
    judged = rate(larger) / rate(question)
    assert judged * (1 - OVERLAP_LOSS) <= found[batch] <= judged * (1 + 1e-9)


def test_the_question_behind_a_plan_gives_the_same_plan_again() -> None:
    question = asked(8, 2)
    plan = make_plan(question.policy, question.machine, question.shape, question.workload)
    again = question_of(plan, ONE_DRIVE.with_ram(1).with_gpu_memory(1))
    assert again.workload == question.workload
    repeated = make_plan(again.policy, again.machine, again.shape, again.workload)
    assert repeated.blocks == plan.blocks
    assert repeated.ledger.budgets == plan.ledger.budgets


DRIVES = Advice(change="twice the drives", factor=1.62)
BATCH = Advice(change="a batch of 32 rows", factor=1.4)


@pytest.mark.parametrize(
    ("limit", "advice", "expected"),
    [
        ("SSD writes", None, "SSD writes limited this run (in 94% of its steps)."),
        (
            "SSD writes",
            [DRIVES],
            "SSD writes limited this run (in 94% of its steps); twice the drives would make it "
            "1.6x as fast (simulated).",
        ),
        (
            "the SSDs",
            [DRIVES, BATCH],
            "The SSDs limited this run (in 94% of its steps); twice the drives would make it 1.6x "
            "as fast, a batch of 32 rows 1.4x (simulated).",
        ),
        (
            "the processor",
            [BATCH],
            "The processor limited this run (in 94% of its steps); a GPU would help most.",
        ),
        (
            "waiting of the processor and SSD writes for each other",
            [],
            "The processor and SSD writes, which waited for each other, limited this run (in 94% "
            "of its steps); a GPU would help most.",
        ),
        (
            "GPU compute",
            [],
            "GPU compute limited this run (in 94% of its steps); a faster GPU would help most.",
        ),
        (
            "CPU updates",
            [],
            "CPU updates limited this run (in 94% of its steps); neither more drives or RAM nor a "
            "larger batch would help much (simulated).",
        ),
    ],
)
def test_one_sentence(limit: str, advice: list[Advice] | None, expected: str) -> None:
    assert limit_sentence(limit, 0.94, advice) == expected
