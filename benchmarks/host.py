"""The host's time of a step: the engine next to the plain eager loop, on a model so small that
launching is all there is to measure.

    python benchmarks/host.py --ssd DIR [--steps 15] [--blocks 8 32] [--micro-batches 1 4]

A Llama of hidden size 64 on 16 tokens, one thread, bf16, no clipping. For each number of blocks and
micro-batches: the plain loop (forward, backward, AdamW), then the engine with all that backward
reads kept, with everything recomputed, and with everything swapped to RAM (on the emulated device,
which copies). Prints medians, ratios, and milliseconds per block and micro-batch; the last line is
one JSON object.
"""

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import replace

import lohan


def model_of(num_blocks: int):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=num_blocks,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=256,
        use_cache=False,
    )
    return LlamaForCausalLM(config).bfloat16().train()


def batches_of(num_micro_batches: int) -> list[dict]:
    import torch

    torch.manual_seed(1)
    ids = [torch.randint(0, 256, (1, 16)) for _ in range(num_micro_batches)]
    return [{"input_ids": one, "labels": one} for one in ids]


def median_ms(step, num_steps: int) -> float:
    times = []
    for _ in range(num_steps):
        started = time.perf_counter()
        step()
        times.append(time.perf_counter() - started)
    return statistics.median(times) * 1e3


def plain_ms(num_blocks: int, batches: list[dict], num_steps: int) -> float:
    import torch

    model = model_of(num_blocks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        for batch in batches:
            (model(**batch).loss / len(batches)).backward()
        optimizer.step()
        optimizer.zero_grad()

    median_ms(step, 3)
    return median_ms(step, num_steps)


def policy_with(choice):
    """The project's plan, with one choice for every activation of every block."""
    from lohan.plan import make_plan
    from lohan.vocabulary import Choice

    def policy(machine, shape, workload):
        plan = make_plan("lohan+", machine, shape, workload)
        blocks = [
            replace(
                block,
                input_choice=Choice.KEEP if choice is Choice.RECOMPUTE else choice,
                choices=()
                if choice is Choice.RECOMPUTE
                else tuple((op.index, choice) for op in kind.operators if op.is_saved),
            )
            for block, kind in zip(plan.blocks, shape.blocks, strict=True)
        ]
        return replace(plan, blocks=tuple(blocks))

    return policy


def engine_ms(num_blocks: int, batches: list[dict], args, choice) -> float:
    from lohan.device.emulated import EmulatedDevice
    from lohan.vocabulary import Choice

    model = model_of(num_blocks)
    optimizer = lohan.AdamW(model.parameters(), lr=1e-4, max_grad_norm=None)
    device = EmulatedDevice(memory_bytes=1 << 30) if choice is Choice.SWAP_TO_RAM else "cpu"
    with (
        tempfile.TemporaryDirectory(dir=args.ssd) as folder,
        lohan.attach(
            model,
            optimizer,
            ssd=folder,
            ram="1GiB",
            device=device,
            policy=policy_with(choice),
            threads=1,
        ) as engine,
    ):
        median_ms(lambda: engine.step(batches), 4)
        found = median_ms(lambda: engine.step(batches), args.steps)
        engine.close(should_delete=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ssd", required=True)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--blocks", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1, 4])
    parser.add_argument(
        "--only", nargs="+", default=["kept", "recomputed", "swapped"], help="rows to measure"
    )
    args = parser.parse_args()

    import torch

    from lohan.vocabulary import Choice

    torch.set_num_threads(1)
    choices = {
        "kept": Choice.KEEP,
        "recomputed": Choice.RECOMPUTE,
        "swapped": Choice.SWAP_TO_RAM,
    }
    rows = []
    print(f"{'blocks x micro-batches':24}{'way':14}{'ms a step':>10}{'ratio':>8}{'ms a visit':>12}")
    for num_blocks in args.blocks:
        for num_micro_batches in args.micro_batches:
            batches = batches_of(num_micro_batches)
            plain = plain_ms(num_blocks, batches, args.steps)
            visits = num_blocks * num_micro_batches
            title = f"{num_blocks} x {num_micro_batches}"
            print(f"{title:24}{'plain loop':14}{plain:10.1f}{1:8.2f}{plain / visits:12.2f}")
            for way in args.only:
                found = engine_ms(num_blocks, batches, args, choices[way])
                print(f"{title:24}{way:14}{found:10.1f}{found / plain:8.2f}{found / visits:12.2f}")
                rows.append(
                    {
                        "blocks": num_blocks,
                        "micro_batches": num_micro_batches,
                        "way": way,
                        "plain_ms": round(plain, 2),
                        "engine_ms": round(found, 2),
                        "ratio": round(found / plain, 3),
                    }
                )
    print(json.dumps({"benchmark": "host", "baseline": "plain eager PyTorch", "rows": rows}))


if __name__ == "__main__":
    main()
