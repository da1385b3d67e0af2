"""`lohan doctor`: what is in use here, and directories that cannot be used."""

import json
import pathlib

from typer.testing import CliRunner

from lohan import _native
from lohan.cli.app import app


def test_the_code_paths_in_use_are_shown_with_their_reason() -> None:
    done = CliRunner().invoke(app, ["doctor", "--json"])
    assert done.exit_code == 0
    facts = json.loads(done.stdout)
    assert facts["update_kernels"].startswith(_native.kernel_isa())
    assert facts["io_engine"].split(":")[0] in ("io_uring", "threads")
    assert facts["checksums"]


def test_a_directory_is_checked_and_left_as_it_was(tmp_path: pathlib.Path) -> None:
    done = CliRunner().invoke(app, ["doctor", "--ssd", str(tmp_path)])
    assert done.exit_code == 0
    assert str(tmp_path.name) in done.stdout.replace("\n", "")
    assert list(tmp_path.iterdir()) == []


def test_a_missing_directory_is_an_error(tmp_path: pathlib.Path) -> None:
    done = CliRunner().invoke(app, ["doctor", "--ssd", str(tmp_path / "none")])
    assert done.exit_code == 2
    assert "cannot be used" in done.stderr
