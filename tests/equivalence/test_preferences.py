"""Training on preferences with states on disk, against TRL itself in memory with fp32 masters."""

import pathlib
from typing import Any

import pytest
import torch
import transformers
import trl

import lohan
from lohan.errors import ConfigError
from lohan.train.weights.source import WeightsWarning
from support import tiny_chat
from support.preference_runs import (
    arguments,
    in_memory,
    judged,
    pairs,
    plain_kind,
    reward_model,
    table,
)
from support.trainer_engines import attach_small

# Of the engine, and of the clock.
NOT_COMPARED = (
    *("grad_norm", "prediction_error", "seconds", "bytes", "busy_"),
    *("runtime", "per_second", "time", "flos"),
)
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*deprecated.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*TRL_EXPERIMENTAL_SILENCE"),
]


@pytest.fixture(autouse=True)
def _small_and_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("lohan.train.trainer.saving.attach_with", attach_small)


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "DPO": ("DPO", {"precompute_ref_log_probs": True}),
    "DPO, two losses": (
        "DPO",
        {"precompute_ref_log_probs": True, "loss_type": ["ipo", "sft"], "loss_weights": [1, 0.5]},
    ),
    "KTO": ("KTO", {"precompute_ref_log_probs": True, "per_device_train_batch_size": 3}),
    "KTO without KL": (
        "KTO",
        {"precompute_ref_log_probs": True, "loss_type": "apo_zero_unpaired"},
    ),
    "ORPO": ("ORPO", {"max_length": 64}),
    "CPO": ("CPO", {"max_length": 64, "loss_type": "simpo", "cpo_alpha": 0.5}),
    "Reward": ("Reward", {"center_rewards_coefficient": 0.01}),
}
QUICK = ("DPO", "KTO", "ORPO", "Reward")


def given_to(name: str) -> dict[str, Any]:
    rows = judged(14) if name == "KTO" else pairs(14)
    return {"train_dataset": table(rows), "eval_dataset": table(rows[:5])}


def model_of(name: str) -> Any:
    return reward_model() if name == "Reward" else tiny_chat.model()


def offloaded(place: pathlib.Path, name: str, changes: dict[str, Any], **more: Any) -> Any:
    config = getattr(plain_kind(name), f"{name}Config")
    return getattr(lohan, f"{name}Trainer")(
        more.pop("model", None) or model_of(name),
        args=arguments(config, place / "ours", **changes),
        processing_class=tiny_chat.tokenizer(),
        offload={"ssd": str(place / "ssd")},
        **{**given_to(name), **more},
    )


def plainly(place: pathlib.Path, name: str, changes: dict[str, Any], **more: Any) -> Any:
    config = getattr(plain_kind(name), f"{name}Config")
    kind = getattr(plain_kind(name), f"{name}Trainer")
    args = arguments(config, place / "plain", **{"bf16": False, **changes})
    model = more.pop("model", None) or model_of(name)
    return in_memory(kind, model, args, **given_to(name), **more)


def history(trainer: Any) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in entry.items() if not any(k in key for k in NOT_COMPARED)}
        for entry in trainer.state.log_history
    ]


def assert_same_training(ours: Any, plain: Any) -> None:
    assert history(ours) == history(plain)
    assert len(history(ours)) > 3
    trained = dict(ours.engine.weights())
    for name, parameter in plain.model.named_parameters():
        assert torch.equal(trained[name].to(parameter.dtype), parameter), name


@pytest.mark.parametrize(
    "case", [one if one in QUICK else pytest.param(one, marks=pytest.mark.slow) for one in CASES]
)
def test_losses_metrics_and_weights_are_those_of_trl(tmp_path: pathlib.Path, case: str) -> None:
    name, changes = CASES[case]
    # One after the other: making a trainer sets the seed.
    ours = offloaded(tmp_path, name, changes)
    ours.train()
    plain = plainly(tmp_path, name, changes)
    plain.train()
    assert_same_training(ours, plain)
    ours.close()


