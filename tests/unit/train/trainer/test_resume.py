"""Seals, resume points and archives of a trainer; the engine's contract stands in for the SSDs."""

import json
import os
import pathlib
import signal
from typing import Any

import datasets
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import SFTConfig

from lohan.errors import CheckpointError, ConfigError, Corrupt, OutOfSpace
from lohan.train.trainer.trainer import SFTTrainer
from support import tiny_chat
from support.plain_engine import attach_plainly


@pytest.fixture(autouse=True)
def _plain_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lohan.train.trainer.saving.attach_with", attach_plainly)


ROWS = tiny_chat.conversations(14)


class Killed(Exception):
    """A process that ends at once."""


class KillAfter(TrainerCallback):
    """Ends training the hard way after a step, before anything is saved for it."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            raise Killed


class SignalAt(TrainerCallback):
    def __init__(self, step: int, number: int) -> None:
        self.step, self.number = step, number

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            os.kill(os.getpid(), self.number)


def make(
    folder: pathlib.Path, *callbacks: TrainerCallback, rows: Any = ROWS, **changes: Any
) -> SFTTrainer:
    offload = {"ssd": str(folder / "ssd"), **changes.pop("offload", {})}
    settings: dict[str, Any] = {
        "use_cpu": True,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 2,
        "learning_rate": 1e-3,
        "warmup_steps": 2,
        "logging_steps": 1,
        "save_steps": 2,
        "neftune_noise_alpha": 5.0,
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    return SFTTrainer(
        # Dropout and noise, so that random numbers decide the weights.
        tiny_chat.model(attention_dropout=0.2),
        SFTConfig(output_dir=str(folder / "out"), **{**settings, **changes}),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tiny_chat.tokenizer(),
        callbacks=list(callbacks),
        offload=offload,
    )


def states(trainer: SFTTrainer) -> dict[str, torch.Tensor]:
    found = {f"p.{name}": tensor for name, tensor in trainer.engine.weights()}
    for name, mean, square in trainer.engine.moments():
        found |= {f"m.{name}": mean, f"v.{name}": square}
    return found


def assert_same(one: SFTTrainer, other: SFTTrainer) -> None:
    first, second = states(one), states(other)
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name
    assert one.state.global_step == other.state.global_step


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> SFTTrainer:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lohan.train.trainer.saving.attach_with", attach_plainly)
        trainer = make(tmp_path_factory.mktemp("undisturbed"))
        trainer.train()
    assert trainer.state.global_step == 8
    return trainer


@pytest.mark.parametrize(
    "step", [3, *(pytest.param(step, marks=pytest.mark.slow) for step in (1, 4, 7))]
)
def test_a_killed_run_continues_to_the_same_bits(
    tmp_path: pathlib.Path, undisturbed: SFTTrainer, step: int
) -> None:
    with pytest.raises(Killed):
        make(tmp_path, KillAfter(step)).train()
    resumed = make(tmp_path)
    resumed.train(resume_from_checkpoint=True)
    assert_same(resumed, undisturbed)
    losses = [
        [entry["loss"] for entry in one.state.log_history if "loss" in entry]
        for one in (resumed, undisturbed)
    ]
    assert losses[0] == losses[1]


@pytest.mark.slow
def test_a_run_killed_twice_continues_to_the_same_bits(
    tmp_path: pathlib.Path, undisturbed: SFTTrainer
) -> None:
    for step in (3, 5):
        with pytest.raises(Killed):
            make(tmp_path, KillAfter(step)).train(resume_from_checkpoint=step > 3)
    resumed = make(tmp_path)
    resumed.train(resume_from_checkpoint=True)
    assert_same(resumed, undisturbed)


@pytest.mark.parametrize(
    ("number", "ending"),
    [
        (signal.SIGTERM, SystemExit),
        pytest.param(signal.SIGINT, KeyboardInterrupt, marks=pytest.mark.slow),
    ],
)
def test_a_signal_finishes_the_step_seals_it_and_ends(
    tmp_path: pathlib.Path,
    undisturbed: SFTTrainer,
    number: int,
    ending: type[BaseException],
    capfd: pytest.CaptureFixture[str],
) -> None:
    trainer = make(tmp_path, SignalAt(2, number))
    with pytest.raises(ending) as ended:
        trainer.train()
    if ending is SystemExit:
        assert ended.value.code == 143
    assert trainer.engine.sealed.step == 3
    assert "finished and sealed" in capfd.readouterr().err
    resumed = make(tmp_path)
    resumed.train(resume_from_checkpoint=True)
    assert_same(resumed, undisturbed)


def test_a_second_signal_ends_the_process_at_once(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes = []

    def ended(code: int) -> None:
        codes.append(code)
        raise Killed

    monkeypatch.setattr(os, "_exit", ended)
    twice = [SignalAt(1, signal.SIGINT), SignalAt(1, signal.SIGINT)]
    with pytest.raises(Killed):
        make(tmp_path, *twice).train()
    assert codes == [130]


@pytest.mark.slow
def test_a_folder_without_its_seal_is_not_the_resume_point(
    tmp_path: pathlib.Path, undisturbed: SFTTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between the two: files of step 4 are there, the seal is of step 2."""
    trainer = make(tmp_path)
    engine = trainer.engine
    seal = engine.seal

    def seal_or_die(metadata: dict[str, Any]) -> None:
        if metadata["step"] == 4:
            raise Killed
        seal(metadata)

    monkeypatch.setattr(engine, "seal", seal_or_die)
    with pytest.raises(Killed):
        trainer.train()
    assert (tmp_path / "out" / "checkpoint-4").exists()
    resumed = make(tmp_path)
    resumed.train(resume_from_checkpoint=True)
    assert_same(resumed, undisturbed)


