"""`lohan check` and `lohan export` as a user meets them."""

import json
import os
import pathlib

import pytest
import torch

from lohan.cli.export import ProgressLine
from lohan.engine.model_buffers import ModelBuffers
from lohan.ssd import RunDirectories
from lohan.store import ComputeFormat
from lohan.train.run.resume_point import RunRecord, write_files_list
from lohan.train.weights.source import open_source
from support.command_line import run_lohan
from support.left_model_runs import leave_run
from support.model_directories import load_whole, save_model, stored_tensors


def make_run(
    root: pathlib.Path,
    num_ssds: int = 1,
    compute_format: ComputeFormat = ComputeFormat.BF16,
    has_model: bool = True,
) -> tuple[dict[str, torch.Tensor], list[pathlib.Path]]:
    save_model("qwen3", root / "model", is_with_tokenizer=True)
    source = open_source(root / "model")
    trained = {name: tensor.float() * 1.001 for name, tensor in source.tensors()}
    ssd = [root / f"ssd{number}" for number in range(num_ssds)]
    metadata = {"model": str(root / "model")} if has_model else {}
    leave_run(ssd, "r1", trained, metadata=metadata, compute_format=compute_format)
    return trained, ssd


def judge(out: pathlib.Path, trained: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    found = stored_tensors(out)
    assert found.keys() == trained.keys()
    assert all(torch.equal(found[name], one.to(dtype)) for name, one in trained.items())
    load_whole(out, dtype)
    assert run_lohan("check", out).exit_code == 0


def test_a_whole_model_is_said_to_be_whole(tmp_path: pathlib.Path) -> None:
    save_model("llama", tmp_path, max_shard="4KB", is_with_tokenizer=True)
    ran = run_lohan("check", tmp_path)
    assert ran.exit_code == 0
    assert "Whole" in ran.stdout
    assert "LlamaForCausalLM" in ran.stdout
    (report,) = run_lohan("check", tmp_path, "--json", "--quick").fields["checked"]
    assert report["problems"] == report["remarks"] == []


def test_one_changed_bit_in_any_file_of_an_export_is_found(tmp_path: pathlib.Path) -> None:
    _, ssd = make_run(tmp_path)
    out = tmp_path / "out"
    assert run_lohan("export", ssd[0], "--out", out).exit_code == 0
    assert (out / "model_files.json").stat().st_mode == (out / "config.json").stat().st_mode
    for path in out.iterdir():
        content = path.read_bytes()
        middle = len(content) // 2
        path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
        assert run_lohan("check", out).exit_code == 1, path.name
        path.write_bytes(content)
    assert run_lohan("check", out).exit_code == 0


def test_a_damaged_model_is_named_and_the_exit_code_says_so(tmp_path: pathlib.Path) -> None:
    save_model("llama", tmp_path, max_shard="4KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    os.truncate(shard, shard.stat().st_size - 2)
    ran = run_lohan("check", tmp_path)
    assert ran.exit_code == 1
    assert "Damaged" in ran.stdout
    assert shard.name in ran.stdout


def test_a_path_that_is_no_directory_is_refused(tmp_path: pathlib.Path) -> None:
    ran = run_lohan("check", tmp_path / "none")
    assert ran.exit_code == 2
    assert "is not a directory" in ran.stderr


def test_a_directory_of_something_else_is_refused(tmp_path: pathlib.Path) -> None:
    ran = run_lohan("check", tmp_path)
    assert ran.exit_code == 2
    assert "neither a model nor runs" in ran.stderr


@pytest.mark.parametrize("num_ssds", [1, 2])
def test_the_states_of_a_run_are_verified(num_ssds: int, tmp_path: pathlib.Path) -> None:
    _, ssd = make_run(tmp_path, num_ssds)
    for words in ([ssd[-1] / "lohan-r1"], [ssd[0]]):
        ran = run_lohan("check", *words, "--json")
        assert ran.exit_code == 0, ran.stdout
        (report,) = ran.fields["checked"]
        assert report["problems"] == report["remarks"] == []
        assert (report["run"], report["sealed step"]) == ("r1", 7)
    assert "Whole" in run_lohan("check", ssd[0] / "lohan-r1").stdout


def test_a_changed_byte_in_the_states_is_found(tmp_path: pathlib.Path) -> None:
    _, ssd = make_run(tmp_path)
    (states,) = (path for path in (ssd[0] / "lohan-r1").iterdir() if "states" in path.name)
    content = bytearray(states.read_bytes())
    content[100] ^= 1
    states.write_bytes(content)
    ran = run_lohan("check", ssd[0] / "lohan-r1")
    assert ran.exit_code == 1
    assert "problem:" in ran.stdout
    assert states.name in ran.stdout


def test_a_run_without_a_seal_is_a_problem(tmp_path: pathlib.Path) -> None:
    leave_run([tmp_path / "ssd"], "r1", {"a": torch.ones(3, 3)}, is_sealed=False)
    ran = run_lohan("check", tmp_path / "ssd" / "lohan-r1")
    assert ran.exit_code == 1
    assert "has no sealed state" in ran.stdout


def test_a_run_that_is_going_on_is_left_alone(tmp_path: pathlib.Path) -> None:
    _, ssd = make_run(tmp_path)
    held = RunDirectories.attach(ssd, "r1")
    try:
        ran = run_lohan("check", ssd[0] / "lohan-r1")
    finally:
        held.close()
    assert ran.exit_code == 1
    assert "held by process" in ran.stdout
    assert "Not checked" in ran.stdout
    assert "Damaged" not in ran.stdout


def test_a_run_whose_directories_moved_is_found_by_their_names(tmp_path: pathlib.Path) -> None:
    _, ssd = make_run(tmp_path, 2)
    moved = [path.rename(tmp_path / f"moved{n}") for n, path in enumerate(ssd)]
    ran = run_lohan("check", moved[0] / "lohan-r1")
    assert ran.exit_code == 1
    assert "2 SSD directories, 1 are given" in ran.stdout
    options = [word for path in moved for word in ("--ssd", path)]
    assert run_lohan("check", moved[0] / "lohan-r1", *options).exit_code == 0


@pytest.mark.parametrize("num_ssds", [1, 2])
def test_a_run_is_exported_by_its_id(num_ssds: int, tmp_path: pathlib.Path) -> None:
    trained, ssd = make_run(tmp_path, num_ssds)
    options = [word for path in ssd for word in ("--ssd", path)]
    ran = run_lohan("export", "r1", *options, "--out", tmp_path / "out")
    assert ran.exit_code == 0, ran.stderr
    assert "Qwen3ForCausalLM" in ran.stdout
    judge(tmp_path / "out", trained, torch.bfloat16)
    assert (tmp_path / "out" / "tokenizer.json").is_file()


def test_the_run_is_named_alike_for_every_command(tmp_path: pathlib.Path) -> None:
    leave_trained(tmp_path)
    (tmp_path / "out" / "_lohan" / "log.jsonl").write_text("{}\n")
    named = [
        ["r1", "--ssd", tmp_path / "ssd"],
        [tmp_path / "ssd" / "lohan-r1"],
        [tmp_path / "ssd"],
        [tmp_path / "out"],
    ]
    for number, run in enumerate(named):
        assert run_lohan("check", *run, "--json").fields["checked"][0]["run"] == "r1"
        made = run_lohan("export", *run, "--out", tmp_path / f"model{number}")
        assert made.exit_code == 0, made.stderr
        shown = run_lohan("report", *run)
        assert shown.exit_code == 0, shown.stderr
        assert shown.stdout == f"wrote {tmp_path / 'out' / '_lohan' / 'report.html'}\n"


def test_of_several_runs_one_has_to_be_named(tmp_path: pathlib.Path) -> None:
    for name in ("r1", "r2"):
        leave_run([tmp_path / "ssd"], name, {"a": torch.ones(3, 3)})
    ran = run_lohan("export", tmp_path / "ssd", "--out", tmp_path / "out")
    assert ran.exit_code == 2
    assert "holds 2 runs: lohan-r1, lohan-r2" in ran.stderr


def test_a_run_is_exported_by_its_directory(tmp_path: pathlib.Path) -> None:
    trained, ssd = make_run(tmp_path, 2)
    out = tmp_path / "out"
    words = [ssd[1] / "lohan-r1", "--out", out, "--dtype", "fp32", "--shard", "9KB"]
    fields = run_lohan("export", *words, "--json").fields
    judge(out, trained, torch.float32)
    assert fields["files"] == len(list(out.glob("*.safetensors"))) > 1


def test_a_run_is_exported_by_its_output_folder(tmp_path: pathlib.Path) -> None:
    trained, ssd = make_run(tmp_path, compute_format=ComputeFormat.FP16)
    (tmp_path / "results").mkdir()
    record = {"version": 1, "run_id": "r1", "ssd": [str(path) for path in ssd]}
    (tmp_path / "results" / "run.json").write_text(json.dumps(record))
    ran = run_lohan("export", tmp_path / "results", "--out", tmp_path / "out")
    assert ran.exit_code == 0, ran.stderr
    judge(tmp_path / "out", trained, torch.float16)
    moved = ssd[0].rename(tmp_path / "moved")
    words = [tmp_path / "results", "--ssd", moved, "--out", tmp_path / "again"]
    assert run_lohan("export", *words).exit_code == 0
    judge(tmp_path / "again", trained, torch.float16)


def test_buffers_that_training_changed_are_exported_with_the_weights(
    tmp_path: pathlib.Path,
) -> None:
    save_model("bart", tmp_path / "model")
    source = open_source(tmp_path / "model")
    trained = {name: tensor.float() * 1.001 for name, tensor in source.tensors()}
    model = source.make_model()
    buffers = ModelBuffers(model)
    model.get_buffer("final_logits_bias").fill_(0.5)
    metadata = {"model": str(tmp_path / "model"), "buffers": buffers.to_json()}
    leave_run([tmp_path / "ssd"], "r1", trained, metadata=metadata)
    ran = run_lohan("export", tmp_path / "ssd" / "lohan-r1", "--out", tmp_path / "out")
    assert ran.exit_code == 0, ran.stderr
    found = stored_tensors(tmp_path / "out")["final_logits_bias"]
    assert torch.equal(found, torch.full((1, 61), 0.5, dtype=found.dtype))


def test_a_model_without_a_tokenizer_is_exported_with_a_remark(tmp_path: pathlib.Path) -> None:
    _, ssd = make_run(tmp_path)
    (tmp_path / "model" / "tokenizer.json").unlink()
    ran = run_lohan("export", ssd[0] / "lohan-r1", "--out", tmp_path / "out")
    assert "remark: there is no tokenizer" in ran.stdout


def test_progress_is_one_line_per_percent(capsys: pytest.CaptureFixture[str]) -> None:
    line = ProgressLine()
    for done_bytes in (0, 1, 500, 505, 1000, 1000):
        line(done_bytes, 1000)
    assert capsys.readouterr().err.split("\r")[1:] == [
        "writing:   0%",
        "writing:  50%",
        "writing: 100%\n",
    ]


def test_a_taken_output_is_refused_before_the_run_is_opened(tmp_path: pathlib.Path) -> None:
    _, ssd = make_run(tmp_path)
    words = [ssd[0] / "lohan-r1", "--out", tmp_path / "model"]
    held = RunDirectories.attach(ssd, "r1")  # opening it would say this first
    try:
        ran = run_lohan("export", *words)
    finally:
        held.close()
    assert ran.exit_code == 2
    assert "is not empty" in ran.stderr


def test_a_damaged_record_is_refused(tmp_path: pathlib.Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    ran = run_lohan("export", tmp_path, "--out", tmp_path / "out")
    assert ran.exit_code == 2
    assert "is not the record of a run" in ran.stderr


def test_the_model_can_be_named(tmp_path: pathlib.Path) -> None:
    trained, ssd = make_run(tmp_path, has_model=False)
    words = ["export", ssd[0] / "lohan-r1", "--out", tmp_path / "out"]
    ran = run_lohan(*words)
    assert ran.exit_code == 2
    assert "name it with --model" in ran.stderr
    assert run_lohan(*words, "--model", tmp_path / "model").exit_code == 0
    judge(tmp_path / "out", trained, torch.bfloat16)


def test_another_model_is_refused(tmp_path: pathlib.Path) -> None:
    _, ssd = make_run(tmp_path)
    other = save_model("llama", tmp_path / "other")
    words = [ssd[0] / "lohan-r1", "--out", tmp_path / "out", "--model", other]
    ran = run_lohan("export", *words)
    assert ran.exit_code == 2
    assert "did not start from" in ran.stderr
    assert not (tmp_path / "out").exists()


def leave_trained(place: pathlib.Path) -> pathlib.Path:
    """A run as a trainer seals it, with its folder in OUT; returns that."""
    save_model("llama", place / "model", is_with_tokenizer=True)
    source = open_source(place / "model")
    folder = place / "out" / "checkpoint-7"
    folder.mkdir(parents=True)
    (folder / "resume.json").write_text(json.dumps({"version": 2}))
    (folder / "trainer_state.json").write_text("{}")
    said = {
        "model": str(place / "model"),
        "model_identity": {**source.identity, "tokenizer": "1", "attention": "sdpa"},
        "out": str(place / "out"),
        "checkpoint": folder.name,
        "files_sha256": write_files_list(folder),
    }
    leave_run([place / "ssd"], "r1", dict(source.tensors()), metadata={"user": said})
    RunRecord(run_id="r1", ssd=(str(place / "ssd"),)).write(place / "out")
    return folder


def test_a_model_that_was_changed_since_is_not_exported(tmp_path: pathlib.Path) -> None:
    leave_trained(tmp_path)
    words = ["export", tmp_path / "out", "--out"]
    assert run_lohan(*words, tmp_path / "one").exit_code == 0
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "rms_norm_eps": 0.5}))
    ran = run_lohan(*words, tmp_path / "two")
    assert ran.exit_code == 2
    assert "config.rms_norm_eps: 1e-06 -> 0.5" in ran.stderr
    assert not (tmp_path / "two").exists()


