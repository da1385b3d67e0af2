"""Whole steps of `lohan+`, `lohan` and `zero-infinity` on an emulated machine, next to predictions.

    python benchmarks/iteration.py --dir SSD_DIRECTORY [--steps 5] [--time-scale 0.05] [--trace DIR]
        [--device emulated|accelerator] [--as-it-was]

The engine trains a small Llama on the emulated device, or on the test accelerator with the same
rates (docs/test-accelerator.md), with emulated drives and CPU updates held back to a rate: a
machine with the proportions of the paper's (see `scaled_machine.py`). All bytes really move and all
numbers are really computed; what this computer does faster is waited for. On the accelerator work
is launched ahead, and it tells for how long compute had nothing to do between two blocks; with
`--as-it-was` the host waits for the device after each, as it once did (`launch_ahead.py`). Each
row is one plan, run by the same engine; the prediction is the simulator's for the same plan and
machine. Steps are timed from the end of one to the end of the next, after a warm-up; all are
printed. `--trace` writes, for each row, the measured and the simulated lanes of the same step into
one Chrome trace, one above the other. The last line is one JSON object.

Of what was fitted to published systems, the emulation charges the fixed cost of a block's pass and
ZeRO-Infinity's share of the drives' rate. It does not charge `lohan`'s loss of compute while copies
run, nor ZeRO-Infinity's slow copies of activations; predictions leave them out too. Both would make
the published systems slower than they are here.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import torch
from iteration_traces import side_by_side
from launch_ahead import as_it_was
from scaled_machine import Scale, SmallModel, device_rates, link_rates

from lohan.device.emulated import EmulatedDevice
from lohan.engine.attach import attach_engine
from lohan.engine.engine import Engine
from lohan.engine.options import Options
from lohan.hardware.machine import Machine
from lohan.model.shape import ModelShape
from lohan.optimizer.torch_optimizer import AdamW
from lohan.paper import policy_named
from lohan.paper.published import plan_published
from lohan.plan import Workload, make_plan
from lohan.plan.plan import Plan
from lohan.plan.system import DrivingRates
from lohan.simulate import SimulatedStep, simulate_plan
from lohan.ssd import choose_engine
from lohan.store import MasterFormat, StoreCounters
from lohan.trace import Trace
from lohan.units import format_bytes, format_rate
from support import accelerator
from support.paced_accelerator import PacedAccelerator
from support.paced_engine import PacedEngine

NUM_WARM_UP_STEPS = 3
"""The first touches memory and files, the engine watches the second, the third fills the lanes."""
EXTRA_RAM_BYTES = 7_700_000
"""What small buffers lose to rounding, and the quarter that the engine keeps back for its own
objects in so small a budget; of the reference machine's RAM that is nothing."""
GPU_FACTOR = 2.0
ACCELERATOR_FACTOR = 4
"""The allocator of the test accelerator may hold so much more than is planned for: it keeps a list
for every size, and hands nothing out for another one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """One row of the table."""

    policy: str
    clips: bool = False

    @property
    def title(self) -> str:
        """As it is printed."""
        return f"{self.policy}, clipped" if self.clips else self.policy


SYSTEMS = (
    System(policy="lohan+"),
    System(policy="lohan+", clips=True),
    System(policy="lohan"),
    System(policy="zero-infinity"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What one system did."""

    system: System
    seconds: list[float]
    prediction: SimulatedStep
    read_bytes: int
    written_bytes: int
    measured: Trace
    plan: Plan
    machine: Machine
    gaps_us: list[float] = field(default_factory=list)
    """Compute had nothing to do for so long between two blocks, where the device tells."""

    @property
    def median(self) -> float:
        """Seconds of the step in the middle."""
        return statistics.median(self.seconds)

    def to_json(self) -> dict[str, object]:
        """As plain values; bytes of a step as measured and as predicted."""
        predicted = self.prediction
        return {
            "system": self.system.title,
            "step_seconds": self.seconds,
            "median_seconds": self.median,
            "predicted_seconds": predicted.step_seconds,
            "measured_over_predicted": self.median / predicted.step_seconds,
            "roofline_seconds": predicted.roofline_seconds,
            "roofline_resource": predicted.roofline_resource,
            "share_of_roofline": predicted.roofline_seconds / self.median,
            "read_bytes": [self.read_bytes, predicted.read_bytes],
            "written_bytes": [self.written_bytes, predicted.written_bytes],
            **({"gap_us": quantiles(self.gaps_us)} if self.gaps_us else {}),
        }


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """The middle, nine of ten, and the sum."""
    tenths = statistics.quantiles(values, n=10)
    found = {"median": tenths[4], "nine_of_ten": tenths[8], "sum": sum(values)}
    return {name: round(value, 1) for name, value in found.items()}


