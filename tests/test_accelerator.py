"""Starts the tests that run on the test accelerator, one file of them at a time.

torch has one accelerator per process, from its start to its end: a process of its own for them, so
that all other tests run without. The first one builds it (20 to 30 seconds).
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support import accelerator

TESTS = Path(__file__).parent
FILES = sorted(path.relative_to(TESTS) for path in (TESTS / "accelerator").glob("test_*.py"))
CONTRACT = Path("contract") / "test_device_contract.py"


@pytest.mark.slow
@pytest.mark.parametrize("path", [CONTRACT, *FILES], ids=lambda path: path.stem)
def test_on_the_test_accelerator(path: Path) -> None:
    absence = accelerator.why_absent()
    if absence is not None:
        pytest.skip(absence)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_XDIST")}
    only = ["-k", "accelerator"] if path == CONTRACT else []
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", *only, TESTS / path],
        env={**environment, accelerator.LOADS: "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-5_000:]
    print(done.stdout.splitlines()[-1])