def test_the_folder_of_a_seal_is_checked_with_its_states(tmp_path: pathlib.Path) -> None:
    folder = leave_trained(tmp_path)
    for place in ("ssd", "ssd/lohan-r1", "out"):
        assert run_lohan("check", tmp_path / place).exit_code == 0, place
    (folder / "resume.json").write_text(json.dumps({"version": 3}))
    for place in ("ssd", "ssd/lohan-r1", "out"):
        ran = run_lohan("check", tmp_path / place)
        assert ran.exit_code == 1, place
        assert "resume.json is damaged or was changed" in ran.stdout
    (tmp_path / "out").rename(tmp_path / "elsewhere")
    ran = run_lohan("check", tmp_path / "ssd")
    assert ran.exit_code == 0
    assert "remark: " in ran.stdout
    assert "checkpoint-7" in ran.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["r1"], "it is not said where the run r1 is"),
        (["r1", "--dtype", "bf61"], "'bf16', 'fp16', 'fp32'"),
        (["r1", "--shard", "5G"], "is not a size"),
        (["r2", "--ssd", "SSD"], "a run directory is missing"),
    ],
)
def test_wrong_words_are_refused(words: list[str], said: str, tmp_path: pathlib.Path) -> None:
    words = [str(tmp_path) if word == "SSD" else word for word in words]
    ran = run_lohan("export", *words, "--out", tmp_path / "out")
    assert ran.exit_code == 2
    assert said in ran.stderr


def test_a_size_of_shards_without_a_unit_is_refused(tmp_path: pathlib.Path) -> None:
    ran = run_lohan("export", tmp_path, "--out", tmp_path / "out", "--shard", "20")
    assert ran.exit_code == 2
    assert "20GiB" in ran.stderr
