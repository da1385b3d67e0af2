"""What people look at: charts and pages made from plans and traces."""

from lohan.report.lane_chart import lane_chart_svg

__all__ = ["lane_chart_svg"]
