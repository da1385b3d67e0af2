"""Starts the tests that run on the test accelerator, in processes of their own.

torch has one accelerator per process, from its start to its end: all other tests run without. Files
of tests/accelerator are for it alone; of those that every device must pass, some run on it too,
where a case that names no device takes it. The first process builds it (20 to 30 seconds).
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support import accelerator

TESTS = Path(__file__).parent
FOR_EVERY_DEVICE = {
    "contract": ["contract/test_device_contract.py"],
    "models": [
        "equivalence/test_engine_blocks_with_state.py",
        "equivalence/test_engine_buffers.py",
        "equivalence/test_engine_hooks_and_aliases.py",
        "equivalence/test_engine_models_with_objects.py",
        "equivalence/test_engine_odd_blocks.py",
        "equivalence/test_engine_weights_elsewhere.py",
    ],
    "steps": [
        "equivalence/test_engine_changes_between_steps.py",
        "equivalence/test_engine_evaluation.py",
        "equivalence/test_engine_host_randomness.py",
        "equivalence/test_engine_nonfinite.py",
        "equivalence/test_engine_odd_steps.py",
        "fault/test_engine_lifecycle.py",
    ],
}
GROUPS = FOR_EVERY_DEVICE | {
    path.stem: [str(path.relative_to(TESTS))]
    for path in sorted((TESTS / "accelerator").glob("test_*.py"))
}


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
def test_on_the_test_accelerator(group: str) -> None:
    absence = accelerator.why_absent()
    if absence is not None:
        pytest.skip(absence)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_XDIST")}
    only = ["-k", "accelerator"] if group == "contract" else ["-m", "not slow"]
    files = [TESTS / path for path in GROUPS[group]]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", *only, *files],
        env={**environment, accelerator.LOADS: "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-5_000:]
    print(done.stdout.splitlines()[-1])
