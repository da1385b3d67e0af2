"""Small copies trained offloaded and in memory: equal, and what is said when they are not."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lohan.engine import engine
from lohan.errors import ConfigError, DoesNotFit
from lohan.lanes.step_record import StepRecord
from lohan.verify import Case, SmallCopy, all_cases, make_small_copy, verify_copy
from lohan.vocabulary import BlockId
from support.loss_families import FAMILIES

PLANNED = Case(activations="as planned", num_micro_batches=2, max_grad_norm=1.0)
SWAPPED = Case(activations="swapped to SSD", num_micro_batches=1, max_grad_norm=None)


@pytest.fixture(scope="module")
def gpt() -> SmallCopy:
    return make_small_copy("gpt-13b")


def test_all_combinations_are_run_and_those_with_one_judge_follow_each_other() -> None:
    cases = all_cases()
    assert len(set(cases)) == 20
    keys = [(case.num_micro_batches, case.max_grad_norm) for case in cases]
    assert len([key for key, before in zip(keys[1:], keys, strict=False) if key != before]) == 3


def test_offloading_changes_no_bit_and_leaves_nothing(gpt: SmallCopy, tmp_path: Path) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    lines: list[str] = []
    found = verify_copy(
        gpt, ssd=[tmp_path], num_steps=2, cases=[PLANNED, SWAPPED], report=lines.append
    )
    assert found.is_equal
    assert found.tolerance is None
    assert [line.rpartition(": ")[2] for line in lines] == ["equal", "equal"]
    assert found.cases[1].written_bytes > 0
    assert found.ram_bytes < 64 << 20
    assert list(tmp_path.iterdir()) == []
    assert torch.equal(torch.get_rng_state(), before)


def test_a_loss_whose_labels_are_not_shifted_is_the_concatenated_batchs(tmp_path: Path) -> None:
    FAMILIES["masked"].build().config.save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps({**fields, "architectures": ["BertForMaskedLM"]})
    )
    masked = make_small_copy(str(tmp_path))
    assert masked.architecture == "BertForMaskedLM"
    assert verify_copy(masked, num_steps=1, cases=[PLANNED]).is_equal


def miscount_from(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From this step on, the second block is updated as if it were one step further."""
    made = engine.begin_record

    def record(*given: Any) -> StepRecord:
        found = made(*given)
        if found.number >= step:
            for tensor in found.tensors[BlockId(1)]:
                object.__setattr__(tensor, "step", tensor.step + 1)
        return found

    monkeypatch.setattr(engine, "begin_record", record)


@pytest.mark.parametrize("step", [1, 2])
def test_the_step_and_tensor_in_which_a_difference_began_are_named(
    gpt: SmallCopy, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    miscount_from(step, monkeypatch)
    found = verify_copy(gpt, num_steps=3, cases=[SWAPPED])
    assert not found.is_equal
    difference = found.cases[0].difference
    assert difference is not None
    assert difference.step == step
    assert difference.what.startswith("master of blocks.0.")


def test_a_model_that_differs_from_itself_cannot_be_judged(
    gpt: SmallCopy, monkeypatch: pytest.MonkeyPatch
) -> None:
    miscount_from(1, monkeypatch)
    calls = []

    def changing_batch(seed: int) -> dict[str, Any]:
        calls.append(seed)
        return gpt.make_batch(len(calls))

    moody = SmallCopy(
        **{
            **{name: getattr(gpt, name) for name in SmallCopy.__slots__},
            "make_batch": changing_batch,
        }
    )
    with pytest.raises(ConfigError, match="trained twice in memory"):
        verify_copy(moody, num_steps=2, cases=[SWAPPED])


def test_a_budget_that_was_given_is_kept_to(gpt: SmallCopy) -> None:
    with pytest.raises(DoesNotFit):
        verify_copy(gpt, ram_bytes=1 << 20, num_steps=1, cases=[PLANNED])


def test_a_loss_may_read_hidden_states_with_three_micro_batches() -> None:
    cases = all_cases(counts=(3,), reads_states=True)
    assert len(cases) == 10
    found = verify_copy(make_small_copy("llama-3.1-8b"), num_steps=2, cases=cases[:1])
    assert found.is_equal
    assert found.cases[0].case.words.endswith(
        "3 micro-batches, clipping on, a loss on hidden states"
    )


def test_a_model_without_hidden_states_is_told_so(gpt: SmallCopy) -> None:
    with pytest.raises(ConfigError, match="gives no hidden states"):
        verify_copy(gpt, num_steps=1, cases=all_cases(reads_states=True)[:1])
