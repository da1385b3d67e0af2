"""Does offloading change the result? A small model of the same architecture trained both ways.

Owns the judge, a plain loop in memory, and the comparison bit by bit. Imported by the commands, and
by tests for the judge. Never lets a run judge itself.
"""

from lohan.verify.cases import Case, all_cases
from lohan.verify.compare import CaseResult, Verification, verify_copy
from lohan.verify.differences import Difference
from lohan.verify.small_copy import SmallCopy, make_small_copy

__all__ = [
    "Case",
    "CaseResult",
    "Difference",
    "SmallCopy",
    "Verification",
    "all_cases",
    "make_small_copy",
    "verify_copy",
]
