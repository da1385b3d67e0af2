"""What steps were predicted to take, next to what they took: steps 1 to 10 on this machine.

    python benchmarks/predictions.py --ssd DIR [--model llama-20m] [--ram 200MiB] [--steps 10]

Attaches a small Llama as `lohan.attach` does: this machine is measured as far as its plan needs it,
unless --machine gives a file or preset. Each row is one step, with the prediction made before it.
The summary is of the steps from the fifth on. The last line is one JSON object.
"""

import argparse
import json
import os
import statistics
import sys

import torch
from cpu_workload import LR, MODELS, batch_of, config_of, first_weights
from transformers import LlamaForCausalLM

import lohan
from lohan.units import format_bytes_decimal

FIRST_JUDGED_STEP = 5


def main() -> int:
    """Run and print."""
    args = _parse()
    with torch.device("meta"):
        model = LlamaForCausalLM(config_of(args.model, args.seq)).to(torch.bfloat16)
    model.model.rotary_emb = type(model.model.rotary_emb)(config_of(args.model, args.seq))
    optimizer = lohan.AdamW(model.parameters(), lr=LR, max_grad_norm=args.max_grad_norm)
    batch = batch_of(0, args)
    with lohan.attach(
        model.train(),
        optimizer,
        ssd=args.ssd,
        ram=args.ram,
        machine=args.machine,
        device="cpu",
        weights=first_weights(model, 0),
        largest_step=[batch],
        progress=print,
    ) as engine:
        engine.prepare([batch])
        print(f"plan: {engine.prediction.bottleneck}; {engine.rates_note or 'rates as given'}")
        print(f"written so far: {format_bytes_decimal(engine.written_bytes)}")
        print(f"{'step':>4} {'predicted':>10} {'measured':>10} {'error':>7}  bottleneck")
        rows = [_step(engine, number, args) for number in range(1, args.steps + 1)]
        engine.synchronize()
        written_bytes = engine.written_bytes
        engine.close(should_delete=True)
    judged = rows[FIRST_JUDGED_STEP - 1 :] or rows
    error = statistics.median(abs(row["error"]) for row in judged)
    load = os.getloadavg()[0]
    print(
        f"from step {FIRST_JUDGED_STEP} on the median step is {error:.1%} off; load {load:.1f} on "
        f"{os.cpu_count()} cores; {format_bytes_decimal(written_bytes)} written in all"
    )
    print(json.dumps({"rows": rows, "median_error": error, "load": load}))
    return 0


def _step(engine: lohan.Engine, number: int, args: argparse.Namespace) -> dict[str, object]:
    result = engine.step([batch_of(number, args)])
    assert result.predicted_seconds is not None, "one was asked for before the first step"
    error = result.seconds / result.predicted_seconds - 1
    print(
        f"{number:>4} {result.predicted_seconds:>8.3f} s {result.seconds:>8.3f} s {error:>+7.1%}  "
        f"{result.bottleneck}",
        flush=True,
    )
    return {"predicted": result.predicted_seconds, "measured": result.seconds, "error": error}


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ssd", required=True, help="SSD directory.")
    parser.add_argument("--model", default="llama-20m", choices=MODELS)
    parser.add_argument("--ram", default="200MiB", help="RAM budget.")
    parser.add_argument("--machine", help="Machine file or preset: nothing is measured.")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seq", type=int, default=64)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--max-grad-norm", type=float, default=1.0)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
