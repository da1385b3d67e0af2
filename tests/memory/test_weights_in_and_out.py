"""Reading and exporting a model take the RAM of a tensor, not of the model."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from lohan.units import MIB

TESTS = pathlib.Path(__file__).parents[1]


@pytest.mark.slow
def test_resident_memory_stays_flat(tmp_path: pathlib.Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "support.flat_memory", tmp_path],
        cwd=TESTS,
        env=os.environ | {"PYTHONPATH": str(TESTS)},
        check=True,
        capture_output=True,
        text=True,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    print(found)
    assert found["model"] > 180e6
    # One tensor as it is read, and as fp32 where it is made so; the allocator keeps freed memory
    # of up to 32 MiB for the next request.
    allowed = 4 * found["largest"] + 48 * MIB
    assert allowed < found["model"] / 3
    for step in ("making", "reading", "writing"):
        assert found[step] < allowed, step
