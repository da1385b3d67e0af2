"""Programs that are forked look to their parent like programs that are started."""

import os
import signal

import pytest

from support.fork_server import run_forked
from support.signalled import when

PROGRAM = "support.lohan_with_small_engine"


@pytest.mark.slow
def test_a_forked_program_gives_its_exit_code_output_and_errors() -> None:
    version = run_forked(PROGRAM, ["--version"])
    assert version.returncode == 0
    assert version.stdout.startswith("lohan ")
    wrong = run_forked(PROGRAM, ["train", "--nonsense", "1"])
    assert wrong.returncode == 2
    assert wrong.stdout.startswith('error: unknown key "nonsense"')
    killed = run_forked(PROGRAM, ["--version"], env=when((), signal.SIGKILL))
    assert killed.returncode == -signal.SIGKILL
    assert "SIGNAL_WHEN" not in os.environ
    # The environment of one child is not that of the next.
    assert run_forked(PROGRAM, ["--version"]).returncode == 0
