"""Steps of 1, 2 and 4 ranks on emulated devices, each with its own rates, next to predictions.

    python benchmarks/ranks.py --dir SSD_DIRECTORY [--steps 3] [--time-scale 0.1] [--ranks 1 2 4]

The same work by every number of ranks: a step of four micro-batches in four reduction groups, so
that all must have the same losses, which is checked. Every rank is a process with an emulated
device, drives, CPU updates and a link to the others held back to rates of its own: those of the
machine of `iteration.py`, with the proportions of the paper's, and among ranks the rate of its
copies, as where cards without peer access go through main memory. All bytes really move and all
numbers are really computed; what this computer does faster is waited for. So that two cores can act
out four devices, set times must be long against what is really computed: the CPU seconds that all
ranks took are told beside the seconds there were. The last line is one JSON object.
"""

import argparse
import contextlib
import json
import os
import pathlib
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from iteration import EXTRA_RAM_BYTES, GPU_FACTOR, NUM_WARM_UP_STEPS, describe_machine
from scaled_machine import Scale, SmallModel, device_rates, link_rates

from lohan.device.emulated import EmulatedDevice
from lohan.engine.attach import attach_engine
from lohan.engine.options import Options
from lohan.hardware.machine import Machine
from lohan.optimizer.torch_optimizer import AdamW
from lohan.paper import policy_named
from lohan.parallel.peers import Peers
from lohan.simulate import simulate_plan
from lohan.ssd import choose_engine
from support.paced_engine import PacedEngine

NUM_GROUPS = 4
POLICY = "lohan+"
LEAST_SPEEDUPS = {2: 1.9, 4: 3.6}
"""Asked for where compute is what a plan is bound by."""
MOST_OFF = 0.05
"""Of the prediction."""


