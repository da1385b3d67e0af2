"""What trainers of preferences cannot do is refused with its reason, before anything is made."""

import pathlib
from typing import Any

import pytest
import trl

import lohan
from lohan.errors import ConfigError
from support import tiny_chat
from support.plain_engine import attach_plainly
from support.preference_runs import arguments, judged, pairs, plain_kind, table

pytestmark = pytest.mark.filterwarnings("ignore:.*TRL_EXPERIMENTAL_SILENCE")


@pytest.fixture(autouse=True)
def _plain_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lohan.train.trainer.saving.attach_with", attach_plainly)


def made(kind: Any, config: Any, place: pathlib.Path, **more: Any) -> Any:
    changes = {"eval_strategy": "no", "max_steps": 1, **more.pop("changes", {})}
    given = {"train_dataset": table(pairs(4)), "processing_class": tiny_chat.tokenizer()}
    return kind(
        tiny_chat.model(),
        args=arguments(config, place / "out", **changes),
        offload={"ssd": str(place / "ssd")},
        **{**given, **more},
    )


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"ref_model": object()}, "ref_model is not supported: the reference is the model as it"),
        ({"changes": {"sync_ref_model": True}}, "sync_ref_model is not supported"),
        ({"train_dataset": table(pairs(4)).to_iterable_dataset()}, "train_dataset is a stream"),
        ({"train_dataset": table([{"images": [], **pairs(1)[0]}])}, "has the column images"),
    ],
)
def test_a_reference_that_cannot_be_computed_beforehand_is_refused(
    tmp_path: pathlib.Path, more: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        made(lohan.DPOTrainer, trl.DPOConfig, tmp_path, **more)
    assert not (tmp_path / "out").exists()


def test_rows_to_evaluate_that_come_after_a_step_are_refused(tmp_path: pathlib.Path) -> None:
    trainer = made(lohan.DPOTrainer, trl.DPOConfig, tmp_path)
    before = trainer.evaluate(table(pairs(2, seed=3)))
    assert before["eval_loss"] == pytest.approx(0.6931, abs=1e-3)  # the model is its reference
    trainer.train()
    with pytest.raises(ConfigError, match=r"after step 1: .* the first weights, which are gone"):
        trainer.evaluate(table(pairs(2, seed=3)))
    trainer.close()


def test_a_resume_without_rows_to_evaluate_keeps_their_reference(tmp_path: pathlib.Path) -> None:
    held_out = table(pairs(3, seed=3))

    def resumed(steps: int, **more: Any) -> Any:
        changes = {"max_steps": steps, "lr_scheduler_type": "constant", "save_strategy": "no"}
        trainer = made(lohan.DPOTrainer, trl.DPOConfig, tmp_path, changes=changes, **more)
        trainer.train(resume_from_checkpoint=steps > 1)
        trainer.close()
        return trainer

    first = resumed(1, eval_dataset=held_out).eval_dataset["ref_chosen_logps"]
    resumed(2)
    assert resumed(3, eval_dataset=held_out).eval_dataset["ref_chosen_logps"] == first
    with pytest.raises(ConfigError, match=r"rows to evaluate on \(eval\) are not those of"):
        resumed(4, eval_dataset=table(pairs(3, seed=4)))


def test_the_mixin_alone_before_a_trainer_with_a_reference_is_refused(
    tmp_path: pathlib.Path,
) -> None:
    class Mine(lohan.OffloadMixin, trl.DPOTrainer):
        pass

    with pytest.raises(ConfigError, match=r"in RAM as a whole.*lohan.DPOTrainer"):
        made(Mine, trl.DPOConfig, tmp_path)


def test_trainers_that_generate_are_refused(tmp_path: pathlib.Path) -> None:
    class Mine(lohan.OffloadMixin, trl.GRPOTrainer):
        pass

    with pytest.raises(ConfigError, match=r"GRPOTrainer is not supported: .*answers the model"):
        Mine(tiny_chat.model(), offload={"ssd": str(tmp_path)})
    with pytest.raises(AttributeError, match="trains on answers the model writes"):
        lohan.GRPOTrainer  # noqa: B018
    changes = {"generate_during_eval": True}
    with pytest.raises(ConfigError, match="generate_during_eval is not supported"):
        made(lohan.ORPOTrainer, plain_kind("ORPO").ORPOConfig, tmp_path, changes=changes)


def test_dropout_in_the_two_forwards_of_kto_is_refused(tmp_path: pathlib.Path) -> None:
    trainer = lohan.KTOTrainer(
        tiny_chat.model(attention_dropout=0.1),
        args=arguments(trl.KTOConfig, tmp_path / "out", eval_strategy="no", disable_dropout=False),
        offload={"ssd": str(tmp_path / "ssd")},
        train_dataset=table(judged(4)),
        processing_class=tiny_chat.tokenizer(),
    )
    with pytest.raises(ConfigError, match=r"loss_type=kto .*dropout"):
        trainer.train()
    assert not (tmp_path / "ssd").exists()


def test_parameters_may_stand_in_the_order_of_their_trainer(tmp_path: pathlib.Path) -> None:
    args = arguments(trl.DPOConfig, tmp_path / "out", eval_strategy="no")
    given = (tiny_chat.model(), None, args, None, table(pairs(4)), None, tiny_chat.tokenizer())
    trainer = lohan.DPOTrainer(*given, offload={"ssd": str(tmp_path)})
    assert trainer.args is args
    with pytest.raises(TypeError, match="is given args twice"):
        lohan.DPOTrainer(*given, args=args, offload={"ssd": str(tmp_path)})
    with pytest.raises(TypeError, match="13 are given"):
        lohan.DPOTrainer(*[None] * 13, offload={"ssd": str(tmp_path)})
