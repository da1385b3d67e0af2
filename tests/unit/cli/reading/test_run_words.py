"""`lohan plan` in the words of `lohan train`."""

import pathlib

import pytest

from lohan.cli.reading.run_words import run_words
from lohan.errors import ConfigError

RUN = """\
model: some/model
data: rows.jsonl
out: runs/one
per_device_train_batch_size: 2
gradient_accumulation_steps: 16
max_length: 2048
max_grad_norm: 0.0
max_steps: 100
offload:
  ssd: [/mnt/a, /mnt/b]
  ram: 48GiB
"""


@pytest.fixture
def run_file(tmp_path: pathlib.Path) -> str:
    path = tmp_path / "run.yaml"
    path.write_text(RUN)
    return str(path)


def test_a_runs_file_says_everything(run_file: str) -> None:
    words = run_words(run_file, None, [])
    assert words.model == "some/model"
    assert (words.batch, words.sequence, words.num_steps) == (32, 2048, 100)
    assert words.clip is False
    assert words.ram == "48GiB"
    assert words.ssd == ("/mnt/a", "/mnt/b")


def test_what_is_written_behind_it_wins(run_file: str) -> None:
    extra = ["--gradient_accumulation_steps", "4", "--max_grad_norm=1.0", "--max_steps", "-1"]
    words = run_words(run_file, "other/model", extra)
    assert (words.model, words.batch, words.clip, words.num_steps) == ("other/model", 8, True, None)


def test_a_name_alone_is_a_model_with_the_usual_batch() -> None:
    words = run_words("gpt-13b", None, [])
    assert (words.model, words.batch, words.sequence, words.clip) == ("gpt-13b", 8, None, None)


@pytest.mark.parametrize(
    ("first", "extra", "said"),
    [
        (None, [], "no model is given"),
        ("gpt-13b", ["--lora_r", "8"], 'unknown key "lora_r"'),
        ("gpt-13b", ["--max_length", "long"], "max_length is 'long'"),
        ("gpt-13b", ["gpt-6b"], '"gpt-6b" stands alone'),
        ("none.yaml", [], "there is no file none.yaml"),
    ],
)
def test_what_is_not_valid_is_named(first: str | None, extra: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        run_words(first, None, extra)
