"""What people look at: charts and pages made from plans, traces and runs.

Owns drawing. Imported by `train` and the commands. Never computes what it shows, nor loads anything
from a network.
"""

from lohan.report.lane_chart import lane_chart_svg
from lohan.report.page import write_report

__all__ = ["lane_chart_svg", "write_report"]
