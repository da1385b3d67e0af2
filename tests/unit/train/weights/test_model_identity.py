"""A resume and an export take the model of the run and no other; versions are told."""

import json
import pathlib
import shutil
from typing import Any

import datasets
import pytest
import torch
import transformers

from lohan.errors import ConfigError
from lohan.train.data.dataset import hash_rows
from lohan.train.trainer import trainer as trainers
from lohan.train.weights.model_identity import (
    refuse_other_model,
    source_identity,
    tokenizer_identity,
)
from lohan.train.weights.source import open_source
from support import tiny_chat
from support.plain_engine import attach_plainly
from support.small_training import make_place, train

SETTINGS = {"save_steps": "1", "max_steps": "2"}


@pytest.fixture
def place(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    made = make_place(tmp_path, monkeypatch)
    done = train(made, **SETTINGS)
    assert done.exit_code == 0, done.stderr
    return made


def change(path: pathlib.Path, **fields: Any) -> None:
    found = json.loads(path.read_text())
    for name, value in fields.items():
        inner = found
        *outer, last = name.split("__")
        for key in outer:
            inner = inner[key]
        assert inner.get(last) != value
        inner[last] = value
    path.write_text(json.dumps(found))


def refused(place: pathlib.Path, *words: str, **changes: str) -> str:
    done = train(place, "--resume", *words, **SETTINGS, **changes)
    assert done.exit_code == 2, done.stdout
    return done.stderr


def test_a_model_that_is_not_the_same_is_refused_with_the_difference(place: pathlib.Path) -> None:
    model = place / "model"
    shutil.copytree(model, place / "kept")

    def restored() -> None:
        shutil.rmtree(model)
        shutil.copytree(place / "kept", model)

    change(model / "config.json", rms_norm_eps=0.5)
    assert "config.rms_norm_eps: 1e-06 -> 0.5" in refused(place)
    restored()
    change(model / "config.json", rope_parameters__rope_theta=5.0)
    assert "config.rope_parameters.rope_theta: 10000.0 -> 5.0" in refused(place)
    restored()
    change(model / "tokenizer_config.json", padding_side="left")
    assert "tokenizer.padding_side: 'right' -> 'left'" in refused(place)
    restored()
    # The generation markers alone: the tokens of the rows stay the same.
    (place / "other.jinja").write_text(tiny_chat.CHAT_TEMPLATE.replace("take turns", "alternate"))
    said = refused(place, "--chat_template_path", str(place / "other.jinja"))
    assert "chat_template: " in said
    assert "attention: 'sdpa' -> 'eager'" in refused(
        place, "--model_init_kwargs", "{attn_implementation: eager}"
    )
    moved = place / "elsewhere"
    model.rename(moved)
    again = train(place, "--resume", **{**SETTINGS, "model": str(moved)})
    assert again.exit_code == 0, again.stderr


def test_a_tokenizer_is_the_same_after_its_use() -> None:
    used, other = tiny_chat.tokenizer(), tiny_chat.tokenizer()
    before = tokenizer_identity(used)
    used(["red", "green blue"], padding=True, truncation=True, max_length=3)
    assert tokenizer_identity(used) == before
    other.add_tokens(["<|new|>"])
    assert tokenizer_identity(other)["tokenizer"] != before["tokenizer"]
    assert tokenizer_identity(other)["chat_template"] == before["chat_template"]
    assert set(tokenizer_identity(None).values()) == {None}


def test_a_moved_branch_is_told_by_the_commit_of_its_snapshot(tmp_path: pathlib.Path) -> None:
    first, second = (tmp_path / "snapshots" / name for name in ("aaaa", "bbbb"))
    tiny_chat.save_model(first)
    shutil.copytree(first, second)
    before, now = (open_source(path, should_warn=False).identity for path in (first, second))
    with pytest.raises(ConfigError, match="revision: 'aaaa' -> 'bbbb'") as error:
        refuse_other_model(before, now, what="a run")
    assert "revision: aaaa" in error.value.remedy


def test_code_that_comes_with_a_model_counts(tmp_path: pathlib.Path) -> None:
    config = tiny_chat.config()
    config.auto_map = {"AutoModel": "modeling.Model"}
    (tmp_path / "modeling.py").write_text("one")
    before = source_identity(config, tmp_path)
    (tmp_path / "modeling.py").write_text("two")
    with pytest.raises(ConfigError, match="code: "):
        refuse_other_model(before, source_identity(config, tmp_path), what="a run")


def test_what_another_release_adds_to_a_configuration_is_not_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = source_identity(tiny_chat.config())
    now = {**before, "config.brand_new": True}
    with pytest.raises(ConfigError, match="brand_new"):
        refuse_other_model(before, now, what="a run")
    monkeypatch.setattr("transformers.__version__", "99.0")
    now["transformers"] = source_identity(None)["transformers"]
    refuse_other_model(before, now, what="a run")
    with pytest.raises(ConfigError, match="hidden_size"):
        refuse_other_model(before, {**now, "config.hidden_size": 1}, what="a run")


def test_other_versions_are_told_and_not_refused(
    place: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lohan.train.trainer import resuming

    found = resuming.package_versions()
    monkeypatch.setattr(resuming, "package_versions", lambda: {**found, "torch": "9.9"})
    done = train(place, "--resume", **SETTINGS)
    assert done.exit_code == 0, done.stderr
    assert f"sealed with other versions (torch: '{torch.__version__}' -> '9.9')" in done.stdout


def test_states_that_are_not_where_the_user_says_are_told(place: pathlib.Path) -> None:
    (place / "other").mkdir()
    done = train(place, "--resume", **SETTINGS, ssd=str(place / "other"))
    assert done.exit_code == 0, done.stderr
    assert f"is not in {place / 'other'}: it is taken from {place / 'ssd'}" in done.stdout


def test_masks_of_a_plain_trainer_count_as_rows(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not only tokens and labels: the model sees `attention_mask` too, and no notes."""
    monkeypatch.setattr("lohan.train.trainer.saving.attach_with", attach_plainly)
    rows = {"input_ids": [[1, 2, 3]], "labels": [[1, 2, 3]], "attention_mask": [[1, 1, 1]]}

    def hashed(**changes: Any) -> str | None:
        made = trainers.Trainer(
            tiny_chat.model(),
            transformers.TrainingArguments(str(tmp_path / "out"), use_cpu=True, report_to="none"),
            train_dataset=datasets.Dataset.from_dict({**rows, **changes}),
            offload={"ssd": str(tmp_path)},
        )
        return made.data_hash

    assert hashed() != hashed(attention_mask=[[1, 1, 0]])
    assert hashed(note=["mine"]) == hashed(note=["yours"])


def test_all_columns_count_where_none_is_known() -> None:
    one, other = (datasets.Dataset.from_dict({"pixels": [[value]]}) for value in (1, 2))
    assert hash_rows(one, ()) != hash_rows(other, ())
    assert hash_rows(one, None) != hash_rows(other, None)


def test_infinity_in_a_configuration_can_be_sealed() -> None:
    config = transformers.LlamaConfig(time_step_limit=[0.0, float("inf")])
    found = source_identity(config)
    assert found["config.time_step_limit"] == [0.0, "Infinity"]
    json.dumps(found, allow_nan=False)
