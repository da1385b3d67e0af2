"""The simulator: the same tasks the engine runs, on a virtual clock."""

from lohan.simulate.refine import ObservedRate, observed_rates, refine
from lohan.simulate.result import SimulatedStep
from lohan.simulate.simulator import read_off, replay, settled_schedule, simulate_plan
from lohan.simulate.tracing import trace_of

__all__ = [
    "ObservedRate",
    "SimulatedStep",
    "observed_rates",
    "read_off",
    "refine",
    "replay",
    "settled_schedule",
    "simulate_plan",
    "trace_of",
]
