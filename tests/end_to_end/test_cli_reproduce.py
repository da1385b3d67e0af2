"""`lohan reproduce`: rows, their JSON form, and files that are hard to read."""

import pathlib

import pytest

from lohan.paper.rows import COLUMNS, shipped_rows
from support.command_line import run_lohan

HEADER = ",".join(COLUMNS)


def rows_file(folder: pathlib.Path, *rows: str) -> pathlib.Path:
    path = folder / "rows.csv"
    path.write_text("\n".join((HEADER, *rows)) + "\n")
    return path


def row(**cells: object) -> str:
    usual = {
        "gpu": "4090",
        "num_gpus": 1,
        "ram_gb": 768,
        "num_ssds": 12,
        "model": "1.55B",
        "batch": 8,
        "system": "lohan",
        "metric": "tokens_per_second",
        "value": 900,
        "source": "Fig 99",
        "certainty": "V",
    }
    return ",".join(str((usual | cells)[column]) for column in COLUMNS)


def test_each_row_carries_every_column_and_the_comparison(tmp_path: pathlib.Path) -> None:
    path = rows_file(
        tmp_path,
        row(),
        row(metric="feasible", value="yes"),
        row(metric="max_model", model="-", batch=1, value="276B"),
    )
    fields = run_lohan("reproduce", "--rows", path, "--json").fields
    assert len(fields["rows"]) == 3
    for one in fields["rows"]:
        assert set(COLUMNS) | {"published", "simulated", "relative_error"} <= set(one)
    speed, fits, largest = fields["rows"]
    assert speed["published"] == 900
    assert speed["relative_error"] == pytest.approx(speed["simulated"] / 900 - 1)
    assert (fits["published"], fits["simulated"]) == ("yes", "yes")
    assert (largest["published"], largest["simulated"]) == ("276B", "276B")
    assert fits["relative_error"] is None
    assert fields["summary"]["capacity"] == {"num_rows": 2, "num_right": 2, "share_right": 1}


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        ({"value": "-"}, "not a number"),
        ({"value": "fast"}, "not a number"),
        ({"value": "0"}, "above zero"),
        ({"value": "nan"}, "not a number"),
        ({"value": ""}, "not a number"),
        ({"metric": "speed_of_light"}, "metric"),
        ({"metric": "-"}, "metric"),
        ({"model": "DiT-77B"}, "no model"),
        ({"model": "-"}, "no model"),
        ({"model": ""}, "no model"),
        ({"batch": "many"}, "batch"),
        ({"batch": "0"}, "batch"),
        ({"batch": "-3"}, "batch"),
        ({"batch": "1.5"}, "batch"),
        ({"system": "unheard-of"}, "policy"),
        ({"system": "-"}, "policy"),
        ({"gpu": "5090"}, "machine"),
        ({"gpu": "-"}, "machine"),
        ({"num_gpus": "3"}, "3 GPUs"),
        ({"model": "412B", "batch": "best"}, "412B"),
        ({"metric": "feasible", "model": "6B / 13B", "batch": "8 / 16 / 32"}, "2 models"),
        ({"metric": "feasible", "model": "99B and up"}, "no model"),
        ({"metric": "max_model", "model": "-", "batch": "best"}, "batch"),
    ],
)
def test_row_that_cannot_be_simulated_is_reported_with_the_reason(
    tmp_path: pathlib.Path, cells: dict[str, object], reason: str
) -> None:
    ran = run_lohan("reproduce", "--rows", rows_file(tmp_path, row(**cells)), "--json")
    assert ran.exit_code == 0
    (one,) = ran.fields["rows"]
    assert reason in one["reason"]
    assert one["relative_error"] is None
    assert ran.fields["summary"]["num_not_simulated"] == 1


@pytest.mark.parametrize(
    "cells",
    [
        {"model": "DiT-10B", "metric": "images_per_second", "value": 1},
        {"model": "dit-0.67b", "metric": "samples_per_second", "value": 30},
        {"model": "Llama-3.1-8B"},
        {"model": "gpt-6b"},
        {"system": "LoHan"},
        {"batch": "best"},
        {"batch": "-"},
        {"batch": "8.0", "num_gpus": "1.0", "ram_gb": "768.00", "num_ssds": "12."},
        {"gpu": "RTX 4090"},
        {"ram_gb": "-", "num_ssds": "-", "num_gpus": "-"},
        {"metric": "step_seconds", "value": 12},
        {"metric": "gpu_busy_percent", "value": 50},
        {"metric": "tokens_per_second_per_kdollar", "value": 50},
    ],
)
def test_other_models_metrics_and_spellings_are_simulated(
    tmp_path: pathlib.Path, cells: dict[str, object]
) -> None:
    ran = run_lohan("reproduce", "--rows", rows_file(tmp_path, row(**cells)), "--json")
    (one,) = ran.fields["rows"]
    assert one["reason"] == ""
    assert one["simulated"] > 0


