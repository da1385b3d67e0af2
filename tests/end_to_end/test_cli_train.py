"""`lohan train` and `lohan data preview` as a user runs them."""

import fcntl
import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest
import transformers

from lohan.errors import DoesNotFit
from support import tiny_chat
from support.command_line import Ran, run_lohan
from support.plain_engine import attach_plainly


@pytest.fixture(autouse=True)
def _plain_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lohan.train.saving.attach_engine", attach_plainly)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture
def place(tmp_path: pathlib.Path) -> pathlib.Path:
    tiny_chat.save_model(tmp_path / "model")
    tiny_chat.write_jsonl(tmp_path / "rows.jsonl", tiny_chat.conversations(10))
    (tmp_path / "ssd").mkdir()
    return tmp_path


def train(place: pathlib.Path, *words: str, **changes: str) -> Ran:
    given = {
        "model": str(place / "model"),
        "data": str(place / "rows.jsonl"),
        "ssd": str(place / "ssd"),
        "out": str(place / "out"),
        "device": "cpu",
        "max_steps": "3",
        "per_device_train_batch_size": "2",
        "gradient_accumulation_steps": "2",
        "assistant_only_loss": "true",
        **changes,
    }
    return run_lohan(
        "train", *[word for key, value in given.items() for word in (f"--{key}", value)], *words
    )


def test_a_run_leaves_a_model_that_answers_and_the_files_it_names(place: pathlib.Path) -> None:
    done = train(place)
    assert done.exit_code == 0, done.stderr
    assert "step 3 | loss" in done.stdout
    assert "model in" in done.stdout
    out = place / "out"
    for name in ("lohan.yaml", "run.json", "log.jsonl", "config.json", "chat_template.jinja"):
        assert (out / name).is_file(), name
    assert not list(out.glob(".lohan*"))
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": "red"}], add_generation_prompt=True, return_tensors="pt"
    )
    answer = model.generate(**asked, max_new_tokens=3, do_sample=False)
    assert answer.shape[1] > asked["input_ids"].shape[1]


def test_a_file_and_overrides_give_the_printed_configuration(place: pathlib.Path) -> None:
    file = place / "run.yaml"
    file.write_text(
        f"model: {place / 'model'}\ndata: rows.jsonl\nout: {place / 'out'}\n"
        f"learning_rate: 3e-4\noffload:\n  ssd: {place / 'ssd'}\n"
    )
    done = run_lohan("train", file, "--seed", "7", "--max_steps=-1", "--print-config")
    assert done.exit_code == 0, done.stderr
    assert f"learning_rate: 0.0003  # {file}" in done.stdout
    assert "seed: 7  # command line" in done.stdout
    assert "max_steps: -1  # command line" in done.stdout
    assert not (place / "out").exists()


def test_resume_continues_the_run_and_a_second_start_is_refused(place: pathlib.Path) -> None:
    assert train(place, save_steps="1").exit_code == 0
    again = train(place)
    assert again.exit_code == 2
    assert "--resume" in again.stderr
    changed = train(place, "--resume", learning_rate="9e-3")
    assert changed.exit_code == 2
    assert "learning_rate: 2e-05 -> 0.009" in changed.stderr
    resumed = train(place, "--resume", save_steps="1")
    assert resumed.exit_code == 0, resumed.stderr
    assert "continues after step 3 of 3" in resumed.stdout


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
        (_out_is_a_file, "output folder cannot be written"),
        (_no_model, "config.json"),
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
    assert not (place / "out" / "run.json").exists()
    assert "step 1" not in done.stdout


def test_a_run_that_is_refused_early_leaves_no_folder(place: pathlib.Path) -> None:
    _empty(place)
    assert train(place).exit_code == 2
    assert not (place / "out").exists()
    (place / "out").mkdir()
    assert train(place).exit_code == 2
    assert (place / "out").is_dir()


def _everything_in(place: pathlib.Path) -> list[pathlib.Path]:
    return sorted(path.relative_to(place) for path in place.rglob("*"))


