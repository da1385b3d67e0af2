"""`lohan train --task`: rows of every task, from a file to a model that loads."""

import json
import pathlib
from typing import Any

import pytest
import transformers

from support import tiny_chat
from support.command_line import Ran, run_lohan
from support.preference_runs import judged, pairs
from support.small_training import make_place
from support.trainer_engines import attach_small


@pytest.fixture
def place(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    made = make_place(tmp_path, monkeypatch)
    monkeypatch.setattr("lohan.train.trainer.saving.attach_with", attach_small)
    return made


def in_messages(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    roles = {"prompt": "user"}
    return [
        {
            name: [{"role": roles.get(name, "assistant"), "content": text}]
            if isinstance(text, str)
            else text
            for name, text in row.items()
        }
        for row in rows
    ]


TEXTS = [{"text": " ".join(tiny_chat.WORDS) * 2}] * 10
ROWS: dict[str, list[dict[str, Any]]] = {
    "pretrain": TEXTS,
    "dpo": in_messages(pairs(8)),
    "reward": in_messages(pairs(8)),
    "kto": in_messages(judged(8)),
    "orpo": pairs(8),
    "cpo": in_messages(pairs(8)),
}


def train(place: pathlib.Path, task: str, *words: str, rows: Any = None, **more: str) -> Ran:
    tiny_chat.write_jsonl(place / "rows.jsonl", ROWS[task] if rows is None else rows)
    given = {
        "task": task,
        "model": str(place / "model"),
        "data": str(place / "rows.jsonl"),
        "ssd": str(place / "ssd"),
        "out": str(place / "out"),
        "device": "cpu",
        "max_steps": "2",
        "max_length": "64",
        "per_device_train_batch_size": "2",
        "gradient_accumulation_steps": "2",
        **more,
    }
    words = tuple(word for key, value in given.items() for word in (f"--{key}", value)) + words
    return run_lohan("train", *words)


@pytest.mark.parametrize("task", [task for task in ROWS if task != "orpo"])
def test_a_task_leaves_a_model_that_loads(place: pathlib.Path, task: str) -> None:
    done = train(place, task)
    assert done.exit_code == 0, done.stderr
    assert "step 2/2" in done.stdout
    kind = transformers.AutoModelForCausalLM
    if task == "reward":
        kind = transformers.AutoModelForSequenceClassification
        fields = json.loads((place / "out" / "config.json").read_text())
        assert fields["architectures"] == ["LlamaForSequenceClassification"]
    folder = place / "out"
    if task in ("reward", "kto"):
        folder = place / "exported"
        exported = run_lohan("export", place / "out", "--out", folder)
        assert exported.exit_code == 0, exported.stderr
    model, notes = kind.from_pretrained(folder, output_loading_info=True)
    assert not notes["missing_keys"]
    assert model.config.num_labels == 1 or task != "reward"
    assert f"task: {task}  # command line" in (place / "out/_lohan/lohan.yaml").read_text()


@pytest.mark.parametrize("words", [(), ("--lora_r", "4")], ids=["all", "adapter"])
def test_a_run_of_preferences_goes_on_where_it_was(
    place: pathlib.Path, words: tuple[str, ...]
) -> None:
    settings = {"lr_scheduler_type": "constant", "save_steps": "1"}
    assert train(place, "dpo", *words, **settings).exit_code == 0
    assert (place / "out" / "adapter_model.safetensors").exists() == bool(words)
    longer = run_lohan("train", place / "out", "--resume", "--max_steps", "3")
    assert longer.exit_code == 0, longer.stderr
    assert "step 3/3" in longer.stdout
    assert "computing the reference" not in longer.stdout


def test_a_dry_run_of_preferences_leaves_nothing(place: pathlib.Path) -> None:
    done = train(place, "dpo", "--dry-run", machine="desktop-4090")
    assert done.exit_code == 0, done.stderr
    assert not (place / "out").exists()


def test_a_stream_of_texts_is_trained_on_as_a_table_is(place: pathlib.Path) -> None:
    found = []
    for words in ((), ("--streaming",)):
        out = place / f"out{len(words)}"
        done = train(place, "pretrain", *words, out=str(out), train_sampling_strategy="sequential")
        assert done.exit_code == 0, done.stderr
        lines = map(json.loads, (out / "_lohan" / "log.jsonl").read_text().splitlines())
        found.append([line["loss"] for line in lines if "loss" in line])
    assert found[0] == found[1]
    assert len(found[0]) == 2


WRONG: dict[str, tuple[str, list[dict[str, Any]], dict[str, str], str]] = {
    "no rejected": ("dpo", [{"prompt": "a", "chosen": "b"}], {}, "pairs: chosen, rejected"),
    "equal": ("dpo", [*pairs(2), {"chosen": "a", "rejected": "a"}], {}, "line 3: chosen and"),
    "kinds": (
        "reward",
        [*pairs(1), {"chosen": "a", "rejected": [{"role": "user", "content": "b"}]}],
        {},
        "line 2: chosen, rejected are not of one kind",
    ),
    "empty": ("orpo", [{**pairs(1)[0], "rejected": " "}], {}, "rejected is ' '"),
    "margin": ("reward", [{**pairs(1)[0], "margin": "wide"}], {}, "margin is 'wide'"),
    "none": ("dpo", [{"chosen": None, "rejected": "b"}], {}, "chosen is None"),
    "label": ("kto", [{**judged(1)[0], "label": "maybe"}], {}, "label is 'maybe'"),
    "generating": ("grpo", [], {}, "answers the model writes"),
    "unknown": ("dop", [], {}, "dpo"),
    "stream": ("dpo", pairs(2), {"streaming": "true"}, "streaming is on and task is dpo"),
    "endless": ("pretrain", TEXTS, {"streaming": "true", "max_steps": "-1"}, "set max_steps"),
    "argument": ("dpo", pairs(2), {"packing": "true"}, 'unknown key "packing"'),
    "template": ("dpo", [{"chosen": [{"role": "x", "content": "b"}], "rejected": [
        {"role": "assistant", "content": "c"}]}], {}, "refuses row 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_rows_and_settings_that_are_not_of_the_task_are_refused(
    place: pathlib.Path, name: str
) -> None:
    task, rows, more, said = WRONG[name]
    done = train(place, task, rows=rows, **more)
    assert done.exit_code == 2
    assert said in " ".join(done.stderr.split()), done.stderr
    assert not (place / "out").exists()


@pytest.mark.parametrize("task", ["dpo", "reward", "kto", "orpo"])
def test_both_answers_are_previewed(place: pathlib.Path, task: str) -> None:
    file = tiny_chat.write_jsonl(place / "rows.jsonl", ROWS[task])
    done = run_lohan(
        *("data", "preview", file, "--model", place / "model", "--task", task, "--rows", "1")
    )
    assert done.exit_code == 0, done.stderr
    first = ROWS[task][0]
    answer = first.get("chosen", first.get("completion"))
    text = answer if isinstance(answer, str) else answer[0]["content"]
    before = "<|user|>" if task == "reward" else text
    assert f"[loss]{before}" in done.stdout
    assert "row 1, completion: " in done.stdout or "row 1, rejected: " in done.stdout
    assert "row 2" not in done.stdout
    assert f"{len(ROWS[task])} rows of the form" in done.stdout
