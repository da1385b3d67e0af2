#!/usr/bin/env python3
"""What a machine with a GPU shows, each result beside what the plan said: `scripts/gpu_check`.

    scripts/gpu_check --ssd DIRECTORY [DIRECTORY ...] [--device cuda:0] [--steps 10] [--layers 32]

Runs `lohan doctor`, the device contract, `lohan verify`, `lohan profile`, and a Llama of 8B shape
with random weights for some steps, once with padded rows and once with full ones. 8B take 200 GB on
the SSDs and are removed again; `--layers` makes the model shorter. What fails is told, and the rest
goes on. Prints the report, and writes it to gpu-check.md.
"""

import argparse
import datetime
import math
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

import lohan
from lohan.engine.planning.plan_run import PlannedRun
from lohan.simulate import simulate_plan
from lohan.units import format_bytes
from lohan.vocabulary import Tier

EIGHT_B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
}
_NUM_WARM_UP_STEPS = 3
"""The first loads kernels, the engine watches the second, the third fills the lanes."""
_NUM_LINES = 60
"""Of what a command says, the last."""


@dataclass
class Result:
    """One part of the report."""

    title: str
    is_good: bool
    seconds: float
    lines: list[str] = field(default_factory=list)

    def text(self) -> str:
        """As Markdown."""
        head = f"## {self.title}: {'ok' if self.is_good else 'FAILED'} ({self.seconds:.0f} s)"
        return "\n".join([head, "", *self.lines, ""])


def of_command(title: str, words: Sequence[str]) -> Result:
    """Run a command; it is good if it ends with 0."""
    started = time.perf_counter()
    done = subprocess.run(words, capture_output=True, text=True)
    said = (done.stdout + done.stderr).splitlines()[-_NUM_LINES:]
    shown = " ".join(words[1:] if words[0] == sys.executable else words)
    return Result(
        title=title,
        is_good=done.returncode == 0,
        seconds=time.perf_counter() - started,
        lines=[f"`{shown}` ended with {done.returncode}", "", "```", *said, "```"],
    )