class Bench:
    """The small model on its machine."""

    def __init__(
        self,
        small: SmallModel,
        *,
        time_scale: float,
        num_ssds: int,
        directory: str,
        device: str = "emulated",
    ) -> None:
        self.small, self.directory, self.device = small, directory, device
        self.shape = small.shape()
        self.scale = Scale.of(small, self.shape, time_scale)
        self.machine = self.scale.machine(
            num_ssds, extra_ram_bytes=EXTRA_RAM_BYTES, gpu_factor=GPU_FACTOR
        )

    def rates_of(self, system: System) -> DrivingRates:
        """What the emulation charges for a system."""
        return self.scale.system(policy_named(system.policy).system).rates

    def plan(self, system: System, machine: Machine, shape: ModelShape, workload: Workload) -> Plan:
        """The policy's plan, with the costs that are charged."""
        if system.policy == "lohan+":
            return make_plan(system.policy, machine, shape, workload)
        return plan_published(
            self.scale.system(policy_named(system.policy).system), machine, shape, workload
        )

    def run(self, system: System, num_steps: int) -> Row:
        """Train for some steps and time them."""
        rates, machine = self.rates_of(system), self.machine
        model = self.small.build()
        optimizer = AdamW(model.parameters(), lr=1e-4, max_grad_norm=1.0 if system.clips else None)
        with ExitStack() as ends:
            device = ends.enter_context(
                PacedAccelerator(
                    memory_bytes=ACCELERATOR_FACTOR * machine.gpu.memory_bytes,
                    rates=device_rates(machine, rates),
                )
                if self.device == "accelerator"
                else EmulatedDevice(
                    memory_bytes=machine.gpu.memory_bytes,
                    rates=device_rates(machine, rates),
                    poisons=False,
                )
            )
            is_split = policy_named(system.policy).system.state.needs_weights_to_update
            engine = attach_engine(
                model,
                optimizer,
                Options(
                    ssd=[self.directory],
                    ram_bytes=machine.ram_bytes,
                    gpu_bytes=machine.gpu.memory_bytes,
                    machine=machine,
                    device=device,
                    policy=lambda *given: self.plan(system, *given),
                    master_format=MasterFormat.SPLIT if is_split else MasterFormat.WHOLE,
                    example=self.small.batch_of(0),
                    io=PacedEngine(choose_engine()[0], link_rates(machine, rates)),
                    update_parameters_per_second=machine.cpu_update_parameters_per_second
                    * rates.cpu_share,
                    num_threads=1,
                    is_tracing=True,
                ),
            )
            ends.callback(engine.close, should_delete=True)
            return self._timed(system, engine, num_steps)

    def _timed(self, system: System, engine: Engine, num_steps: int) -> Row:
        ends: list[float] = []
        gaps_us: list[float] = []
        for step in range(NUM_WARM_UP_STEPS + num_steps):
            engine.step([self.small.batch_of(step)])
            ends.append(time.perf_counter())
            if isinstance(engine.device, PacedAccelerator):
                found = engine.device.take_gaps()[1:]  # the first one is from step to step
                gaps_us += found if step >= NUM_WARM_UP_STEPS else []
        timed = ends[NUM_WARM_UP_STEPS - 1 :]
        measured, traffic = engine.trace(), self._traffic_of_a_step(engine)
        assert engine.plan is not None
        return Row(
            system=system,
            seconds=[after - before for before, after in pairwise(timed)],
            prediction=simulate_plan(engine.plan, self.machine),
            read_bytes=traffic.read_bytes,
            written_bytes=traffic.written_bytes,
            measured=measured,
            plan=engine.plan,
            machine=self.machine,
            gaps_us=gaps_us,
        )

    def _traffic_of_a_step(self, engine: Engine) -> StoreCounters:
        """Of one more step, alone: timed steps run into each other, and so do their bytes."""
        engine.synchronize()
        before = engine.traffic
        engine.step([self.small.batch_of(0)])
        engine.synchronize()
        return engine.traffic.since(before)


HEAD = (
    f"{'system':18} {'measured':>9} {'(from':>7} {'to)':>6} {'predicted':>10} {'ratio':>6} "
    f"{'roofline':>9} {'share':>6}  busiest"
)


