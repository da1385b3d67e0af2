"""Plans that are made once in a process that tests.

A plan is a function of machine, shape and workload, and an answer on the command line makes some
twenty-five of them, most of which the next command makes again. Commands under test ask here first;
what they ask for, and what they make of the plan, is theirs. With `--long` every plan is made anew.
"""

import functools

import pytest

from lohan.plan import policies

_MOST_PLANS = 1000

_ours = functools.lru_cache(_MOST_PLANS)(policies.plan_ours)
_published = functools.lru_cache(_MOST_PLANS)(policies.plan_published)


def remember_plans(patch: pytest.MonkeyPatch) -> None:
    """Until the patch is undone."""
    patch.setattr(policies, "plan_ours", _ours)
    patch.setattr(policies, "plan_published", _published)
