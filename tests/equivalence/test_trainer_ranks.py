"""`torchrun script.py` with a trainer: the bits of one process, files of the first rank."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.fork_server import run_forked
from support.trainer_ranks import ScriptRun, as_word

STATES = ("masters", "m", "v")


@pytest.mark.slow
def test_a_script_on_two_ranks_is_the_script_on_one(tmp_path: Path) -> None:
    alone = ScriptRun(out="one", offload={"reduction_groups": 2, "archive_steps": 2})
    two = replace(alone, out="two", num_ranks=2, offload={"archive_steps": 2})
    half = replace(two, out="half", stops_after=3)
    runs = {
        "one": alone,
        "two": two,
        "half": half,
        "resumed": replace(half, resume=True, stops_after=None),
        "two by one": replace(alone, out="a", resume=str(tmp_path / "two/checkpoint-4")),
        "one by two": replace(two, out="b", resume=str(tmp_path / "one/checkpoint-4")),
        "half by one": replace(alone, out="half", resume=str(tmp_path / "half/checkpoint-2")),
        "other rows": replace(two, out="c", other_rows_on=1),
        "failed": replace(two, out="failed", fails=1),
    }
    done = run_forked("support.trainer_ranks", [str(tmp_path), *map(as_word, runs.values())])
    lines = [line for line in done.stdout.splitlines() if line.startswith("[{")]
    assert len(lines) == len(runs), done.stdout
    found: dict[str, list[dict[str, Any]]] = dict(zip(runs, map(json.loads, lines), strict=True))
    expected = found["one"][0]
    assert "error" not in expected, expected["trace"]
    for rank in found["two"]:
        assert "error" not in rank, rank["trace"]
        for name in (*STATES, "losses", "norms"):
            assert rank[name] == expected[name], name
        assert rank["evaluated"] == pytest.approx(expected["evaluated"])
    assert {rank["error"] for rank in found["half"]} == {"_Ends: this script ends"}
    for rank in found["other rows"]:
        assert "rank 1 has another order or content of its rows than rank 0" in rank["error"]
    assert not (tmp_path / "c" / "_lohan" / "run.json").exists()
    for name in ("resumed", "two by one", "one by two", "half by one"):
        for rank in found[name]:
            assert "error" not in rank, rank["trace"]
            assert [rank[one] for one in STATES] == [expected[one] for one in STATES], name
            assert rank["losses"] == expected["losses"], "those before come with the state"
    other, failed = found["failed"]
    assert "ValueError: this rank fails" in failed["error"]
    assert "rank 1 failed with ValueError: this rank fails" in other["error"]

    one, both = tmp_path / "one", tmp_path / "two"
    names = sorted(path.name for path in both.iterdir())
    assert names == sorted(path.name for path in one.iterdir())
    assert (both / "model.safetensors").read_bytes() == (one / "model.safetensors").read_bytes()
    logs = [(out / "_lohan" / "log.jsonl").read_text().splitlines() for out in (one, both)]
    assert len(logs[0]) == len(logs[1]), "only the first rank writes"
    summary = json.loads((both / "_lohan" / "summary.json").read_text())
    assert summary["num_steps"] == 5