@pytest.mark.parametrize("is_made_before", [False, True])
def test_a_run_the_engine_refuses_leaves_what_was_there_before(
    place: pathlib.Path, monkeypatch: pytest.MonkeyPatch, is_made_before: bool
) -> None:
    out = place / "new" / "out"
    if is_made_before:
        out.mkdir(parents=True)
        (out / "notes.txt").write_text("mine")
    before = _everything_in(place)

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise DoesNotFit("1 GiB of RAM is needed", why="that is much", remedy="give more RAM")

    with monkeypatch.context() as patch:
        patch.setattr("lohan.train.saving.attach_engine", refuse)
        done = train(place, out=str(out), eval_data=str(place / "rows.jsonl"))
    assert done.exit_code == 2
    assert "give more RAM" in done.stderr
    assert _everything_in(place) == before
    assert train(place, out=str(out)).exit_code == 0


def test_a_resume_that_is_refused_leaves_the_configuration_of_the_run(place: pathlib.Path) -> None:
    assert train(place).exit_code == 0
    before = {path: path.read_bytes() for path in (place / "out").rglob("*") if path.is_file()}
    rows = tiny_chat.write_jsonl(place / "other.jsonl", tiny_chat.conversations(12, seed=5))
    for changes in ({"learning_rate": "9e-3"}, {"data": str(rows)}):
        assert train(place, "--resume", **changes).exit_code == 2
        after = {path: path.read_bytes() for path in (place / "out").rglob("*") if path.is_file()}
        assert after == before


def test_room_for_archives_of_all_epochs_is_asked_for_before_states_are_written(
    place: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 65_000_000})  # enough for the model alone
    monkeypatch.setattr("lohan.train.space.shutil.disk_usage", lambda path: usage)
    done = train(
        place, "--offload.archive_steps", "1", max_steps="-1", num_train_epochs="2",
        save_total_limit="9",
    )  # fmt: skip
    assert done.exit_code == 2
    assert "archive" in done.stderr
    assert list((place / "ssd").iterdir()) == []
    assert not (place / "out").exists()


def test_a_second_process_in_the_same_folder_is_refused(place: pathlib.Path) -> None:
    (place / "out").mkdir()
    descriptor = os.open(place / "out", os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        done = train(place)
    finally:
        os.close(descriptor)
    assert done.exit_code == 2
    assert "another process is training into" in done.stderr
    assert os.listdir(place / "out") == []
    assert train(place).exit_code == 0


def test_no_progress_bars_are_written_where_nobody_watches(place: pathlib.Path) -> None:
    words = ("data", "preview", place / "rows.jsonl", "--model", place / "model")
    done = subprocess.run(
        [sys.executable, "-c", "from lohan.cli import main; main()", *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    code = (
        "import sys; sys.argv = ['lohan', '--version']\nfrom lohan.cli import main\ntry: main()\n"
    )
    code += "except SystemExit: pass\nfrom tqdm.auto import tqdm; list(tqdm(range(3)))"
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert shown.stderr == ""


def test_rows_without_a_token_to_train_on_are_refused(place: pathlib.Path) -> None:
    done = train(place, max_length="2")
    assert done.exit_code == 2
    assert "max_length" in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--packing"], "--packing has no value"),
        (["--max_seq_length", "5"], "write max_length"),
        (["one.yaml", "two.yaml"], '"two.yaml" stands alone'),
        (["--model=m", "--data=d", "--out=o", "--ssd=s", "--seed", "x"], "seed is 'x'"),
    ],
)
def test_a_command_line_that_cannot_be_meant_is_refused(
    place: pathlib.Path, words: list[str], said: str
) -> None:
    done = run_lohan("train", *words)
    assert done.exit_code == 2
    assert said in done.stderr


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("max_length", "-5"),
        ("gradient_accumulation_steps", "0"),
        ("per_device_train_batch_size", "0"),
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


def test_training_nothing_is_refused(place: pathlib.Path) -> None:
    done = train(place, max_steps="-1", num_train_epochs="0")
    assert done.exit_code == 2
    assert "nothing would be trained" in done.stderr


def test_a_finished_run_is_not_trained_further_by_a_resume(place: pathlib.Path) -> None:
    changes = {"max_steps": "1", "gradient_accumulation_steps": "1"}  # within an epoch
    assert train(place, **changes).exit_code == 0
    before = (place / "out" / "model.safetensors").read_bytes()
    done = train(place, "--resume", **changes)
    assert done.exit_code == 0, done.stderr
    assert "done after 1 steps" in done.stdout
    assert (place / "out" / "model.safetensors").read_bytes() == before


def test_a_hub_that_cannot_be_reached_is_an_error_before_training_starts(
    place: pathlib.Path,
) -> None:
    done = train(place, push_to_hub="true", hub_model_id="me/model")
    assert done.exit_code == 2
    assert "me/model cannot be made on the hub" in done.stderr
    assert not (place / "out").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--rows", "-3"], "--rows"),
        (["--max_length", "-5"], "max_length is -5"),
        (["--chat_template_path", "TEMPLATE"], "cannot be read"),
    ],
)
def test_the_preview_refuses_what_cannot_be_meant(
    place: pathlib.Path, words: list[str], said: str
) -> None:
    (place / "TEMPLATE").write_bytes(b"\xed\xed\xff")
    words = [str(place / "TEMPLATE") if word == "TEMPLATE" else word for word in words]
    done = run_lohan("data", "preview", place / "rows.jsonl", "--model", place / "model", *words)
    assert done.exit_code == 2
    assert said in done.stderr


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


