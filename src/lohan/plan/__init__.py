"""Plans: what lives where, what is swapped, kept or recomputed, and whether it fits.

Owns the decisions of a run and the ledger behind them. Imported by everything above it. Never runs
or simulates anything: it reads a machine, a shape and a workload.
"""

from lohan.plan.ledger import Ledger, LedgerLine
from lohan.plan.plan import Plan
from lohan.plan.policies import make_plan
from lohan.plan.workload import Workload

__all__ = [
    "Ledger",
    "LedgerLine",
    "Plan",
    "Workload",
    "make_plan",
]
