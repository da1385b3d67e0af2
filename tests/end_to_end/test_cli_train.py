"""`lohan train` as a user runs it: what a run shows and leaves, and resuming it."""

import json
import pathlib
import subprocess
import sys
from typing import Any

import pytest
import transformers

from lohan.errors import DoesNotFit
from support import tiny_chat
from support.command_line import run_lohan
from support.small_training import make_place, train


@pytest.fixture
def place(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    return make_place(tmp_path, monkeypatch)


def test_a_run_leaves_a_model_that_answers_and_the_files_it_names(place: pathlib.Path) -> None:
    done = train(place)
    assert done.exit_code == 0, done.stderr
    assert "step 3/" in done.stdout
    assert "model in" in done.stdout
    out = place / "out"
    for name in ("_lohan/lohan.yaml", "_lohan/run.json", "_lohan/log.jsonl", "config.json"):
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
    assert "lohan export" in changed.stderr
    resumed = train(place, "--resume", save_steps="1")
    assert resumed.exit_code == 0, resumed.stderr
    assert "continues after step 3 of 3" in resumed.stdout


@pytest.mark.parametrize("words", [["{out}"], ["--out", "{out}"]])
def test_a_resume_finds_model_and_settings_in_its_folder(
    place: pathlib.Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    """From another folder than the one its paths were given in."""
    monkeypatch.chdir(place)
    places = {"model": "model", "data": "rows.jsonl", "ssd": "ssd", "out": "out"}
    assert train(place, save_steps="1", learning_rate="3e-4", **places).exit_code == 0
    before = (place / "out" / "model.safetensors").read_bytes()
    monkeypatch.chdir("/")
    command = ["train", *(word.format(out=place / "out") for word in words), "--resume"]
    done = run_lohan(*command)
    assert done.exit_code == 0, done.stderr
    assert "continues after step 3 of 3" in done.stdout
    assert (place / "out" / "model.safetensors").read_bytes() == before
    changed = run_lohan(*command, "--learning_rate", "9e-3")
    assert changed.exit_code == 2
    assert "learning_rate: 0.0003 -> 0.009" in changed.stderr


def test_a_resume_where_no_run_is_says_so_at_once(place: pathlib.Path) -> None:
    (place / "out").mkdir()
    done = run_lohan("train", place / "out", "--resume")
    assert done.exit_code == 2
    assert f"there is no run in {place / 'out'}" in done.stderr


def test_a_finished_run_is_not_trained_further_by_a_resume(place: pathlib.Path) -> None:
    changes = {"max_steps": "1", "gradient_accumulation_steps": "1"}  # within an epoch
    assert train(place, **changes).exit_code == 0
    before = (place / "out" / "model.safetensors").read_bytes()
    done = train(place, "--resume", **changes)
    assert done.exit_code == 0, done.stderr
    assert "done after 1 steps" in done.stdout
    assert (place / "out" / "model.safetensors").read_bytes() == before


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
    lines = [
        json.loads(line)
        for line in (place / "out" / "_lohan" / "log.jsonl").read_text().splitlines()
    ]
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


def test_rows_to_evaluate_on_that_are_never_used_are_noted(place: pathlib.Path) -> None:
    done = train(place, eval_data=str(place / "rows.jsonl"))
    assert done.exit_code == 0, done.stderr
    assert "nothing is evaluated" in done.stdout
    told = train(
        place, eval_data=str(place / "rows.jsonl"), eval_strategy="epoch", out=str(place / "two")
    )
    assert told.exit_code == 0, told.stderr
    assert "nothing is evaluated" not in told.stdout
    assert "evaluation at step" in told.stdout


def test_sample_prompts_are_answered_before_and_after(place: pathlib.Path) -> None:
    (place / "more.txt").write_text("green\n")
    words = ("--sample_prompts", "red", "--sample_prompts", str(place / "more.txt"))
    done = train(place, *words, pad_to_multiple_of="32")
    assert done.exit_code == 0, done.stderr
    assert done.stdout.count("prompt: red") == done.stdout.count("prompt: green") == 2
    shown = [line for line in done.stdout.splitlines() if line.startswith(("asking", "training"))]
    assert [line.split(":")[0] for line in shown if line.startswith("asking")] == [
        "asking 2 prompt(s) before the first step",
        "asking 2 prompt(s) after step 3",
    ]
    assert shown[0].startswith("training begins")
    assert 'id="answers"' in (place / "out" / "_lohan" / "report.html").read_text()
    again = train(place, "--resume", *words)
    assert again.exit_code == 0, again.stderr
    assert "asking" not in again.stdout


def test_the_best_model_is_what_a_run_leaves_and_a_longer_run_goes_on_from_the_last(
    place: pathlib.Path,
) -> None:
    changes = {
        "eval_data": str(place / "rows.jsonl"),
        "eval_strategy": "steps",
        "eval_steps": "1",
        "save_steps": "1",
        "load_best_model_at_end": "true",
        "lr_scheduler_type": "constant",
        "learning_rate": "1",  # so that what follows is worse
    }
    done = train(place, **changes)
    assert done.exit_code == 0, done.stderr
    assert "the model is that of checkpoint-" in done.stdout
    out = place / "out"
    best = next(out.glob("checkpoint-*/model.safetensors"))
    assert best.parent.name != "checkpoint-3"
    assert (out / "model.safetensors").read_bytes() == best.read_bytes()
    longer = train(place, "--resume", **changes, max_steps="5")
    assert longer.exit_code == 0, longer.stderr
    assert "continues after step 3 of 5" in longer.stdout
    assert run_lohan("check", out).exit_code == 0


def test_what_is_on_or_off_can_be_switched_on_by_its_name_alone(place: pathlib.Path) -> None:
    words = ("--model=m", "--data=d", "--out=o", "--ssd=s", "--packing", "--offload.trace")
    done = run_lohan("train", *words, "--print-config")
    assert done.exit_code == 0, done.stderr
    assert "packing: true  # command line" in done.stdout
    assert "trace: true  # command line" in done.stdout


def test_the_list_of_commands_begins_with_training_and_cuts_no_sentence() -> None:
    shown = run_lohan("--help").stdout
    assert shown.index("  train ") < shown.index("  plan ")
    assert "..." not in shown.split("Commands:")[1]


def test_rows_that_are_cut_off_are_counted(place: pathlib.Path) -> None:
    done = train(place, max_length="20", assistant_only_loss="false")
    assert done.exit_code == 0, done.stderr
    assert "of 10 rows fill max_length=20" in done.stdout
    assert "fill max_length" not in train(place, out=str(place / "two")).stdout


def test_a_dry_run_says_what_the_run_would_be_and_leaves_nothing(
    tmp_path: pathlib.Path,
) -> None:
    """With the engine itself: what is planned is what would run."""
    tiny_chat.save_model(tmp_path / "model")
    tiny_chat.write_jsonl(tmp_path / "rows.jsonl", tiny_chat.conversations(6))
    (tmp_path / "ssd").mkdir()
    done = train(tmp_path, "--dry-run", ram="64MiB", machine="desktop-4090")
    assert done.exit_code == 0, done.stderr
    assert "predicted for 3 steps" in done.stdout
    assert "cost: about $" in done.stdout
    assert "nothing was trained" in done.stdout
    assert not (tmp_path / "out").exists()
    assert list((tmp_path / "ssd").iterdir()) == []
