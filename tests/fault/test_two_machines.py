"""Two machines that share nothing but a link: a cable that is pulled, and a rank that is killed.

A short form of `scripts/ranks machines`, which is its own judge: the bits of one process whatever
happened, errors that name the other rank, nothing sealed lost.
"""

import pathlib
import subprocess
import sys

import pytest

from support.two_machines import why_not

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "scripts" / "ranks"


@pytest.mark.slow
def test_a_cut_link_and_a_killed_rank_end_both_and_lose_nothing() -> None:
    if reason := why_not():
        pytest.skip(reason)
    words = ["machines", "--count", "2", "--mbps", "20"]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "cut, " in done.stdout
    assert "kill 1, " in done.stdout
    assert done.stdout.endswith("two machines, disturbed 2 times: 0 wrong\n"), done.stdout
