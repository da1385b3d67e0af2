"""The files of a run folder, read for a report: whatever is there, and what is wrong with it.

Owns the reading. Imported by `report`. Never fails on a damaged file: it says so.
"""

from lohan.report.run_files.folder import RunFiles, read_run
from lohan.report.run_files.log_lines import RunLog, read_log

__all__ = ["RunFiles", "RunLog", "read_log", "read_run"]