def describe(row: Row) -> str:
    predicted = row.prediction
    seconds = row.seconds
    return (
        f"{row.system.title:18} {row.median:7.3f} s {min(seconds):7.3f} {max(seconds):6.3f} "
        f"{predicted.step_seconds:8.3f} s {row.median / predicted.step_seconds:6.3f} "
        f"{predicted.roofline_seconds:7.3f} s {predicted.roofline_seconds / row.median:6.1%}  "
        f"{predicted.roofline_resource}"
    )


def describe_machine(machine: Machine) -> str:
    return (
        f"{machine.gpu.flops_per_second / 1e9:.3f} GFLOP/s, "
        f"{format_bytes(machine.gpu.memory_bytes)} GPU, {format_bytes(machine.ram_bytes)} RAM, "
        f"copies {format_rate(machine.ram_to_gpu_bytes_per_second)}, "
        f"SSD read {format_rate(machine.ssd_read_bytes_per_second)}, "
        f"write {format_rate(machine.ssd_write_bytes_per_second)}, "
        f"{machine.cpu_update_parameters_per_second / 1e6:.3f} M updates/s"
    )


def ratios(rows: Sequence[Row]) -> dict[str, float]:
    """How much faster `lohan+` is, measured and predicted."""
    by_title = {row.system.title: row for row in rows}
    ours = by_title.get("lohan+")
    if ours is None:
        return {}
    found = {}
    for title in ("lohan", "zero-infinity"):
        if title in by_title:
            other = by_title[title]
            found[f"lohan+ over {title}"] = other.median / ours.median
            found[f"lohan+ over {title}, predicted"] = (
                other.prediction.step_seconds / ours.prediction.step_seconds
            )
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dir", help="where the states go; a temporary directory if left out")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--time-scale", type=float, default=0.05)
    parser.add_argument("--ssds", type=int, default=12, help="drives of the reference machine")
    parser.add_argument("--layers", type=int, default=SmallModel().num_layers)
    parser.add_argument("--device", choices=("emulated", "accelerator"), default="emulated")
    parser.add_argument("--as-it-was", action="store_true", help="nothing is launched ahead")
    parser.add_argument("--only", nargs="*", help="titles of the rows to run")
    parser.add_argument("--trace", type=Path, help="directory for Chrome traces")
    options = parser.parse_args(arguments)
    # One thread: others would only wait for each other in blocks this small.
    torch.set_num_threads(1)
    if options.device == "accelerator":
        accelerator.load()
    systems = [one for one in SYSTEMS if not options.only or one.title in options.only]
    rows = []
    with tempfile.TemporaryDirectory(dir=options.dir) as directory:
        small = SmallModel(num_layers=options.layers)
        bench = Bench(
            small,
            time_scale=options.time_scale,
            num_ssds=options.ssds,
            directory=directory,
            device=options.device,
        )
        print(
            f"Llama of {bench.shape.num_parameters / 1e6:.2f} M parameters in "
            f"{bench.shape.num_blocks} blocks, {small.batch} x {small.sequence} tokens, on "
            f"{describe_machine(bench.machine)}"
        )
        print(HEAD, flush=True)
        for system in systems:
            with as_it_was() if options.as_it_was else nullcontext():
                row = bench.run(system, options.steps)
            rows.append(row)
            print(describe(row), flush=True)
            if options.trace is not None:
                options.trace.mkdir(parents=True, exist_ok=True)
                name = row.system.title.replace(", ", "-").replace("+", "-plus")
                path = options.trace / f"{name}.json"
                path.write_text(side_by_side(row.measured, row.plan, row.machine))
    for row in rows:
        each = ", ".join(f"{seconds:.3f}" for seconds in row.seconds)
        print(f"{row.system.title}: steps of {each} s")
        if row.gaps_us:
            print(f"{row.system.title}: microseconds between blocks {quantiles(row.gaps_us)}")
    for name, ratio in ratios(rows).items():
        print(f"{name}: {ratio:.3f}x")
    load = os.getloadavg()[0]
    print(f"load of this computer at the end: {load:.2f}")
    print(
        json.dumps(
            {
                "rows": [row.to_json() for row in rows],
                "ratios": ratios(rows),
                "device": options.device,
                "time_scale": options.time_scale,
                "num_ssds": options.ssds,
                "num_parameters": bench.shape.num_parameters,
                "load": load,
            }
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
