"""What can be asked about a run that is over, from wherever one stands: report, clean, export."""

import json
import pathlib

import pytest

from support import tiny_chat
from support.command_line import run_lohan
from support.trainer_engines import attach_small


@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_a_run_started_with_relative_paths_is_known_from_everywhere(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    monkeypatch.setattr("lohan.train.trainer.saving.attach_with", attach_small)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    tiny_chat.save_model(tmp_path / "model")
    tiny_chat.write_jsonl(tmp_path / "rows.jsonl", tiny_chat.conversations(6))
    for name in ("ssd", "elsewhere"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    words = ("--model", "model", "--data", "rows.jsonl", "--ssd", "ssd", "--out", "out")
    done = run_lohan("train", *words, "--max_steps", "2", "--device", device)
    assert done.exit_code == 0, done.stderr
    # The report has nothing to excuse: machine, drives' life and memory are recorded.
    page = (tmp_path / "out" / "_lohan" / "report.html").read_text()
    assert "no usable machine.json" not in page
    assert "The run wrote" in page
    assert "<h1>model</h1>" in page
    assert "limited this run (in " in page
    summary = json.loads((tmp_path / "out" / "_lohan" / "summary.json").read_text())
    assert summary["peak_bytes"]["RAM"] > 0
    assert summary["limit"]
    assert isinstance(summary["advice"], list)
    assert (device == "emulated") == ("GPU" in summary["peak_bytes"])
    monkeypatch.chdir(tmp_path / "elsewhere")
    (run,) = run_lohan("clean", "--ssd", tmp_path / "ssd", "--json").fields["runs"]
    assert run["model"] == str(tmp_path / "model")
    assert run["out"] == str(tmp_path / "out")
    told = run_lohan("export", tmp_path / "out", "--out", "copy")
    assert told.exit_code == 0, told.stderr
    assert (tmp_path / "elsewhere" / "copy" / "model.safetensors").is_file()
