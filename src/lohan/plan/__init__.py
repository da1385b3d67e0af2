"""Plans: what lives where, what is swapped, kept or recomputed, and whether it fits.

Owns the decisions of a run and the ledger behind them. Imported by everything above it. Never runs
or simulates anything: it reads a machine, a shape and a workload.
"""

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
