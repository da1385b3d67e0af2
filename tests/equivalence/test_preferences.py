"""Training on preferences with states on disk, against TRL itself in memory with fp32 masters."""

import json
import pathlib
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
import transformers
import trl
from accelerate.utils import convert_outputs_to_fp32

import lohan
from lohan.errors import ConfigError
from lohan.train.weights.source import WeightsWarning
from support import tiny_chat, trl_runs
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
    if name == "SFT":
        rows = [{"text": row["prompt"] + row["chosen"]} for row in rows]
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


def lora(**more: Any) -> peft.LoraConfig:
    return peft.LoraConfig(r=4, lora_alpha=8, **more)


ADAPTED: dict[str, tuple[str, Callable[[], Any]]] = {
    "DPO": ("DPO", lora),
    "DPO, DoRA": ("DPO", lambda: lora(use_dora=True)),
    "DPO, IA3": ("DPO", lambda: peft.IA3Config(task_type="CAUSAL_LM")),
    "DPO, modules to save": ("DPO", lambda: lora(modules_to_save=["lm_head"])),
    "DPO, not the base at first": ("DPO", lambda: lora(init_lora_weights=False)),
    "KTO": ("KTO", lambda: lora(init_lora_weights=False)),
    "ORPO": ("ORPO", lora),
    "CPO": ("CPO", lora),
    "Reward": ("Reward", lambda: lora(task_type="SEQ_CLS")),
}
QUICKLY_ADAPTED = ("DPO, not the base at first", "Reward")
SLOWLY_ADAPTED = ("DPO, DoRA", "KTO", "ORPO")


@pytest.mark.parametrize(
    "case",
    [
        *QUICKLY_ADAPTED,
        *(pytest.param(one, marks=pytest.mark.slow) for one in SLOWLY_ADAPTED),
        *(
            pytest.param(one, marks=pytest.mark.long)
            for one in ADAPTED
            if one not in (*QUICKLY_ADAPTED, *SLOWLY_ADAPTED)
        ),
    ],
)
def test_adapters_have_the_losses_metrics_and_weights_of_trl_and_peft(
    tmp_path: pathlib.Path, case: str
) -> None:
    """Their reference is the base, with the adapter switched off."""
    name, config = ADAPTED[case]
    changes: dict[str, Any] = {"max_steps": 3}
    if name in ("DPO", "KTO"):
        changes["precompute_ref_log_probs"] = True
    ours = offloaded(tmp_path, name, changes, model=untied(name), peft_config=config())
    ours.train()
    plain = adapted_plainly(tmp_path, name, changes, untied(name), peft_config=config())
    plain.train()
    assert_same_training(ours, plain)
    ours.save_model()
    fields = json.loads((tmp_path / "ours" / "adapter_config.json").read_text())
    assert fields["peft_type"] == str(config().peft_type.value)
    ours.close()


def test_an_adapter_that_a_model_came_with_is_part_of_its_reference(
    tmp_path: pathlib.Path,
) -> None:
    """TRL copies it and asks the copy in every step; here what it gives at first is computed."""
    changes = {"per_device_train_batch_size": 1, "per_device_eval_batch_size": 1, "max_steps": 3}

    def given() -> Any:
        torch.manual_seed(1)
        return peft.get_peft_model(untied("DPO"), lora(init_lora_weights=False))

    ours = offloaded(tmp_path, "DPO", changes, model=given())
    ours.train()
    assert list(ours.model.peft_config) == ["default"]
    plain = adapted_plainly(tmp_path, "DPO", changes, given())
    assert list(plain.model.peft_config) == ["default", "ref"]
    plain.train()
    assert_same_training(ours, plain)
    ours.close()


def untied(name: str) -> Any:
    return reward_model() if name == "Reward" else tiny_chat.model(tie_word_embeddings=False)


def adapted_plainly(
    place: pathlib.Path, name: str, changes: dict[str, Any], model: Any, **more: Any
) -> Any:
    """TRL's own, with adapters in what the base computes in."""
    config = getattr(plain_kind(name), f"{name}Config")
    made = getattr(plain_kind(name), f"{name}Trainer")(
        model,
        args=arguments(config, place / "plain", **{"bf16": False, **changes}),
        processing_class=tiny_chat.tokenizer(),
        **given_to(name),
        **more,
    )
    for parameter in made.model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    made.model.forward = convert_outputs_to_fp32(made.model.forward)
    made.optimizer = trl_runs.master_optimizer(made)
    return made


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
        if ".ref." in name:  # the copy of an adapter
            continue
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


RESUMED: dict[str, tuple[str, dict[str, Any]]] = {
    "DPO": ("DPO", {}),
    "DPO of an adapter": ("DPO", {}),
    "KTO": ("KTO", {}),
    "ORPO": ("ORPO", {"max_length": 64}),
    "CPO": ("CPO", {"max_length": 64}),
    "pretrain": ("SFT", {"packing": True, "packing_strategy": "wrapped", "max_length": 12}),
}


# By DPO of an adapter, which has a reference too, and by ORPO, which has none either.
COVERED = ("DPO", "CPO")


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [pytest.param(one, marks=pytest.mark.long) if one in COVERED else one for one in RESUMED],
)
def test_a_killed_run_goes_on_with_the_same_bits(tmp_path: pathlib.Path, case: str) -> None:
    """And compares with the first weights, which are gone."""
    name, more = RESUMED[case]
    changes = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, **more}

    def made(folder: str, **given: Any) -> Any:
        if "adapter" in case:
            given |= {"peft_config": lora(init_lora_weights=False), "model": untied(name)}
        return offloaded(tmp_path / folder, name, changes, **given)

    whole = made("whole")
    whole.train()
    killed = made("killed", callbacks=[KillAfter(3)])
    with pytest.raises(Killed):
        killed.train()
    killed.close()
    resumed = made("killed")
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


class Killed(Exception):
    """A process that ends at once."""


class KillAfter(transformers.TrainerCallback):
    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self._step:
            raise Killed


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
