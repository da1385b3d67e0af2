"""`lohan plan` in the words of `lohan train`."""

import pathlib
from dataclasses import replace

import pytest

from lohan.cli.reading.run_words import rooms_of, run_words, write_limit_of
from lohan.errors import ConfigError
from lohan.hardware.presets import machine_named
from lohan.model.names import shape_of
from lohan.plan import make_plan
from lohan.plan.workload import Workload
from lohan.units import TB

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
        ("gpt-13b", ["--lora_rank", "8"], 'unknown key "lora_rank"'),
        ("gpt-13b", ["--lora_r", "many"], "lora_r is 'many'"),
        ("gpt-13b", ["--lora_r", "0"], "lora_r is 0: it must be 1 or more"),
        ("gpt-13b", ["--lora_alpha", "-1"], "lora_alpha is -1: it must be above 0"),
        ("gpt-13b", ["--lora_alpha", "0"], "lora_alpha is 0"),
        ("gpt-13b", ["--lora_dropout", "-0.1"], "lora_dropout is -0.1: it must be 0 or more and"),
        ("gpt-13b", ["--save_steps", "often"], "save_steps is 'often'"),
        (
            "gpt-13b",
            ["--lora_r", "8", "--use_peft", "false"],
            "lora_r is set and use_peft is false",
        ),
        ("gpt-13b", ["--max_length", "long"], "max_length is 'long'"),
        ("gpt-13b", ["gpt-6b"], '"gpt-6b" stands alone'),
        ("none.yaml", [], "there is no file none.yaml"),
    ],
)
def test_what_is_not_valid_is_named(first: str | None, extra: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        run_words(first, None, extra)


def test_a_write_budget_is_planned_for_as_a_run_does_it(run_file: str) -> None:
    limits = [
        write_limit_of(run_words(run_file, None, ["--offload.write_budget", *words]), 100)
        for words in (["300TB"], ["300TB", "--save_steps", "10"], ["1TB", "--save_strategy", "no"])
    ]
    found = [(one.budget_bytes, one.num_seals) for one in limits if one is not None]
    assert found == [(300 * TB, 1), (300 * TB, 10), (1 * TB, 1)]
    assert write_limit_of(run_words(run_file, None, []), 100) is None


def test_a_run_with_folders_of_this_machine_has_room_or_not(
    tmp_path: pathlib.Path,
) -> None:
    """As `lohan plan RUN.yaml` shows it: all that lies on one filesystem is added up."""
    (tmp_path / "ssd").mkdir()
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"x" * 1000)
    file = tmp_path / "run.yaml"
    file.write_text(
        f"model: {model}\ndata: rows.jsonl\nout: {tmp_path / 'out'}\nmax_steps: 10\n"
        f"offload:\n  ssd: {tmp_path / 'ssd'}\n  archive_steps: 5\n  ssd_rated_tbw: 600TB\n"
    )
    words = run_words(str(file), None, [])
    assert words.rated_lives_bytes == (600 * TB,)
    machine = machine_named("desktop-4090")
    plan = make_plan("lohan+", machine, shape_of("gpt-1.55b"), Workload(batch=1, sequence=64))
    num_parameters = plan.shape.num_parameters
    (room,) = rooms_of(words, plan)
    by_purpose = {use.purpose: use for use in room.uses}
    assert by_purpose["the model to start from"].is_there
    assert by_purpose["the model to start from"].nbytes == 1000
    assert by_purpose["2 archive(s)"].nbytes == 2 * 14 * num_parameters
    # All of them live in RAM, and are sealed to the drives.
    assert by_purpose["states"].nbytes == 24 * num_parameters
    assert room.asked_bytes == sum(use.nbytes for use in room.uses) - 1000
    elsewhere = replace(words, ssd=(str(tmp_path / "nowhere"),))
    assert rooms_of(elsewhere, plan) == []
