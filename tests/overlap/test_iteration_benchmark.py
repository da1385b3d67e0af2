"""The benchmark of whole steps runs small: rows, ratios, and traces that open side by side."""

import importlib
import json
import pathlib

import pytest

from lohan.trace import traces_of_chrome
from lohan.vocabulary import ComputeKind, Lane

BENCHMARKS = pathlib.Path(__file__).parents[2] / "benchmarks"


@pytest.mark.slow
def test_the_iteration_benchmark_runs_small_and_leaves_nothing(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    benchmark = importlib.import_module("iteration")
    # Threads of this process belong to other tests too.
    monkeypatch.setattr(benchmark.torch, "set_num_threads", lambda count: None)
    ssd, traces = tmp_path / "ssd", tmp_path / "traces"
    ssd.mkdir()
    options = ["--dir", str(ssd), "--steps", "1", "--layers", "6", "--time-scale", "0.001"]
    systems = ("lohan+", "zero-infinity")
    assert benchmark.main([*options, "--only", *systems, "--trace", str(traces)]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["system"] for row in result["rows"]] == list(systems)
    for row in result["rows"]:
        assert len(row["step_seconds"]) == 1
        assert row["roofline_seconds"] <= row["predicted_seconds"]
        # Blocks fill whole pages, so what moves is what the plan says, but for small ends.
        for measured, predicted in (row["read_bytes"], row["written_bytes"]):
            assert measured == pytest.approx(predicted, rel=0.02)
    assert "lohan+ over zero-infinity" in result["ratios"]
    assert list(ssd.iterdir()) == []
    for name in ("lohan-plus", "zero-infinity"):
        measured, simulated = traces_of_chrome((traces / f"{name}.json").read_text())
        assert (measured.is_simulated, simulated.is_simulated) == (False, True)
        for trace in (measured, simulated):
            forwards = [
                span.start_seconds
                for span in trace.spans
                if span.step == 0 and span.kind == ComputeKind.FORWARD and span.lane is Lane.GPU
            ]
            # Both begin where the first step that is shown goes forward.
            assert min(forwards) == 0.0
        tasks = [
            {(span.lane, span.name) for span in trace.spans if span.step == 0}
            for trace in (measured, simulated)
        ]
        assert tasks[0] == tasks[1]
