"""The AdamW benchmark runs, tiny, so that it cannot rot."""

import importlib.util
import json
import pathlib

SCRIPT = pathlib.Path(__file__).parents[3] / "benchmarks" / "adamw.py"


def test_the_benchmark_runs_and_ends_with_one_json_object(capsys):
    spec = importlib.util.spec_from_file_location("benchmark_adamw", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main(["--params", "500000", "--repeats", "1"])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["params"] == 500_000
    for count in (1, 2):
        assert result[f"threads_{count}"]["share_of_in_place_stream"] > 0
        assert len(result[f"threads_{count}"]["all_gb_per_second"]["lohan"]) == 1
