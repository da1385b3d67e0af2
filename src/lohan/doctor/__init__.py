"""Is this machine ready, and if not, what to fix: facts, problems in words, and a report.

Owns the looking and the wording. Imported by the commands. Never repairs anything, nor needs torch.
"""

from lohan.doctor.checks import examine
from lohan.doctor.finding import Examination, Finding, Level, report_text

__all__ = ["Examination", "Finding", "Level", "examine", "report_text"]