def test_only_the_folder_of_the_newest_seal_is_kept(undisturbed: SFTTrainer) -> None:
    assert [path.name for path in undisturbed.out.glob("checkpoint-*")] == ["checkpoint-8"]
    record = json.loads((undisturbed.out / "_lohan" / "run.json").read_text())
    assert record["run_id"] == undisturbed.engine.run_id
    assert record["ssd"] == list(undisturbed.offload.ssd)


def test_a_changed_argument_is_refused_with_the_difference(tmp_path: pathlib.Path) -> None:
    with pytest.raises(Killed):
        make(tmp_path, KillAfter(3)).train()
    changed = make(tmp_path, learning_rate=2e-3, logging_steps=5)
    with pytest.raises(ConfigError, match=r"learning_rate: 0\.001 -> 0\.002") as refused:
        changed.train(resume_from_checkpoint=True)
    assert "logging_steps" not in refused.value.what


def test_changed_rows_are_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(Killed):
        make(tmp_path, KillAfter(3)).train()
    with pytest.raises(ConfigError, match="training rows"):
        make(tmp_path, rows=tiny_chat.conversations(14, seed=9)).train(resume_from_checkpoint=True)


def test_a_second_run_in_the_same_folder_is_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(Killed):
        make(tmp_path, KillAfter(1)).train()
    with pytest.raises(CheckpointError, match="--resume"):
        make(tmp_path).train()


def test_without_a_run_there_is_nothing_to_resume(tmp_path: pathlib.Path) -> None:
    with pytest.raises(CheckpointError, match="there is no run"):
        make(tmp_path).train(resume_from_checkpoint=True)


def test_an_archive_moved_to_another_machine_continues_to_the_same_bits(
    tmp_path: pathlib.Path, undisturbed: SFTTrainer
) -> None:
    with pytest.raises(Killed):
        make(tmp_path / "a", KillAfter(5), offload={"archive_steps": 3}).train()
    moved = tmp_path / "moved"
    (tmp_path / "a" / "out" / "checkpoint-3").rename(moved)
    resumed = make(tmp_path / "b")
    resumed.train(resume_from_checkpoint=str(moved))
    assert_same(resumed, undisturbed)


@pytest.mark.slow
def test_a_damaged_archive_is_named(tmp_path: pathlib.Path) -> None:
    with pytest.raises(Killed):
        make(tmp_path / "a", KillAfter(5), offload={"archive_steps": 3}).train()
    archive = tmp_path / "a" / "out" / "checkpoint-3"
    path = archive / "states" / "M32-00001.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(Corrupt, match="M32-00001"):
        make(tmp_path / "b").train(resume_from_checkpoint=str(archive))