def of_work(title: str, work: Callable[[], list[str]]) -> Result:
    """Run a function that returns lines; it is good if it raises nothing."""
    started = time.perf_counter()
    try:
        lines, is_good = work(), True
    except Exception as error:
        notes = [line for note in getattr(error, "__notes__", []) for line in note.splitlines()]
        story = traceback.format_exc().splitlines()[-_NUM_LINES:]
        lines, is_good = ["```", *story, *notes, "```"], False
    return Result(title=title, is_good=is_good, seconds=time.perf_counter() - started, lines=lines)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The model and its batches."""

    settings: dict[str, Any]
    num_rows: int
    num_tokens: int
    is_padded: bool

    def model(self) -> torch.nn.Module:
        """Without values but for buffers."""
        config = transformers.LlamaConfig(**self.settings)
        with torch.device("meta"):
            model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
        model.model.rotary_emb = type(model.model.rotary_emb)(config)
        return model.train()

    def values(self, model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """Random ones, of the usual size."""
        generator = torch.Generator().manual_seed(0)
        for name, parameter in model.named_parameters():
            if parameter.dim() < 2:
                yield name, torch.ones(parameter.shape, dtype=parameter.dtype)
            else:
                values = torch.empty(parameter.shape, dtype=torch.bfloat16)
                yield name, values.normal_(0.0, 0.02, generator=generator)

    def batch(self, seed: int) -> dict[str, torch.Tensor]:
        """One micro-batch. Padded rows have all lengths from half to full."""
        generator = torch.Generator().manual_seed(1 + seed)
        size = (self.num_rows, self.num_tokens)
        ids = torch.randint(2, self.settings["vocab_size"], size, generator=generator)
        if not self.is_padded:
            return {"input_ids": ids, "labels": ids}
        lengths = torch.linspace(self.num_tokens // 2, self.num_tokens, self.num_rows).long()
        mask = (torch.arange(self.num_tokens)[None] < lengths[:, None]).long()
        labels = ids.masked_fill(mask == 0, -100)
        return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def steps_of(shape: Shape, *, num_steps: int, **where: Any) -> list[str]:
    """Train for some steps; a table of what was planned and what was measured."""
    plans: list[PlannedRun] = []
    model = shape.model()
    engine = lohan.attach(
        model,
        lohan.AdamW(model.parameters(), lr=1e-5),
        weights=shape.values(model),
        example=shape.batch(0),
        largest_step=[shape.batch(0)],
        on_planned=plans.append,
        **where,
    )
    try:
        results = [engine.step([shape.batch(number)]) for number in range(num_steps)]
        engine.synchronize()
        planned = plans[0]
        simulated = simulate_plan(planned.plan, planned.machine)
        steady = results[min(_NUM_WARM_UP_STEPS, num_steps - 1) :]
        seconds = statistics.median(one.seconds for one in steady)
        ledger = planned.plan.ledger
        gpu_bytes, ram_bytes = engine.gpu_peak_bytes or 0, engine.ram_peak_bytes
        rows = [
            ("seconds per step", f"{planned.seconds:.3f}", f"{seconds:.3f}"),
            (
                "GPU peak",
                format_bytes(ledger.total(Tier.GPU)),
                format_bytes(gpu_bytes),
            ),
            ("GPU reserved by torch", "", format_bytes(engine.gpu_reserved_bytes or 0)),
            ("RAM peak", format_bytes(ledger.total(Tier.RAM)), format_bytes(ram_bytes)),
            ("read per step", format_bytes(simulated.read_bytes), _median(steady, "read_bytes")),
            (
                "written per step",
                format_bytes(simulated.written_bytes),
                _median(steady, "written_bytes"),
            ),
            ("bottleneck", simulated.bottleneck, steady[-1].bottleneck),
        ]
        last = results[-1]
        if last.predicted_seconds is not None:
            rows.append(
                ("last step, as learned", f"{last.predicted_seconds:.3f}", f"{last.seconds:.3f}")
            )
        lines = ["| | the plan said | measured |", "|---|---|---|"]
        lines += [f"| {name} | {said} | {found} |" for name, said, found in rows]
        losses = ", ".join(f"{one.loss:.4f}" for one in results)
        busy = ", ".join(f"{lane} {share:.0%}" for lane, share in last.busy.items())
        lines += [
            "",
            f"device {engine.device.name}; losses {losses}",
            f"busy in the last step: {busy}",
        ]
        if not all(math.isfinite(one.loss) for one in results):
            raise RuntimeError("\n".join(["a loss is not finite", *lines]))
        return lines
    finally:
        engine.close(should_delete=True)


def _median(steps: Sequence[Any], name: str) -> str:
    return format_bytes(int(statistics.median(getattr(one, name) for one in steps)))


def facts() -> list[str]:
    """What ran, on what."""
    found = torch.accelerator.current_accelerator()
    if found is None or not torch.accelerator.is_available():
        raise RuntimeError(f"torch {torch.__version__} finds no accelerator")
    module: Any = torch.get_device_module(found)
    free_bytes, total_bytes = torch.accelerator.get_memory_info()
    return [
        f"- {datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC, lohan {lohan.__version__}",
        f"- torch {torch.__version__} (CUDA {torch.version.cuda}, ROCm {torch.version.hip}), "
        f"transformers {transformers.__version__}, Python {sys.version.split()[0]}",
        f"- {torch.accelerator.device_count()} x {module.get_device_name()}, "
        f"{format_bytes(total_bytes)}, {format_bytes(free_bytes)} free",
    ]


def main() -> int:
    """Run everything; 0 if all went well."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ssd", nargs="+", required=True, help="directories, one per drive")
    parser.add_argument("--device", help="cuda, cuda:1, xpu, ... [default: a GPU if any]")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--layers", type=int, default=EIGHT_B["num_hidden_layers"])
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--ram", help="budget, such as 64GiB [default: most of what is free]")
    parser.add_argument("--report", type=Path, default=Path("gpu-check.md"))
    asked = parser.parse_args()
    device = ["--device", asked.device] if asked.device else []
    drives = [word for place in asked.ssd for word in ("--ssd", place)]
    command = [sys.executable, "-c", "from lohan.cli import main; main()"]
    contract = "tests/contract/test_device_contract.py"
    settings = {**EIGHT_B, "num_hidden_layers": asked.layers}
    parts: list[Callable[[], Result]] = [
        lambda: of_work("Machine", facts),
        lambda: of_command("Doctor", [*command, "doctor", *drives, *device]),
        lambda: of_command(
            "Device contract", [sys.executable, "-m", "pytest", "-q", "-k", "accelerator", contract]
        ),
        lambda: of_command("Verify", [*command, "verify", "llama-3.1-8b", "--steps", "3", *device]),
        lambda: of_command("Profile", [*command, "profile", *drives, *device]),
    ]
    for is_padded in (True, False):
        shape = Shape(
            settings=settings, num_rows=asked.rows, num_tokens=asked.tokens, is_padded=is_padded
        )
        title = (
            f"{asked.steps} steps of {asked.layers} layers, {'padded' if is_padded else 'packed'}"
        )
        parts.append(
            lambda title=title, shape=shape: of_work(  # type: ignore[misc]
                title,
                lambda: steps_of(
                    shape, num_steps=asked.steps, ssd=asked.ssd, device=asked.device, ram=asked.ram
                ),
            )
        )
    results = []
    for part in parts:
        results.append(part())
        print(results[-1].text(), flush=True)
    asked.report.write_text("\n".join(["# GPU check", "", *(one.text() for one in results)]))
    print(f"the report is in {asked.report}")
    return 0 if all(one.is_good for one in results) else 1


if __name__ == "__main__":
    sys.exit(main())