@pytest.mark.parametrize(
    ("cells", "simulated"),
    [
        ({"num_gpus": 2, "model": "-", "batch": "-", "metric": "max_model", "value": "70B"}, "70B"),
        (
            {"num_gpus": 4, "model": "-", "batch": "Any", "metric": "max_model", "value": "70b"},
            "70B",
        ),
        ({"system": "fast-dit", "batch": 1, "metric": "max_model", "value": "10B"}, "0.90B"),
        (
            {
                "system": "Fast-DiT",
                "model": "10B",
                "batch": "Any",
                "metric": "feasible",
                "value": "No",
            },
            "no",
        ),
    ],
)
def test_capacity_rows_of_several_gpus_and_diffusion_models_are_answered(
    tmp_path: pathlib.Path, cells: dict[str, object], simulated: str
) -> None:
    ran = run_lohan("reproduce", "--rows", rows_file(tmp_path, row(**cells)), "--json")
    (one,) = ran.fields["rows"]
    assert (one["reason"], one["simulated"]) == ("", simulated)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"a,b\n1,2\n",
        b"\xff\xfe\x00bad",
        (HEADER + "\n4090,x,768,12,13B,8,lohan,tflops,3,f,V\n").encode(),
        (HEADER + "\n4090,1,-768,12,13B,8,lohan,tflops,3,f,V\n").encode(),
        (HEADER + "\n4090,1,768\n").encode(),
        (HEADER.replace("value", "figure") + "\n").encode(),
    ],
)
def test_file_that_is_no_such_table_is_refused(tmp_path: pathlib.Path, content: bytes) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(content)
    ran = run_lohan("reproduce", "--rows", path, "--json")
    assert ran.exit_code == 2
    assert ran.stdout == ""
    assert ran.stderr.startswith("error: ")


def test_table_shows_what_was_not_simulated_and_why(tmp_path: pathlib.Path) -> None:
    path = rows_file(tmp_path, row(), row(value="fast"), row(metric="feasible", value="no"))
    ran = run_lohan("reproduce", "--rows", path)
    assert ran.exit_code == 0
    assert "Not simulated" in ran.stdout
    assert "'fast' is not a number" in ran.stdout
    assert "WRONG" in ran.stdout
    assert "Capacity rows right: 0 of 1" in ran.stdout


def test_file_that_cannot_be_read_is_refused(tmp_path: pathlib.Path) -> None:
    for path in (tmp_path / "none.csv", tmp_path):
        ran = run_lohan("reproduce", "--rows", path)
        assert ran.exit_code == 2
        assert str(path) in ran.stderr


def test_byte_order_mark_and_blank_lines_do_no_harm(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(f"\ufeff{HEADER}\n\n{row()}\n\n", encoding="utf-8")
    assert len(run_lohan("reproduce", "--rows", path, "--json").fields["rows"]) == 1


def test_table_without_rows_is_empty(tmp_path: pathlib.Path) -> None:
    fields = run_lohan("reproduce", "--rows", rows_file(tmp_path), "--json").fields
    assert fields["rows"] == []
    assert fields["summary"]["num_rows"] == 0
    assert run_lohan("reproduce", "--rows", tmp_path / "rows.csv").exit_code == 0


@pytest.mark.slow
def test_shipped_rows_stay_within_the_promised_errors() -> None:
    fields = run_lohan("reproduce", "--json").fields
    assert len(fields["rows"]) == len(shipped_rows())
    overall = {spread["name"]: spread for spread in fields["summary"]["overall"]}
    everything = overall["throughput, all systems"]
    assert everything["median"] <= 0.08
    assert everything["percentile_90"] <= 0.20
    assert everything["largest"] <= 0.35
    assert overall["throughput, lohan on one GPU"]["median"] <= 0.05
    assert fields["summary"]["capacity"]["share_right"] >= 0.85
    for one in fields["rows"]:
        if one["metric"] in ("tokens_per_second", "tflops"):
            assert one["relative_error"] is not None, one