def test_the_preview_marks_what_is_trained_on(place: pathlib.Path) -> None:
    done = run_lohan(
        "data",
        "preview",
        place / "rows.jsonl",
        "--model",
        place / "model",
        "--rows",
        "1",
        "--assistant_only_loss",
        "true",
        "--max_length",
        "20",
    )
    assert done.exit_code == 0, done.stderr
    assert "[loss]" in done.stdout
    assert "<|end|>[/loss]" in done.stdout
    assert "10 rows of the form messages" in done.stdout
    assert "longer than max_length=20" in done.stdout


def test_help_needs_none_of_the_heavy_packages() -> None:
    code = (
        "import sys, lohan.cli; "
        "heavy = {'torch', 'transformers', 'trl', 'datasets', 'yaml', 'pydantic'}; "
        "sys.exit(', '.join(heavy & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_log_has_one_object_per_step(place: pathlib.Path) -> None:
    assert train(place).exit_code == 0
    lines = [json.loads(line) for line in (place / "out" / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3]
    assert all(line["tokens_per_second"] > 0 for line in lines if "loss" in line)


def test_a_failure_after_the_first_seal_says_how_to_go_on(
    place: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from support.plain_engine import PlainEngine

    def refuse(self: Any, micro_batches: Any, *args: Any, **kwargs: Any) -> None:
        raise DoesNotFit("1 GiB of RAM is needed", why="that is much", remedy="give more RAM")

    with monkeypatch.context() as patch:
        patch.setattr(PlainEngine, "step", refuse)
        done = train(place)
    assert done.exit_code == 2
    assert "give more RAM" in done.stderr
    assert "sealed at step 0 and stay" in done.stdout
    assert train(place, "--resume").exit_code == 0


def test_an_output_folder_without_room_is_refused_before_weights_are_taken_in(
    place: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("lohan.train.space.shutil.disk_usage", lambda path: usage)
    done = train(place)
    assert done.exit_code == 2
    assert "64.1 MB" in done.stderr
    assert list((place / "ssd").iterdir()) == []


def test_a_folder_that_holds_a_model_is_not_written_to(place: pathlib.Path) -> None:
    before = sorted((place / "model").iterdir())
    done = train(place, out=str(place / "model"))
    assert done.exit_code == 2
    assert "already holds a model" in done.stderr
    assert sorted((place / "model").iterdir()) == before
