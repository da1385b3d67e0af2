"""Spans on lanes over time: one format for a simulated and a measured run.

Owns recording, summing up and the file for Perfetto. Imported by whoever records or draws. Never
knows what a task does.
"""

from lohan.trace.chrome import chrome_json, traces_of_chrome
from lohan.trace.recorder import Recorder
from lohan.trace.span import Counter, Span, Trace
from lohan.trace.summary import LaneSummary, summarise

__all__ = [
    "Counter",
    "LaneSummary",
    "Recorder",
    "Span",
    "Trace",
    "chrome_json",
    "summarise",
    "traces_of_chrome",
]
