"""Run folders as a trainer leaves them, made without training: a real plan, a simulated trace, and
a "measured" one that is the same with every span a little longer."""

import json
import math
import pathlib
import random
from dataclasses import replace

from lohan.hardware import machine_named
from lohan.plan.plan import Plan
from lohan.plan.policies import make_plan
from lohan.plan.workload import Workload
from lohan.simulate import replay, settled_schedule, trace_of
from lohan.trace import Trace, chrome_json
from support.hand_made import block, model, operator

MACHINE = machine_named("desktop-4090").with_ram(4 << 30)
WORDS = """It fits: 9.1 GiB of 12.0 GiB RAM, 3.2 GiB of 24.0 GiB GPU.
A step takes 2.1 s (simulated); 1,000 steps take 0h 35m.
Bottleneck: ssd_write. Written: 1.2 TB, 0.1 % of the drives' rated life.
"""
CONFIG = """model: HuggingFaceTB/SmolLM2-135M-Instruct
data: chat.jsonl
learning_rate: 0.0002
lr_scheduler_type: cosine
hub_token: hf_very_secret
offload:
  ssd: ["/mnt/a", "/mnt/b"]
  ram: 12GiB
"""


def small_plan() -> Plan:
    blocks = [
        block(*(operator(n, mb=40, gflop=1000) for n in range(4)), num_parameters=40 * 10**6)
        for _ in range(6)
    ]
    workload = Workload(batch=8, sequence=1024, clips_gradients=True)
    return make_plan("lohan+", MACHINE, model(*blocks), workload)


def predicted_trace(plan: Plan) -> Trace:
    schedule = settled_schedule(plan, MACHINE)
    return trace_of(schedule, replay(schedule, plan, MACHINE), plan, MACHINE)


def measured_trace(predicted: Trace, factor: float = 1.08, offset_seconds: float = 3.5) -> Trace:
    spans = tuple(
        replace(
            span,
            start_seconds=offset_seconds + span.start_seconds * factor,
            end_seconds=offset_seconds + span.end_seconds * factor,
        )
        for span in predicted.spans
    )
    counters = tuple(
        replace(
            counter,
            at_seconds=tuple(offset_seconds + at * factor for at in counter.at_seconds),
            used_bytes=tuple(round(used * 0.93) for used in counter.used_bytes),
        )
        for counter in predicted.counters
    )
    return replace(
        predicted,
        name="run",
        is_simulated=False,
        spans=spans,
        counters=counters,
        comes_after={},
        metadata={},
    )


def log_line(step: int, num_steps: int, random_numbers: random.Random) -> dict[str, object]:
    loss = 1.1 + 2.2 * math.exp(-3.5 * step / num_steps) + 0.12 * random_numbers.gauss(0, 1)
    seconds = 2.24 + 0.05 * random_numbers.gauss(0, 1) + (9.0 if step <= 1 else 0.0)
    line: dict[str, object] = {
        "step": step,
        "epoch": step / num_steps,
        "loss": loss,
        "learning_rate": 2e-4 * min(1, step / (0.1 * num_steps)) * (1 - 0.9 * step / num_steps),
        "grad_norm": 0.8 + 0.5 * abs(random_numbers.gauss(0, 1)),
        "tokens_per_second": 8192 / seconds,
        "step_seconds": seconds,
        "predicted_step_seconds": 2.1,
        "read_bytes": 3_360_000_000,
        "written_bytes": 2_880_000_000,
        "busy_gpu": 0.61,
        "busy_gpu_to_ram": 0.22,
        "busy_ram_to_gpu": 0.35,
        "busy_ssd_read": 0.71 + 0.02 * random_numbers.gauss(0, 1),
        "busy_ssd_write": 0.93,
        "busy_cpu": 0.44,
        "bottleneck": "ssd_write" if random_numbers.random() < 0.9 else "ssd_read",
    }
    return line


def write_log(path: pathlib.Path, num_lines: int, *, eval_every: int = 25) -> None:
    random_numbers = random.Random(7)
    with path.open("w") as file:
        for step in range(1, num_lines + 1):
            file.write(json.dumps(log_line(step, num_lines, random_numbers)) + "\n")
            if step % eval_every == 0:
                loss = 1.25 + 2.0 * math.exp(-3.5 * step / num_lines)
                file.write(json.dumps({"step": step, "eval_loss": loss}) + "\n")


def write_run_folder(folder: pathlib.Path, num_lines: int = 300) -> pathlib.Path:
    """Write every file of a run."""
    folder.mkdir(parents=True, exist_ok=True)
    plan = small_plan()
    predicted = predicted_trace(plan)
    write_log(folder / "log.jsonl", num_lines)
    (folder / "plan.json").write_text(plan.to_json())
    (folder / "plan.txt").write_text(WORDS)
    (folder / "predicted_trace.json").write_text(chrome_json(predicted))
    (folder / "trace.json").write_text(chrome_json(measured_trace(predicted)))
    (folder / "machine.json").write_text(MACHINE.to_json())
    (folder / "lohan.yaml").write_text(CONFIG)
    (folder / "summary.json").write_text(
        json.dumps(
            {
                "model": "SmolLM2-135M-Instruct",
                "data": ["chat.jsonl"],
                "num_steps": num_lines,
                "max_steps": num_lines,
                "seconds": 2.24 * num_lines,
                "versions": {"lohan": "0.1.0", "torch": "2.13.0", "python": "3.11"},
            }
        )
    )
    return folder
