"""`load_best_model_at_end`: the model of the best step, whatever happens to the process."""

import pathlib
import shutil
from typing import Any

import datasets
import pytest
import transformers
from transformers import EarlyStoppingCallback, TrainerCallback
from trl import SFTConfig

from lohan.errors import CheckpointError, ConfigError, Corrupt, LohanWarning, OutOfSpace
from lohan.train.trainer.trainer import SFTTrainer
from support import tiny_chat
from support.plain_engine import attach_plainly

ROWS = tiny_chat.conversations(14)
SCORES = {1: 1.0, 2: 3.0, 3: 2.0, 4: 0.0}
BEST = 2


@pytest.fixture(autouse=True)
def _plain_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lohan.train.trainer.saving.attach_with", attach_plainly)


class Killed(Exception):
    """A process that ends at once."""


class KillAfter(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            raise Killed

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        raise Killed


class Scored(SFTTrainer):
    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        found = super().evaluation_loop(*args, **kwargs)
        found.metrics["eval_score"] = SCORES[self.state.global_step]
        return found


def make(folder: pathlib.Path, *callbacks: TrainerCallback, **changes: Any) -> SFTTrainer:
    settings: dict[str, Any] = {
        "use_cpu": True,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 4,
        "learning_rate": 1e-3,
        "save_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_total_limit": 1,
        "load_best_model_at_end": True,
        "metric_for_best_model": "score",
        "greater_is_better": True,
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    return Scored(
        tiny_chat.model(attention_dropout=0.2),
        SFTConfig(output_dir=str(folder / "out"), **{**settings, **changes.pop("args", {})}),
        train_dataset=datasets.Dataset.from_list(ROWS),
        eval_dataset=datasets.Dataset.from_list(ROWS[:2]),
        processing_class=tiny_chat.tokenizer(),
        callbacks=list(callbacks),
        offload={"ssd": str(folder / "ssd"), **changes},
    )


def model_of(out: pathlib.Path) -> bytes:
    return (out / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """What a run without the option exports at the best step."""
    folder = tmp_path_factory.mktemp("plain")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lohan.train.trainer.saving.attach_with", attach_plainly)
        settings = {"load_best_model_at_end": False}
        plain = make(folder, KillAfter(BEST + 1), args=settings, archive_steps=BEST)
        with pytest.raises(Killed):
            plain.train()
    return model_of(folder / "out" / f"checkpoint-{BEST}")


def test_the_model_is_that_of_the_best_step(tmp_path: pathlib.Path, expected: bytes) -> None:
    trainer = make(tmp_path)
    trainer.train()
    best = tmp_path / "out" / f"checkpoint-{BEST}"
    assert trainer.state.best_metric == SCORES[BEST]
    assert trainer.state.best_model_checkpoint == str(best)
    assert {path.name for path in (tmp_path / "out").glob("checkpoint-*")} == {
        best.name,
        "checkpoint-4",
    }
    trainer.save_model()
    trainer.save_model(str(tmp_path / "copy"))
    for folder in (tmp_path / "out", tmp_path / "copy", best):
        assert model_of(folder) == expected
        transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert (tmp_path / "copy" / "model.safetensors").stat().st_mode & 0o044
    assert not list((tmp_path / "copy").glob("*state*"))
    trainer.tell = None
    with pytest.warns(LohanWarning, match="weights of step 4"):
        trainer.evaluate()


@pytest.mark.parametrize("step", [2, 3, 4, 5])
def test_a_killed_run_ends_with_the_same_model(
    tmp_path: pathlib.Path, expected: bytes, step: int
) -> None:
    with pytest.raises(Killed):
        make(tmp_path, KillAfter(step)).train()
    resumed = make(tmp_path)
    resumed.train(resume_from_checkpoint=True)
    resumed.save_model()
    assert model_of(tmp_path / "out") == expected


def test_killed_between_the_best_model_and_its_seal_it_ends_with_the_same_model(
    tmp_path: pathlib.Path, expected: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make(tmp_path)
    seal = trainer.engine.seal

    def seal_or_die(metadata: dict[str, Any]) -> None:
        if metadata["step"] == BEST:
            raise Killed
        seal(metadata)

    monkeypatch.setattr(trainer.engine, "seal", seal_or_die)
    with pytest.raises(Killed):
        trainer.train()
    moved = tmp_path / "moved"
    moved.mkdir()
    (tmp_path / "out").rename(moved / "out")
    (tmp_path / "ssd").rename(moved / "ssd")
    resumed = make(moved)
    resumed.train(resume_from_checkpoint=True)
    resumed.save_model()
    assert model_of(moved / "out") == expected


@pytest.mark.parametrize("step", [3, 5])
def test_patience_that_ended_has_ended_for_a_resume_too(
    tmp_path: pathlib.Path, expected: bytes, step: int
) -> None:
    patience = EarlyStoppingCallback(early_stopping_patience=1)
    with pytest.raises(Killed):
        make(tmp_path, patience, KillAfter(step)).train()
    resumed = make(tmp_path, EarlyStoppingCallback(early_stopping_patience=1))
    resumed.train(resume_from_checkpoint=True)
    resumed.save_model()
    assert resumed.state.global_step == 3
    assert model_of(tmp_path / "out") == expected


def test_how_much_patience_is_left_goes_on(tmp_path: pathlib.Path) -> None:
    with pytest.raises(Killed):
        make(tmp_path, EarlyStoppingCallback(2), KillAfter(4)).train()
    resumed = make(tmp_path, again := EarlyStoppingCallback(2))
    resumed.train(resume_from_checkpoint=True)
    assert again.early_stopping_patience_counter == 2


def test_a_best_model_that_is_gone_or_damaged_is_named(tmp_path: pathlib.Path) -> None:
    with pytest.raises(Killed):
        make(tmp_path, KillAfter(5)).train()
    best = tmp_path / "out" / f"checkpoint-{BEST}"
    content = bytearray(model_of(best))
    content[-1] ^= 1
    (best / "model.safetensors").write_bytes(bytes(content))
    resumed = make(tmp_path)
    resumed.train(resume_from_checkpoint=True)
    with pytest.raises(Corrupt, match=r"model\.safetensors"):
        resumed.save_model()
    shutil.rmtree(best)
    with pytest.raises(CheckpointError, match=f"names {best.name} as the best"):
        make(tmp_path).train(resume_from_checkpoint=True)


def test_a_metric_that_is_not_evaluated_is_named(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match="no such number") as refused:
        make(tmp_path, args={"metric_for_best_model": "bleu"}).train()
    assert "eval_score" in refused.value.why


def test_room_is_asked_for_the_best_model_too(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "lohan.train.run.disk_reservation.shutil.disk_usage",
        lambda path: type("Usage", (), {"free": 1000}),
    )
    with pytest.raises(OutOfSpace, match=r"the finished model twice"):
        make(tmp_path).train()


def test_a_run_that_saves_only_what_is_best_is_sealed_when_it_is_stopped(
    tmp_path: pathlib.Path, expected: bytes
) -> None:
    class Stop(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                trainer.stop_request.signal_number = 15

    settings = {"save_strategy": "best"}
    trainer = make(tmp_path, Stop(), args=settings)
    with pytest.raises(SystemExit):
        trainer.train()
    assert trainer.engine.sealed.step == 3
    resumed = make(tmp_path, args=settings)
    resumed.train(resume_from_checkpoint=True)
    resumed.save_model()
    assert model_of(tmp_path / "out") == expected
