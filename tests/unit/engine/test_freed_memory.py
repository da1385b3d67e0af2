"""Freed tensors go back to the system where the budget is small."""

import subprocess
import sys

from lohan.engine.freed_memory import bound_held_memory
from lohan.units import GIB, MIB

# Half of some tensors are freed: what lies between the others cannot be given back in one piece.
_PROGRAM = f"""
import torch
from lohan.engine.freed_memory import bound_held_memory
if BOUND:
    assert bound_held_memory(64 * {MIB}) == {MIB}
def resident():
    fields = open("/proc/self/statm").read().split()
    return int(fields[1]) * 4096
torch.zeros(40 * {MIB}, dtype=torch.uint8) + 1
before = resident()
kept = [torch.zeros(2 * {MIB} + 8 * n, dtype=torch.uint8) + 1 for n in range(40)]
del kept[::2]
print(resident() - before)
"""


def held_after_freeing(*, is_bound: bool) -> int:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM.replace("BOUND", str(is_bound))],
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout)


def test_freed_tensors_of_a_small_budget_go_back_to_the_system() -> None:
    assert held_after_freeing(is_bound=True) < 50 * MIB


def test_a_large_budget_leaves_the_allocator_to_its_habit() -> None:
    assert bound_held_memory(8 * GIB) is None
