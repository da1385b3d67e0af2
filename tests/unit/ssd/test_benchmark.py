import importlib
import json
import pathlib

import pytest

BENCHMARKS = pathlib.Path(__file__).parents[3] / "benchmarks"


def test_the_ssd_benchmark_runs_small_and_leaves_nothing(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    files, benchmark = (importlib.import_module(name) for name in ("ssd_files", "ssd"))
    # Without fio: what is under test is the benchmark, and fio has a start-up time of its own.
    monkeypatch.setattr(files.shutil, "which", lambda name: None)
    monkeypatch.setattr(files, "REQUEST_BYTES", 2**20)
    monkeypatch.setattr(files, "SIZE_STEP_BYTES", 3 * 2**20)
    options = ["--dir", str(tmp_path), "--seconds", "0", "--size-gb", "0.01", "--tiny"]
    assert benchmark.main([*options, "--rounds", "1"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {entry["operation"] for entry in result["best"]} == {"read", "write", "mixed"}
    assert {entry["num_directories"] for entry in result["best"]} == {1, 3}
    assert all(entry["ours_bytes_per_second"] > 0 for entry in result["best"])
    assert result["read_started_far_ahead"]["cpu_seconds_per_gb"] >= 0
    assert list(tmp_path.iterdir()) == []