def test_damaged_states_offer_the_newest_archive(tmp_path: pathlib.Path) -> None:
    with pytest.raises(Killed):
        make(tmp_path, KillAfter(5), offload={"archive_steps": 3}).train()
    for path in (tmp_path / "ssd").rglob("seal.json"):
        path.unlink()
    with pytest.raises(CheckpointError, match=r"--resume-from .*checkpoint-3"):
        make(tmp_path, offload={"archive_steps": 3}).train(resume_from_checkpoint=True)


@pytest.mark.slow
def test_archives_are_kept_as_the_limit_says(tmp_path: pathlib.Path) -> None:
    trainer = make(tmp_path, offload={"archive_steps": 2}, save_total_limit=2, save_steps=3)
    trainer.train()
    kept = sorted(path.name for path in trainer.out.glob("checkpoint-*"))
    assert kept == ["checkpoint-6", "checkpoint-8"]


def test_models_that_are_asked_for_stay_and_load(tmp_path: pathlib.Path) -> None:
    offload = {"save_model_steps": 2}
    settings: dict[str, Any] = {"save_total_limit": 2, "save_strategy": "no"}
    with pytest.raises(Killed):
        make(tmp_path, KillAfter(5), offload=offload, **settings).train()
    trainer = make(tmp_path, offload=offload, **settings)
    trainer.train(resume_from_checkpoint=True)
    assert sorted(path.name for path in trainer.out.glob("checkpoint-*")) == [
        *("checkpoint-6", "checkpoint-8")
    ]
    found = []
    for path in sorted(trainer.out.glob("checkpoint-*")):
        assert not (path / "states").exists()
        found.append(AutoModelForCausalLM.from_pretrained(path).lm_head.weight)
        assert AutoTokenizer.from_pretrained(path).chat_template
    last = dict(trainer.engine.weights())["model.embed_tokens.weight"]
    assert torch.equal(found[1], last.to(found[1].dtype))
    assert not torch.equal(found[0], found[1])
    with pytest.raises(CheckpointError, match="holds no copy"):
        make(tmp_path / "other").train(resume_from_checkpoint=str(trainer.out / "checkpoint-6"))


@pytest.mark.slow
def test_a_small_folder_of_an_old_seal_cannot_be_resumed(tmp_path: pathlib.Path) -> None:
    trainer = make(tmp_path)
    trainer.train()
    newest = trainer.out / "checkpoint-8"
    with pytest.raises(CheckpointError, match="holds no copy"):
        make(tmp_path / "other").train(resume_from_checkpoint=str(newest))


def test_too_little_room_for_the_model_is_refused_before_the_first_step(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "lohan.train.run.disk_reservation.shutil.disk_usage",
        lambda path: type("Usage", (), {"free": 1000}),
    )
    trainer = make(tmp_path)
    with pytest.raises(OutOfSpace, match="for the finished model") as refused:
        trainer.train()
    assert "1,000 B" in str(refused.value) or "1.0 KB" in str(refused.value)
    assert trainer.sealed_step is None
    assert not (tmp_path / "ssd").exists()


def test_the_write_budget_seals_and_stops(tmp_path: pathlib.Path) -> None:
    step_bytes = 12 * sum(p.numel() for p in tiny_chat.model().parameters())
    trainer = make(tmp_path, offload={"write_budget": 3 * step_bytes})
    trainer.train()
    assert trainer.engine.sealed.step == trainer.state.global_step == 3
    assert trainer.stopped_because is not None
    assert "write budget" in trainer.stopped_because
    resumed = make(tmp_path, offload={"write_budget": 5 * step_bytes})
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 5


def test_every_log_is_in_the_log_file_also_nan(tmp_path: pathlib.Path) -> None:
    trainer = make(tmp_path, max_steps=2)
    trainer.train()
    trainer.log({"loss": float("nan")})
    lines = (trainer.out / "_lohan" / "log.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines[:2]] == [1, 2]
    assert '"loss": NaN' in lines[-1]
    assert json.loads(lines[0])["step_seconds"] > 0
