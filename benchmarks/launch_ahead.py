"""How busy compute is while the host launches ahead, on the test accelerator; now and before.

    python benchmarks/launch_ahead.py [--kernel-us 50] [--steps 5] [--layers 8] [--choice keep]

A small Llama with its states on SSD, every kernel slowed down, so that a block takes about as long
to compute as to launch. "before": the host waits for the device after every segment and for the
oldest copies out; "now": as it is (`lanes/executor.py`, note "Running ahead"). Both in one process,
in turns. Busy: the share of a step in which the compute stream is at a kernel. Ahead: tasks that
were launched and not done when one more was. Medians; the last line is one JSON object.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers

import lohan  # noqa: F401 - before torch
from lohan.device.accelerator import AcceleratorDevice
from lohan.engine.driver import StepDriver
from lohan.lanes.activation_moves import SwappedActivations
from lohan.vocabulary import Choice

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support import accelerator

COMPUTE = 0


@contextmanager
def as_it_was() -> Iterator[None]:
    """The host waits for every segment, and for copies out."""

    def wait_for_oldest(self: Any) -> None:
        event, nbytes = self._moving.popleft()
        self._device.wait(event)
        self._moving_bytes -= nbytes

    with (
        mock.patch.object(AcceleratorDevice, "queue", None),
        mock.patch.object(SwappedActivations, "_compute_after_oldest", wait_for_oldest),
    ):
        yield


@contextmanager
def noting_ahead(found: list[int]) -> Iterator[None]:
    """Of every visit that was launched: how many tasks were not done then."""
    after = StepDriver.after

    def noted(self: Any, *args: Any) -> None:
        after(self, *args)
        launched = self.lanes._launched
        found.append(len(launched) if launched is not None else 0)

    with mock.patch.object(StepDriver, "after", noted):
        yield


def build(num_layers: int) -> torch.nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return transformers.LlamaForCausalLM(config)


def measure(asked: argparse.Namespace, place: Path) -> dict[str, float]:
    from support.accelerator_cases import TINY_MODELS, on_accelerator
    from support.engine_runs import attach, batches_of, optimizer_for
    from support.engine_runs import build as build_case
    from support.tiny_models import TinyModel, tokens_of

    def batch(seed: int, _: torch.dtype) -> dict[str, Any]:
        tokens = tokens_of(seed, (1, 32))
        return {"input_ids": tokens, "labels": tokens}

    TINY_MODELS["measured"] = TinyModel(build=lambda _: build(asked.layers), batch=batch, runs=[])
    case = on_accelerator(model="measured", choice=Choice(asked.choice), num_micro_batches=1)
    model, ahead = build_case(case), []
    batches = batches_of(case)[0]
    seconds, busy = [], []
    with attach(case, model, optimizer_for(case, model), place) as engine, noting_ahead(ahead):
        for _ in range(2):  # the first compares graphs with the blocks' own code
            engine.step(batches)
        ahead.clear()
        accelerator.calls().set_delay(COMPUTE, asked.kernel_us)
        for _ in range(asked.steps):
            began, worked = time.perf_counter(), accelerator.calls().busy_us(COMPUTE)
            engine.step(batches)
            seconds.append(time.perf_counter() - began)
            busy.append((accelerator.calls().busy_us(COMPUTE) - worked) / 1e6 / seconds[-1])
        accelerator.calls().set_delay(COMPUTE, 0)
        engine.close(should_delete=True)
    return {
        "step_ms": round(1000 * statistics.median(seconds), 1),
        "busy": round(statistics.median(busy), 3),
        "ahead": round(statistics.mean(ahead), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kernel-us", type=int, default=50)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--choice", choices=[one.value for one in Choice], default="keep")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    accelerator.load()
    rounds: dict[str, list[dict[str, float]]] = {"before": [], "now": []}
    for _ in range(2):
        for name, found in rounds.items():
            with tempfile.TemporaryDirectory() as folder:
                if name == "before":
                    with as_it_was():
                        found.append(measure(asked, Path(folder)))
                else:
                    found.append(measure(asked, Path(folder)))
    results: dict[str, float] = {}
    for name, found in rounds.items():
        for figure in found[0]:
            results[f"{name}_{figure}"] = round(statistics.median(one[figure] for one in found), 3)
        print(
            f"{name:6} step {results[f'{name}_step_ms']:.1f} ms, compute busy "
            f"{results[f'{name}_busy']:.0%} of it, {results[f'{name}_ahead']:.2f} tasks ahead"
        )
    results["ratio"] = round(results["before_step_ms"] / results["now_step_ms"], 3)
    print(f"ratio  {results['ratio']} (before / now)")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
