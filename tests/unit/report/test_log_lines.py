"""The log of a run: read as far as it is whole."""

import json
import math
import pathlib

from lohan.report.run_files import RunLog, read_log


def read(tmp_path: pathlib.Path, content: str | bytes) -> RunLog:
    path = tmp_path / "log.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return read_log(path)


def lines(*rows: dict[str, object]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def test_one_row_per_step_with_all_that_was_logged_for_it(tmp_path: pathlib.Path) -> None:
    log = read(
        tmp_path,
        lines({"step": 1, "loss": 3.0}, {"step": 2, "loss": 2}, {"step": 2, "eval_loss": 2.5}),
    )
    assert log.steps == (1, 2)
    assert log.column("loss") == [3.0, 2.0]
    assert log.column("eval_loss") == [None, 2.5]
    assert log.remarks == ()


def test_a_cut_last_line_is_left_out_and_said(tmp_path: pathlib.Path) -> None:
    log = read(tmp_path, lines({"step": 1, "loss": 3.0}) + '{"step": 2, "los')
    assert log.steps == (1,)
    assert "last line is cut short" in log.remarks[0]


def test_a_last_line_without_its_end_still_counts_when_it_is_whole(tmp_path: pathlib.Path) -> None:
    log = read(tmp_path, lines({"step": 1}) + '{"step": 2}')
    assert log.steps == (1, 2)
    assert log.remarks == ()


def test_damaged_lines_are_counted_and_the_first_is_named(tmp_path: pathlib.Path) -> None:
    bad = b'\xff\xfe\x00\n[1, 2]\n{"loss": 1}\n{"step": "x"}\n{"step": true}\n{"step": -3}\n'
    deep = b"[" * 5000 + b"\n"
    content = lines({"step": 1}).encode() + bad + deep + b"\n  \n" + lines({"step": 9}).encode()
    log = read(tmp_path, content)
    assert log.steps == (1, 9)
    assert "3 lines are damaged and left out (the first: line 2)" in log.remarks[0]
    assert "4 line(s) name no step" in log.remarks[1]


def test_a_line_of_many_megabytes_is_no_line(tmp_path: pathlib.Path) -> None:
    log = read(tmp_path, b'{"step": 1, "x": "' + b"a" * (5 << 20) + b'"}\n{"step": 2}\n')
    assert log.steps == (2,)
    assert "1 line is damaged" in log.remarks[0]


def test_work_that_was_lost_before_a_resume_is_left_out(tmp_path: pathlib.Path) -> None:
    rows = [{"step": n, "loss": float(n)} for n in range(1, 8)]
    again = [{"step": n, "loss": 100.0 + n} for n in (5, 6)]
    log = read(tmp_path, lines(*rows, *again))
    assert log.steps == (1, 2, 3, 4, 5, 6)
    assert log.column("loss")[-2:] == [105.0, 106.0]
    assert "resumed (it goes on with step 5)" in log.remarks[0]
    assert "3 logged step(s) of lost work" in log.remarks[0]


def test_what_is_not_finite_stays_visible_however_it_was_written(tmp_path: pathlib.Path) -> None:
    text = '{"step":1,"loss":NaN}\n{"step":2,"loss":"NaN"}\n{"step":3,"loss":-Infinity}\n'
    text += '{"step":4,"loss":"inf"}\n{"step":5,"loss":1e400}\n{"step":6,"loss":"low"}\n'
    log = read(tmp_path, text + '{"step":7,"loss":' + "9" * 400 + '}\n{"step":8,"loss":true}\n')
    loss = log.column("loss")
    assert all(value is not None and not math.isfinite(value) for value in loss[:5])
    assert loss[5:] == [None, math.inf, None]


def test_columns_and_texts(tmp_path: pathlib.Path) -> None:
    log = read(
        tmp_path,
        lines(
            {"step": 1, "busy_gpu": 0.5, "bottleneck": "gpu"},
            {"step": 2, "busy_gpu": {"gpu": 7}, "bottleneck": 3},
            {"step": 3, "busy_gpu": 0.6, "bottleneck": "cpu"},
        ),
    )
    assert log.column("busy_gpu") == [0.5, None, 0.6]
    assert log.texts("bottleneck") == ["gpu", "cpu"]


def test_an_empty_log_is_a_log(tmp_path: pathlib.Path) -> None:
    assert read(tmp_path, "").steps == ()
