"""What people look at: charts and pages made from plans, traces and runs."""

from lohan.report.lane_chart import lane_chart_svg
from lohan.report.page import write_report

__all__ = ["lane_chart_svg", "write_report"]
