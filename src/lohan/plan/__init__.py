"""Plans: what lives where, what is swapped, kept or recomputed, and whether it fits."""

from lohan.plan.ledger import Ledger, LedgerLine
from lohan.plan.plan import BlockPlan, Plan
from lohan.plan.policies import POLICY_NAMES, make_plan
from lohan.plan.system import System
from lohan.plan.workload import Workload

__all__ = [
    "POLICY_NAMES",
    "BlockPlan",
    "Ledger",
    "LedgerLine",
    "Plan",
    "System",
    "Workload",
    "make_plan",
]
