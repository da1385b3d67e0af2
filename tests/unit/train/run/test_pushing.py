"""What leaves the machine, and who can read what stays: the model's own files and nothing else."""

import pathlib
import stat
from typing import Any

import huggingface_hub
import pytest

from lohan.errors import ConfigError
from lohan.train.trainer.trainer import SFTTrainer
from support import tiny_chat, trl_runs
from support.small_training import make_place, train

MODEL = {
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}


class Hub:
    """In place of the hub: notes what is sent, and from where."""

    def __init__(self) -> None:
        self.commits: list[dict[str, str]] = []
        self.is_down = False

    def create_repo(self, api: Any, name: str, **kwargs: Any) -> Any:
        return type("Url", (), {"repo_id": f"me/{pathlib.Path(name).name}"})

    def upload_folder(
        self,
        api: Any,
        *,
        folder_path: Any,
        allow_patterns: Any = None,
        ignore_patterns: Any = None,
        **kwargs: Any,
    ) -> Any:
        if self.is_down:
            raise ConnectionError("no network")
        folder = pathlib.Path(folder_path)
        names = [p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()]
        sent = huggingface_hub.utils.filter_repo_objects(
            names, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns
        )
        self.commits.append({name: str(folder / name) for name in sent})


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    made = Hub()
    for name in ("create_repo", "upload_folder"):
        method = getattr(made, name)
        monkeypatch.setattr(
            huggingface_hub.HfApi,
            name,
            lambda api, *args, _method=method, **kwargs: _method(api, *args, **kwargs),
        )
    return made


@pytest.fixture
def place(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    made = make_place(tmp_path, monkeypatch)
    (made / "rows.jsonl").chmod(0o600)
    return made


def test_a_run_that_is_pushed_sends_the_model_and_its_card(place: pathlib.Path, hub: Hub) -> None:
    done = train(place, "--push_to_hub", "--offload.archive_steps", "2", hub_model_id="me/mine")
    assert done.exit_code == 0, done.stderr
    assert "hub_strategy=every_save: a seal writes no model" in done.stdout
    (sent,) = hub.commits
    assert sent.keys() == {*MODEL, "README.md"}
    assert {str(place / "out" / name) for name in sent} == set(sent.values())
    card = (place / "out" / "README.md").read_text()
    assert str(place) not in card


def test_a_hub_that_cannot_be_reached_is_tried_again_by_a_resume(
    place: pathlib.Path, hub: Hub
) -> None:
    hub.is_down = True
    done = train(place, "--push_to_hub")
    assert done.exit_code == 2
    assert "the hub did not take it" in done.stderr
    assert "hf upload" not in done.stderr
    hub.is_down = False
    assert train(place, "--push_to_hub", "--resume").exit_code == 0
    assert [sent.keys() for sent in hub.commits] == [{*MODEL, "README.md"}]


def make_trainer(place: pathlib.Path, **changes: Any) -> SFTTrainer:
    return SFTTrainer(
        str(place / "model"),
        trl_runs.sft_arguments(place / "out", max_steps=2, save_steps=1, **changes),
        **trl_runs.chat_tables(tiny_chat.conversations(4), num_to_evaluate=1),
        offload={"ssd": str(place / "ssd")},
    )


def test_a_script_that_pushes_sends_the_same(place: pathlib.Path, hub: Hub) -> None:
    (place / "out").mkdir()
    (place / "out" / "notes.txt").write_text("mine")
    trainer = make_trainer(place, push_to_hub=True, hub_strategy="end", hub_model_id="me/mine")
    trainer.train()
    assert hub.commits == [], "a seal sends nothing"
    trainer.save_model()  # sends, as transformers' does
    trainer.push_to_hub("again", tags=["mine"])
    trainer._push_from_checkpoint(str(place / "out" / "checkpoint-2"))
    assert [sent.keys() for sent in hub.commits] == [{*MODEL, "README.md"}] * 2
    assert "- mine" in (place / "out" / "README.md").read_text()
    trainer.close()


@pytest.mark.parametrize("strategy", ["checkpoint", "all_checkpoints"])
def test_checkpoints_are_not_sent(place: pathlib.Path, hub: Hub, strategy: str) -> None:
    with pytest.raises(ConfigError, match=f"hub_strategy={strategy}"):
        make_trainer(place, push_to_hub=True, hub_strategy=strategy)
    done = train(place, "--push_to_hub", hub_strategy=strategy)
    assert done.exit_code == 2
    assert "only the model is sent" in done.stderr
    assert not (place / "out").exists()
    make_trainer(place, hub_strategy=strategy)


def open_to_others(folder: pathlib.Path) -> list[str]:
    return sorted(
        path.relative_to(folder).as_posix()
        for path in (folder, *folder.rglob("*"))
        if stat.S_IMODE(path.lstat().st_mode) & 0o077
    )


def test_nobody_else_can_read_what_a_run_keeps(place: pathlib.Path) -> None:
    rows = str(place / "rows.jsonl")
    done = train(
        place, "--offload.archive_steps", "2", eval_data=rows, eval_strategy="epoch", save_steps="2"
    )
    assert done.exit_code == 0, done.stderr
    out = place / "out"
    kept = sorted(path.name for path in out.iterdir())
    assert kept == sorted([*MODEL, "_lohan", "checkpoint-2", "checkpoint-3"])
    for folder in (out / "_lohan", *out.glob("checkpoint-*")):
        assert open_to_others(folder) == []
    assert list((out / "_lohan").rglob("*.arrow"))
    assert open_to_others(out) == [".", *sorted(MODEL)], "the model has the usual permissions"


def test_tables_of_an_older_run_are_closed_by_its_resume(place: pathlib.Path) -> None:
    assert train(place).exit_code == 0
    out = place / "out"
    (out / "_lohan" / "model_files.json").unlink()
    for path in (out / "_lohan").iterdir():
        path.rename(out / path.name)
    (out / "_lohan").rmdir()
    (out / "tables").chmod(0o755)
    assert train(place, "--resume").exit_code == 0
    assert stat.S_IMODE((out / "tables").stat().st_mode) == 0o700
    assert not (out / "_lohan").exists()
