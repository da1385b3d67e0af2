"""Room for a whole run: states, the model it starts from, the one it makes, and archives."""

import json
import pathlib
from typing import Any

import datasets
import pytest
from trl import SFTConfig

from lohan.errors import OutOfSpace
from lohan.plan.run_room import DriveSpace
from lohan.train.run.disk_reservation import out_uses, source_uses
from lohan.train.trainer.trainer import SFTTrainer
from lohan.train.weights.source import open_source
from support import tiny_chat
from support.model_directories import save_model
from support.trainer_engines import attach_small


def test_the_parts_in_out_are_what_is_held_there() -> None:
    settings: Any = {"num_steps": 10, "archive_steps": 3, "save_total_limit": 1}
    model, archives = out_uses("/out", 10**9, **settings)
    assert model.nbytes == 2 * 10**9 + 64 * 10**6
    assert archives.purpose == "2 archive(s)"
    assert archives.nbytes == 2 * 14 * 10**9
    more, same = out_uses("/out", 10**9, **settings, save_model_steps=5)
    assert more.nbytes == model.nbytes + 2 * 2 * 10**9
    assert same == archives


def test_a_model_that_is_here_is_there_and_one_on_the_hub_is_asked_for(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lohan.train.weights.model_places._download", lambda *_: tmp_path)
    save_model("llama", tmp_path, max_shard="4KB")
    (here,) = source_uses(open_source(tmp_path))
    files = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    assert (here.nbytes, here.is_there) == (files, True)
    for path in tmp_path.glob("*.safetensors"):
        path.unlink()
    index = tmp_path / "model.safetensors.index.json"
    stated = json.loads(index.read_text())["metadata"]["total_size"]
    source = open_source("someone/model", should_fetch=False)
    (away,) = source_uses(source)
    assert (away.nbytes, away.is_there) == (stated, False)
    index.write_text('{"weight_map": {"a": "b"}}')
    (guessed,) = source_uses(source)
    assert guessed.nbytes == stated  # it is stored in 16 bits
    assert source_uses(None) == []


def test_a_drive_without_room_for_states_and_model_is_named_before_states_are_written(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them alone has room."""
    monkeypatch.setattr("lohan.train.trainer.saving.attach_with", attach_small)
    states_bytes = 24 * sum(p.numel() for p in tiny_chat.model().parameters())
    free_bytes = 64_000_000 + states_bytes
    monkeypatch.setattr(
        "lohan.plan.run_room.space_at", lambda _: DriveSpace(device=1, free_bytes=free_bytes)
    )
    folder = tiny_chat.save_model(tmp_path / "model")
    settings: Any = {"use_cpu": True, "bf16": True, "report_to": "none", "disable_tqdm": True}
    trainer: Any = SFTTrainer(
        str(folder),
        SFTConfig(output_dir=str(tmp_path / "out"), max_steps=2, **settings),
        train_dataset=datasets.Dataset.from_list(tiny_chat.conversations(4)),
        processing_class=tiny_chat.tokenizer(),
        offload={"ssd": str(tmp_path / "ssd")},
    )
    with pytest.raises(OutOfSpace, match="does not fit on a drive") as refused:
        trainer.train()
    for words in ("of states", "the finished model", "there already", "start from"):
        assert words in str(refused.value)
    trainer.close()
    assert list((tmp_path / "ssd").iterdir()) == []
