"""The benchmark of recording still runs."""

import json
import pathlib
import subprocess
import sys

BENCHMARK = pathlib.Path(__file__).parents[3] / "benchmarks" / "trace.py"


def test_the_benchmark_runs_with_a_few_spans() -> None:
    command = [sys.executable, str(BENCHMARK), "--spans", "20", "--repeats", "1", "--json"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    measured = json.loads(done.stdout)["nanoseconds_per_span"]
    assert {"sample, off", "sample, on"} <= set(measured)
