"""What `lohan train` refuses, in which words, before anything is trained."""

import pathlib
from typing import Any

import pytest

from support import tiny_chat
from support.command_line import run_lohan
from support.small_training import make_place, train

# Paths are looked at before values: these lead somewhere.
PLACES = ("--model=m", "--data={place}/rows.jsonl", "--out=o", "--ssd={place}/ssd")


@pytest.fixture
def place(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    return make_place(tmp_path, monkeypatch)


def _cut(place: pathlib.Path) -> None:
    (place / "rows.jsonl").write_text('{"messages": [{"role"')


def _empty(place: pathlib.Path) -> None:
    (place / "rows.jsonl").write_text("")


def _wrong_order(place: pathlib.Path) -> None:
    rows = tiny_chat.conversations(3)
    rows[1]["messages"].reverse()
    tiny_chat.write_jsonl(place / "rows.jsonl", rows)


def _no_template(place: pathlib.Path) -> None:
    (place / "model" / "chat_template.jinja").unlink()


def _corrupt_shard(place: pathlib.Path) -> None:
    path = place / "model" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def _no_ssd(place: pathlib.Path) -> None:
    (place / "ssd").rmdir()


def _ssd_is_a_file(place: pathlib.Path) -> None:
    _no_ssd(place)
    (place / "ssd").write_text("")


def _out_is_a_file(place: pathlib.Path) -> None:
    (place / "out").write_text("")


def _no_tokenizer(place: pathlib.Path) -> None:
    for path in (place / "model").glob("tokenizer*"):
        path.unlink()


def _no_model(place: pathlib.Path) -> None:
    (place / "model" / "config.json").unlink()


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_cut, "rows.jsonl line 1 is not JSON"),
        (_empty, "is empty"),
        (_wrong_order, "refuses row 2"),
        (_no_template, "has no chat template"),
        (_corrupt_shard, "model.safetensors"),
        (_no_ssd, "an SSD directory cannot be used"),
        (_ssd_is_a_file, "an SSD directory cannot be used"),
        (_out_is_a_file, "it is not a directory"),
        (_no_model, "config.json"),
        (_no_tokenizer, "model has no tokenizer"),
    ],
)
def test_what_cannot_work_is_an_error_before_training_starts(
    place: pathlib.Path, spoil: Any, words: str
) -> None:
    spoil(place)
    done = train(place)
    assert done.exit_code == 2
    assert words in done.stderr.replace("\n", " ")
    assert "do:" in done.stderr
    assert not (place / "out" / "_lohan" / "run.json").exists()
    assert "step 1" not in done.stdout


def test_rows_without_a_token_to_train_on_are_refused(place: pathlib.Path) -> None:
    done = train(place, max_length="2")
    assert done.exit_code == 2
    assert "max_length" in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([*PLACES, "--seed"], "--seed has no value"),
        (["--model=m", "--data=d", "--out=o", "--ssd=s", "--ram", "48"], "48GiB"),
        ([*PLACES, "--use_peft", "false", "--lora_r", "4"], "lora_r is set and use_peft is false"),
        (["--max_seq_length", "5"], "write max_length"),
        (["one.yaml", "two.yaml"], '"two.yaml" stands alone'),
        ([*PLACES, "--seed", "x"], "seed is 'x'"),
    ],
)
def test_a_command_line_that_cannot_be_meant_is_refused(
    place: pathlib.Path, words: list[str], said: str
) -> None:
    done = run_lohan("train", *(word.format(place=place) for word in words))
    assert done.exit_code == 2
    assert said in done.stderr


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("max_length", "-5"),
        ("gradient_accumulation_steps", "0"),
        ("per_device_train_batch_size", "0"),
        ("dataloader_num_workers", "-1"),
        ("save_steps", "-1"),
        ("learning_rate", "-1"),
        ("adam_beta1", "1.5"),
        ("lr_scheduler_kwargs", "{nonsense: 3}"),
        ("dataset_text_field", "nothing"),
    ],
)
def test_a_value_that_cannot_be_meant_is_refused_by_its_name_and_leaves_nothing(
    place: pathlib.Path, key: str, value: str
) -> None:
    done = train(place, **{key: value})
    assert done.exit_code == 2
    assert key in done.stderr
    assert not (place / "out").exists()
    assert list((place / "ssd").iterdir()) == []


@pytest.mark.parametrize(
    "changes", [{"max_steps": "-1", "num_train_epochs": "0"}, {"max_steps": "0"}]
)
def test_training_nothing_is_refused(place: pathlib.Path, changes: dict[str, str]) -> None:
    done = train(place, **changes)
    assert done.exit_code == 2
    assert "nothing would be trained" in done.stderr


def test_a_hub_that_cannot_be_reached_is_an_error_before_training_starts(
    place: pathlib.Path,
) -> None:
    done = train(place, push_to_hub="true", hub_model_id="me/model")
    assert done.exit_code == 2
    assert "me/model cannot be made on the hub" in done.stderr
    assert not (place / "out").exists()


def test_missing_packages_are_said_with_the_command_that_brings_them(
    place: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib.util

    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "trl" else find_spec(name)
    )
    done = train(place)
    assert done.exit_code == 2
    assert "lohan[train]" in done.stderr


def test_what_the_engine_cannot_do_is_refused_before_transformers_asks_for_more(
    place: pathlib.Path,
) -> None:
    done = train(place, deepspeed="zero.json")
    assert done.exit_code == 2
    assert "deepspeed is not supported" in done.stderr


def test_evaluating_without_rows_says_where_they_are_given(place: pathlib.Path) -> None:
    done = train(place, eval_strategy="steps")
    assert done.exit_code == 2
    assert "--eval_data FILE" in done.stderr
    assert not (place / "out").exists()