def test_what_reports_to_other_tools_get_has_the_lanes_and_the_prediction(
    tmp_path: pathlib.Path,
) -> None:
    """transformers hands each log to the callbacks of `report_to` as it does to this one."""
    seen = Logged()
    trainer = offloaded(tmp_path, "Reward", {"max_steps": 2}, callbacks=[seen])
    with pytest.raises(ConfigError, match="LlamaForSequenceClassification cannot be asked"):
        trainer.answers(["red"])
    trainer.train()
    last = next(logs for logs in reversed(seen.logs) if "loss" in logs)
    wanted = {"busy_gpu", "busy_cpu", "read_bytes", "written_bytes"}
    wanted |= {"step_seconds", "predicted_step_seconds", "prediction_error", "tokens_per_second"}
    assert wanted <= last.keys()
    assert all(isinstance(last[name], float) for name in wanted)
    trainer.close()


class Logged(transformers.TrainerCallback):
    def __init__(self) -> None:
        self.logs: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.logs.append(dict(logs))


def test_a_reference_that_trl_computes_in_every_step_is_the_one_computed_before(
    tmp_path: pathlib.Path,
) -> None:
    """Rows of one batch are padded alike where a batch is one pair, so all bits are the same."""
    tiny_chat.save_model(tmp_path / "model")
    changes = {"per_device_train_batch_size": 1, "per_device_eval_batch_size": 1}
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", dtype=torch.bfloat16
    )
    plain = plainly(tmp_path, "DPO", changes, model=loaded)
    assert plain.ref_model is not None
    plain.train()
    ours = offloaded(tmp_path, "DPO", changes, model=str(tmp_path / "model"))
    ours.train()
    assert_same_training(ours, plain)
    ours.close()


@pytest.mark.parametrize("name", ["DPO", "KTO"])
def test_a_resumed_run_compares_with_the_first_weights(tmp_path: pathlib.Path, name: str) -> None:
    changes = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "logging_steps": 1}
    whole = offloaded(tmp_path / "whole", name, changes)
    whole.train()
    stopped = offloaded(tmp_path / "stopped", name, changes, callbacks=[StopAfter(2)])
    stopped.train()
    stopped.close()
    resumed = offloaded(tmp_path / "stopped", name, changes)
    resumed.train(resume_from_checkpoint=True)
    # TRL counts tokens anew in every process.
    ends = [
        [{key: one[key] for key in one if "num_tokens" not in key} for one in history(trainer)[-3:]]
        for trainer in (resumed, whole)
    ]
    assert ends[0][:2] == ends[1][:2]
    trained = dict(resumed.engine.weights())
    for key, value in whole.engine.weights():
        assert torch.equal(trained[key], value), key
    for trainer in (whole, resumed):
        trainer.close()


def test_a_larger_evaluation_is_not_told_as_the_size_of_a_step(tmp_path: pathlib.Path) -> None:
    told: list[str] = []
    changes = {"per_device_eval_batch_size": 5, "eval_strategy": "no", "max_steps": 1}
    trainer = offloaded(tmp_path, "DPO", changes)
    trainer.tell = told.append
    trainer.train()
    # Two micro-batches of two pairs each, though the reference came in batches of five pairs.
    (plan,) = [line for line in told if "tokens a step" in line]
    assert " 8 x " in plan
    trainer.close()


class StopAfter(transformers.TrainerCallback):
    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step >= self._step


def test_a_reward_model_by_name_begins_with_the_head_that_trl_draws(
    tmp_path: pathlib.Path,
) -> None:
    tiny_chat.save_model(tmp_path / "model")
    with pytest.warns(WeightsWarning, match=r"score.weight .* seed 42"):
        ours = offloaded(tmp_path, "Reward", {}, model=str(tmp_path / "model"))
    config = arguments(trl.RewardConfig, tmp_path / "plain", bf16=False)
    plain = trl.RewardTrainer(
        str(tmp_path / "model"),
        config,
        processing_class=tiny_chat.tokenizer(),
        **given_to("Reward"),
    )
    first = dict(ours.engine.weights())
    for key, value in plain.model.named_parameters():
        assert torch.equal(first[key], value.float()), key
    assert "score.weight" in first
    ours.train()
    ours.save_model(str(tmp_path / "saved"))
    kind = transformers.AutoModelForSequenceClassification
    loaded = kind.from_pretrained(tmp_path / "saved", dtype=torch.bfloat16)
    assert loaded.config.num_labels == 1
    trained = dict(ours.engine.weights())
    assert torch.equal(loaded.score.weight, trained["score.weight"].to(torch.bfloat16))
    ours.close()
