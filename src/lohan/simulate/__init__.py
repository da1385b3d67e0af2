"""The simulator: the same tasks the engine runs, on a virtual clock.

Owns durations, the clock and what is read off it. Imported by whoever needs a prediction. Never
touches a device, a file or the real time.
"""

from lohan.simulate.refine import refine
from lohan.simulate.result import SimulatedStep
from lohan.simulate.simulator import read_off, replay, settled_schedule, simulate_plan
from lohan.simulate.timeline import trace_of

__all__ = [
    "SimulatedStep",
    "read_off",
    "refine",
    "replay",
    "settled_schedule",
    "simulate_plan",
    "trace_of",
]
