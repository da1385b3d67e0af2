"""Models named by their hub id: what is fetched, and when. The hub is a server on this machine."""

import os
import pathlib
import subprocess
import sys

import pytest

from support import tiny_chat
from support.small_hub import SmallHub, small_hub

NAME = "someone/tiny-chat"


@pytest.fixture
def model(tmp_path: pathlib.Path) -> pathlib.Path:
    return tiny_chat.save_model(tmp_path / "model")


def run(hub: SmallHub, home: pathlib.Path, *words: str) -> subprocess.CompletedProcess[str]:
    code = "from lohan.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *words],
        env={**os.environ, "HF_ENDPOINT": hub.address, "HF_HOME": str(home)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_a_preview_downloads_the_tokenizer_and_no_weights(
    tmp_path: pathlib.Path, model: pathlib.Path
) -> None:
    rows = tiny_chat.write_jsonl(tmp_path / "rows.jsonl", tiny_chat.conversations(3))
    with small_hub(NAME, model) as hub:
        done = run(hub, tmp_path / "home", "data", "preview", str(rows), "--model", NAME)
        assert done.returncode == 0, done.stderr
        assert "tokenizer.json" in hub.sent
        assert not [name for name in hub.sent if name.endswith(".safetensors")]


@pytest.mark.slow
def test_a_plan_fetches_the_configuration_only(tmp_path: pathlib.Path, model: pathlib.Path) -> None:
    with small_hub(NAME, model) as hub:
        words = ("plan", NAME, "--machine", "desktop-4090", "--seq", "64", "--batch", "2")
        done = run(hub, tmp_path / "home", *words)
        assert done.returncode == 0, done.stderr
        assert "It fits." in done.stdout
        assert set(hub.sent) <= {"config.json", "generation_config.json"}


def test_the_weights_of_a_run_are_fetched_once_its_plan_fits(
    tmp_path: pathlib.Path, model: pathlib.Path
) -> None:
    tiny_chat.write_jsonl(tmp_path / "rows.jsonl", tiny_chat.conversations(6))
    (tmp_path / "ssd").mkdir()
    words = ["train", "--model", NAME, "--data", str(tmp_path / "rows.jsonl")]
    words += ["--out", str(tmp_path / "out"), "--ssd", str(tmp_path / "ssd")]
    words += ["--max_steps", "1", "--max_length", "64", "--machine", "desktop-4090"]
    with small_hub(NAME, model) as hub:
        refused = run(hub, tmp_path / "home", *words, "--ram", "100KiB")
        assert refused.returncode == 2, refused.stdout + refused.stderr
        assert "does not fit" in refused.stderr
        assert "tokenizer.json" in hub.sent
        assert "model.safetensors" not in hub.sent
        assert list((tmp_path / "ssd").iterdir()) == []
        done = run(hub, tmp_path / "home", *words, "--ram", "64MiB")
        assert done.returncode == 0, done.stderr
        assert hub.sent.count("model.safetensors") == 1
        fits, fetched = done.stdout.index("the largest step fits"), done.stdout.index("fetching")
        assert fits < fetched
        assert (tmp_path / "out" / "model.safetensors").is_file()
