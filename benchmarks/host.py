"""The host's time of a step: the engine next to the plain eager loop, on a model so small that
launching is all there is to measure.

    python benchmarks/host.py --ssd DIR [--steps 15] [--blocks 8 32] [--micro-batches 1 4]

A Llama of hidden size 64 on 16 tokens, one thread, bf16, no clipping. For each number of blocks and
micro-batches: the engine with all that backward reads kept, with everything recomputed, and with
everything swapped to RAM (on the emulated device, which copies), in turn with the plain loop
(forward, backward, AdamW), so that both meet the same load. The emulated device looks at every
operator to count memory, which takes more of the host than the operator: there the plain loop runs
on it too.

Prints medians: milliseconds of a step by the clock and of the processor (all threads of the engine,
updates included), their ratios to the plain loop's, and milliseconds by the clock per block and
micro-batch. On a machine that others use only the processor's say much. The last line is one JSON
object.
"""

import argparse
import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable
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


def in_turn_ms(plain: Callable, engine: Callable, num_steps: int) -> tuple[float, ...]:
    """Of a step: clock and processor, of the plain loop and of the engine."""
    rounds = []
    for _ in range(num_steps):
        begun, all_threads = time.perf_counter(), time.process_time()
        own = time.thread_time()
        plain()
        # The engine's lanes may be at its last updates meanwhile: those are not the plain loop's.
        own, turn = time.thread_time() - own, time.perf_counter()
        engine()
        ended = time.perf_counter()
        rounds.append((turn - begun, own, ended - turn, time.process_time() - all_threads - own))
    return tuple(1e3 * statistics.median(one) for one in zip(*rounds, strict=True))


def plain_step(num_blocks: int, batches: list[dict], device) -> Callable:
    import torch

    model = model_of(num_blocks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        with contextlib.nullcontext() if device == "cpu" else device.compute():
            for batch in batches:
                (model(**batch).loss / len(batches)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


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


def measure(num_blocks: int, batches: list[dict], args, choice) -> tuple[float, ...]:
    from lohan.device.emulated import EmulatedDevice
    from lohan.vocabulary import Choice

    model = model_of(num_blocks)
    optimizer = lohan.AdamW(model.parameters(), lr=1e-4, max_grad_norm=None)
    is_swapped = choice is Choice.SWAP_TO_RAM
    device = EmulatedDevice(memory_bytes=1 << 30, poisons=False) if is_swapped else "cpu"
    plain = plain_step(num_blocks, batches, device)
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
        in_turn_ms(plain, lambda: engine.step(batches), 4)
        found = in_turn_ms(plain, lambda: engine.step(batches), args.steps)
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
    columns = ("plain ms", "ms", "ratio", "plain CPU", "CPU", "ratio", "ms a visit")
    print(f"{'blocks x micro-batches':24}{'way':12}" + "".join(f"{one:>11}" for one in columns))
    for num_blocks in args.blocks:
        for num_micro_batches in args.micro_batches:
            batches = batches_of(num_micro_batches)
            visits = num_blocks * num_micro_batches
            title = f"{num_blocks} x {num_micro_batches}"
            for way in args.only:
                plain, plain_cpu, found, cpu = measure(num_blocks, batches, args, choices[way])
                row = (plain, found, found / plain, plain_cpu, cpu, cpu / plain_cpu, found / visits)
                print(f"{title:24}{way:12}" + "".join(f"{one:11.2f}" for one in row), flush=True)
                rows.append(
                    {
                        "blocks": num_blocks,
                        "micro_batches": num_micro_batches,
                        "way": way,
                        "plain_ms": round(plain, 2),
                        "engine_ms": round(found, 2),
                        "ratio": round(found / plain, 3),
                        "plain_cpu_ms": round(plain_cpu, 2),
                        "engine_cpu_ms": round(cpu, 2),
                        "cpu_ratio": round(cpu / plain_cpu, 3),
                    }
                )
    print(json.dumps({"benchmark": "host", "baseline": "plain eager PyTorch", "rows": rows}))


if __name__ == "__main__":
    main()
