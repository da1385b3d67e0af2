"""`lohan doctor`: ready or not, what to fix, and the block for a bug report."""

import pathlib

from lohan import _native
from support.command_line import run_lohan


def test_the_code_paths_in_use_are_shown_with_their_reason() -> None:
    done = run_lohan("doctor", "--device", "cpu", "--json")
    assert done.exit_code == 0
    assert done.fields["is_ready"] is True
    found = {one["name"]: one["found"] for one in done.fields["findings"]}
    assert found["update kernels"].startswith(_native.kernel_isa())
    assert found["io engine"].split(":")[0] in ("io_uring", "threads")
    assert found["checksums"]
    assert "'cpu' was asked for" in found["device"]


def test_a_directory_is_checked_and_left_as_it_was(tmp_path: pathlib.Path) -> None:
    done = run_lohan("doctor", "--device", "cpu", "--ssd", tmp_path)
    assert done.exit_code == 0
    assert tmp_path.name in done.stdout.replace("\n", "")
    assert "Ready to train." in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_machine_that_is_not_ready_says_what_to_fix(tmp_path: pathlib.Path) -> None:
    done = run_lohan("doctor", "--device", "cpu", "--ssd", tmp_path / "none")
    assert done.exit_code == 1
    # Words of the table may be on two lines.
    assert "cannot be" in done.stdout
    assert "To fix" in done.stdout
    assert "Not ready: 1 problem to fix first." in done.stdout


def test_the_report_is_plain_text_without_paths(tmp_path: pathlib.Path) -> None:
    done = run_lohan("doctor", "--device", "cpu", "--report", "--ssd", tmp_path)
    assert done.exit_code == 0
    assert done.stdout.startswith("lohan doctor: ready\nlohan: ")
    assert str(tmp_path) not in done.stdout
    assert "SSD directory <ssd 1>: " in done.stdout
