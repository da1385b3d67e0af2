"""Prompts answered at both ends of a run: as the model in memory answers, and without a trace."""

import json
import pathlib
from collections.abc import Iterator
from typing import Any

import datasets
import pytest
import torch
import transformers
from trl import SFTConfig

from lohan.errors import ConfigError
from lohan.train.trainer.samples import MOST_NEW_TOKENS, Asked
from lohan.train.trainer.trainer import SFTTrainer
from support import tiny_chat
from support.trainer_engines import attach_small

ROWS = tiny_chat.conversations(8)
LONGEST = 64
PROMPTS: list[Any] = ["red", [{"role": "user", "content": "green and blue"}]]


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("lohan.train.trainer.saving.attach_with", attach_small)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def make(folder: pathlib.Path, **changes: Any) -> SFTTrainer:
    tiny_chat.save_model(folder / "model", attention_dropout=0.2)
    return SFTTrainer(
        str(folder / "model"),
        SFTConfig(
            output_dir=str(folder / "out"),
            use_cpu=True,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            max_steps=3,
            learning_rate=1e-3,
            neftune_noise_alpha=5.0,
            logging_steps=1,
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
            pad_to_multiple_of=LONGEST,
        ),
        train_dataset=datasets.Dataset.from_list(ROWS),
        processing_class=tiny_chat.tokenizer(),
        offload={"ssd": [str(folder / "a"), str(folder / "b")]},
        **changes,
    )


def in_memory(folder: pathlib.Path) -> list[list[int]]:
    """The judge: a model on disk, in plain PyTorch, asked for one token after the other."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    tokenizer = tiny_chat.tokenizer()
    talks = [[{"role": "user", "content": "red"}], PROMPTS[1]]
    texts = [
        tokenizer.apply_chat_template(talk, add_generation_prompt=True, tokenize=False)
        for talk in talks
    ]
    prompts = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    answers = []
    for prompt in prompts:
        row = list(prompt)
        for _ in range(min(MOST_NEW_TOKENS, LONGEST - max(map(len, prompts)))):
            filled = row + [row[-1]] * (LONGEST - len(row))
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([filled]), use_cache=False).logits
            row.append(int(logits[0, len(row) - 1].argmax()))
            if row[-1] == tokenizer.eos_token_id:
                break
        answers.append(row[len(prompt) :])
    return answers


def test_answers_are_those_of_the_model_in_memory_and_training_goes_the_same_way(
    tmp_path: pathlib.Path,
) -> None:
    plain = make(tmp_path / "plain")
    plain.train()
    asked = make(tmp_path / "asked", sample_prompts=PROMPTS)  # making one sets the seed
    told: list[str] = []
    asked.tell = told.append
    asked.train()
    asked.save_model()
    first, second = dict(plain.engine.weights()), dict(asked.engine.weights())
    assert all(torch.equal(first[name], second[name]) for name in first | second)
    losses = [
        [entry["loss"] for entry in one.state.log_history if "loss" in entry]
        for one in (plain, asked)
    ]
    assert losses[0] == losses[1]
    lines = (tmp_path / "asked" / "out" / "_lohan" / "log.jsonl").read_text().splitlines()
    logged = {line["step"]: line["samples"] for line in map(json.loads, lines) if "samples" in line}
    assert list(logged) == [0, 3]
    tokenizer = tiny_chat.tokenizer()
    for step, folder in ((0, "model"), (3, "out")):
        tokens = in_memory(tmp_path / "asked" / folder)
        words = [tokenizer.decode(one, skip_special_tokens=True).strip() for one in tokens]
        assert [one["answer"] for one in logged[step]] == words
    assert Asked(asked, asked.sample_prompts).tokens() == tokens
    assert len({token for one in tokens for token in one}) > 1
    assert [one["prompt"] for one in logged[0]] == ["red", "green and blue"]
    assert any("passes through the model" in sentence for sentence in told)
    assert "green and blue" in (tmp_path / "asked" / "out" / "_lohan" / "report.html").read_text()
    plain.close()
    asked.close()


def test_a_prompt_longer_than_every_row_is_refused_before_states_are_written(
    tmp_path: pathlib.Path,
) -> None:
    trainer = make(tmp_path, sample_prompts="red " * 300)
    with pytest.raises(ConfigError, match="longest row 64"):
        trainer.train()
    assert not (tmp_path / "a").exists()


def test_what_cannot_be_asked_is_refused(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make(tmp_path)
    trainer.processing_class.chat_template = None
    assert Asked(trainer, ["red"])._prompts == [trainer.processing_class("red")["input_ids"]]
    with pytest.raises(ConfigError, match="no chat template"):
        Asked(trainer, PROMPTS)
    monkeypatch.setattr(trainer, "largest_step", lambda: None)
    with pytest.raises(ConfigError, match="looked at beforehand"):
        Asked(trainer, ["red"])