class PacedPeers(Peers):
    """Ranks whose tensors come no faster than over a link of a set rate."""

    bytes_per_second = 1.0

    def link_bytes_per_second(self) -> float | None:
        """As it is set."""
        return None if self.num_ranks == 1 else self.bytes_per_second

    def gather(self, whole: torch.Tensor, own: torch.Tensor, *, what: str) -> None:
        """When the link would have brought what the others send."""
        with self._pace(own.nbytes * (self.num_ranks - 1)):
            super().gather(whole, own, what=what)

    def exchange(self, arrived: torch.Tensor, sent: torch.Tensor, *, what: str) -> None:
        """When the link would have brought what the others send."""
        with self._pace(sent.nbytes // self.num_ranks * (self.num_ranks - 1)):
            super().exchange(arrived, sent, what=what)

    @contextlib.contextmanager
    def _pace(self, nbytes: int) -> Iterator[None]:
        # The link carries nothing before all ranks are there, which is when the real one is done.
        yield
        time.sleep(nbytes / self.bytes_per_second)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What all ranks do together, and on what."""

    small: SmallModel
    machine: Machine
    num_steps: int
    directory: pathlib.Path

    def by_ranks(self, num_ranks: int) -> dict[str, Any]:
        """Fork the ranks; what the first one tells, and what all of them took.

        Raises:
            RuntimeError: a rank has failed.
        """
        with tempfile.TemporaryDirectory(dir=self.directory) as place:
            root = pathlib.Path(place)
            children = [self._fork(rank, num_ranks, root) for rank in range(num_ranks)]
            for child in children:
                os.waitpid(child, 0)
            told = [json.loads((root / f"{rank}.json").read_text()) for rank in range(num_ranks)]
        failed = [one["error"] for one in told if "error" in one]
        if failed:
            raise RuntimeError("\n".join(failed))
        if any(one["losses"] != told[0]["losses"] for one in told):
            raise RuntimeError(f"{num_ranks} ranks have other losses than each other")
        return {**told[0], "cpu_seconds": sum(one["cpu_seconds"] for one in told)}

    def _fork(self, rank: int, num_ranks: int, root: pathlib.Path) -> int:
        child = os.fork()
        if child:
            return child
        try:
            told = self._take(rank, num_ranks, root)
        except BaseException:
            told = {"error": f"rank {rank}: {traceback.format_exc()}"}
        (root / f"{rank}.json").write_text(json.dumps(told))
        os._exit(0)

    def _take(self, rank: int, num_ranks: int, root: pathlib.Path) -> dict[str, Any]:
        """One rank's steps, timed from the end of one to the end of the next."""
        torch.set_num_threads(1)
        machine, rates = self.machine, policy_named(POLICY).system.rates
        if num_ranks > 1:
            store = f"file://{root}/store"
            dist.init_process_group("gloo", init_method=store, rank=rank, world_size=num_ranks)
        peers = PacedPeers.join()
        peers.num_here = 1  # each rank is a machine of its own, with drives of its own
        if isinstance(peers, PacedPeers):
            peers.bytes_per_second = machine.ram_to_gpu_bytes_per_second
        directory = root / f"drives{rank}"
        directory.mkdir()
        model = self.small.build()
        with contextlib.ExitStack() as ends:
            device = ends.enter_context(
                EmulatedDevice(
                    memory_bytes=machine.gpu.memory_bytes,
                    rates=device_rates(machine, rates),
                    poisons=False,
                )
            )
            engine = attach_engine(
                model,
                AdamW(model.parameters(), lr=1e-4),
                Options(
                    ssd=[directory],
                    ram_bytes=machine.ram_bytes,
                    gpu_bytes=machine.gpu.memory_bytes,
                    machine=machine,
                    device=device,
                    policy=policy_named(POLICY).plan,
                    example=self.small.batch_of(0),
                    io=PacedEngine(choose_engine()[0], link_rates(machine, rates)),
                    update_parameters_per_second=machine.cpu_update_parameters_per_second,
                    num_threads=1,
                    reduction_groups=NUM_GROUPS,
                    peers=peers,
                ),
            )
            ends.callback(engine.close, should_delete=True)
            times, cpu_seconds, losses = [], 0.0, []
            for step in range(NUM_WARM_UP_STEPS + self.num_steps):
                if step == NUM_WARM_UP_STEPS:
                    cpu_seconds = time.process_time()
                batches = [self.small.batch_of(NUM_GROUPS * step + n) for n in range(NUM_GROUPS)]
                losses.append(list(engine.step(batches[rank::num_ranks]).losses))
                times.append(time.perf_counter())
            cpu_seconds = time.process_time() - cpu_seconds
            assert engine.plan is not None
            prediction = simulate_plan(engine.plan, engine._setup.machine)
            timed = times[NUM_WARM_UP_STEPS - 1 :]
            return {
                "ranks": num_ranks,
                "step_seconds": [after - before for before, after in pairwise(timed)],
                "predicted_seconds": prediction.step_seconds,
                "roofline_seconds": prediction.roofline_seconds,
                "roofline_resource": str(prediction.roofline_resource),
                "cpu_seconds": cpu_seconds,
                "losses": losses,
            }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dir", help="where the states go; a temporary directory if left out")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--time-scale", type=float, default=0.1)
    parser.add_argument("--ssds", type=int, default=12, help="drives of the reference machine")
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2, 4])
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    small = SmallModel(num_layers=options.layers)
    shape = small.shape()
    machine = Scale.of(small, shape, options.time_scale).machine(
        options.ssds, extra_ram_bytes=EXTRA_RAM_BYTES, gpu_factor=GPU_FACTOR
    )
    print(
        f"Llama of {shape.num_parameters / 1e6:.2f} M parameters in {shape.num_blocks} blocks, "
        f"{NUM_GROUPS} micro-batches of {small.batch} x {small.sequence} tokens; each rank has "
        f"{describe_machine(machine)}"
    )
    rows: list[dict[str, Any]] = []
    num_cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(dir=options.dir) as place:
        work = Work(
            small=small, machine=machine, num_steps=options.steps, directory=pathlib.Path(place)
        )
        for num_ranks in options.ranks:
            row = work.by_ranks(num_ranks)
            seconds = row["median_seconds"] = statistics.median(row["step_seconds"])
            row["measured_over_predicted"] = seconds / row["predicted_seconds"]
            row["cores_share"] = row["cpu_seconds"] / sum(row["step_seconds"]) / num_cores
            rows.append(row)
            row["speedup"] = rows[0]["median_seconds"] / seconds
            row["predicted_speedup"] = rows[0]["predicted_seconds"] / row["predicted_seconds"]
            each = ", ".join(f"{one:.3f}" for one in row["step_seconds"])
            print(
                f"{num_ranks} rank(s): {seconds:.3f} s a step ({each}), predicted "
                f"{row['predicted_seconds']:.3f} s, {row['measured_over_predicted']:.3f} of it; "
                f"{row['speedup']:.2f}x of {row['predicted_speedup']:.2f}x predicted; bound by "
                f"{row['roofline_resource']}; {row['cores_share']:.0%} of {num_cores} cores",
                flush=True,
            )
    wrong = []
    for row in rows:
        if row["losses"] != rows[0]["losses"]:
            wrong.append(f"{row['ranks']} ranks: other losses")
        if abs(row["measured_over_predicted"] - 1) > MOST_OFF:
            wrong.append(f"{row['ranks']} ranks: further than {MOST_OFF:.0%} from the prediction")
        if rows[0]["ranks"] == 1 and row["speedup"] < LEAST_SPEEDUPS.get(row["ranks"], 0.0):
            wrong.append(f"{row['ranks']} ranks: {row['speedup']:.2f}x")
    print("as asked for" if not wrong else "; ".join(wrong))
    told = [{name: value for name, value in row.items() if name != "losses"} for row in rows]
    print(
        json.dumps(
            {
                "rows": told,
                "are_losses_equal": all(row["losses"] == rows[0]["losses"] for row in rows),
                "time_scale": options.time_scale,
                "num_parameters": shape.num_parameters,
                "load": os.getloadavg()[0],
            }
        )
    )
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
