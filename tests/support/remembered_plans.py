"""Plans that are made once in a process that tests.

A plan is a function of machine, shape and workload, and an answer on the command line makes some
twenty-five of them, most of which the next command makes again. Commands under test ask here first;
what they ask for, and what they make of the plan, is theirs. With `--long` every plan is made anew.
"""

import functools

import pytest

from lohan.hardware.machine import Machine
from lohan.model.shape import ModelShape
from lohan.plan.plan import Plan
from lohan.plan.policies.ours import _Planner
from lohan.plan.workload import Workload

_make = _Planner.plan


@functools.lru_cache(1000)
def _remembered(machine: Machine, shape: ModelShape, workload: Workload) -> Plan:
    return _make(_Planner(machine, shape, workload))


def remember_plans(patch: pytest.MonkeyPatch) -> None:
    """Until the patch is undone. Published systems plan fast enough."""
    patch.setattr(
        _Planner, "plan", lambda self: _remembered(self.machine, self.shape, self.workload)
    )
