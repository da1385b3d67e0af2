"""Plans: what lives where, what is swapped, kept or recomputed, and whether it fits."""

from lohan.plan.ledger import Ledger, LedgerLine
from lohan.plan.plan import BlockPlan, Plan
from lohan.plan.policies import Policy, SystemPolicy, make_plan
from lohan.plan.system import System
from lohan.plan.workload import Workload

__all__ = [
    "BlockPlan",
    "Ledger",
    "LedgerLine",
    "Plan",
    "Policy",
    "System",
    "SystemPolicy",
    "Workload",
    "make_plan",
]
