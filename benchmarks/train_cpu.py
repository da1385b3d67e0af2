"""Training on the processor with every state on SSD, next to plain PyTorch in memory.

    python benchmarks/train_cpu.py --ssd DIR [--model llama-134m] [--batch 2] [--seq 256]

Runs, each in a process of its own, on the same batches from the same weights:
  in memory               bf16 weights, fp32 masters, torch's fused AdamW, no clipping
  in memory, checkpointed the same with activation checkpointing
  lohan                   all states on SSD, activations kept (memory to spare)
  lohan, recomputed       all states on SSD, every activation recomputed, a tight RAM budget
  lohan, with RAM         as `lohan.attach` plans it with the given --ram
  DeepSpeed               ZeRO-Infinity, parameters and states on SSD (with --deepspeed PYTHON only)
  DeepSpeed, checkpointed the same with activation checkpointing

--fp32-products computes matrix products in fp32 on every side (see `fp32_products.py`), for
processors without bf16 instructions. --read-mbps and --write-mbps throttle the drive of the first
--ssd for every system alike (root and cgroup v1). Prints tokens/s (median step), peak RSS after
warm-up, bytes read and written per parameter and step, and the ratios; the last line is one JSON
object.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from cpu_workload import (
    DECAY,
    LR,
    MODELS,
    Meter,
    batch_of,
    config_of,
    first_weights,
    plain_steps,
)
from fp32_products import compute_in_fp32

import lohan  # here, for what it leaves out must reach the other systems' processes too

SYSTEMS = (
    "in memory",
    "in memory, checkpointed",
    "lohan",
    "lohan, recomputed",
    "lohan, with RAM",
    "DeepSpeed",
    "DeepSpeed, checkpointed",
)


def train_in_memory(args, is_checkpointed: bool) -> None:
    import torch
    from transformers import LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(config_of(args.model, args.seq)).to(torch.bfloat16)
    weights = dict(first_weights(model, 0))
    model = LlamaForCausalLM(config_of(args.model, args.seq)).to(torch.bfloat16).train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights.pop(name))
    if is_checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    parameters = list(model.parameters())
    meter = plain_steps(args, model, parameters)
    meter.report(args)


def train_with_lohan(args, system: str) -> None:
    from dataclasses import replace

    import torch
    from transformers import LlamaForCausalLM

    from lohan.plan import make_plan
    from lohan.vocabulary import Choice

    def on_ssd(machine, shape, workload):
        """The project's plan with nothing in RAM, and activations all kept or all recomputed."""
        plan = make_plan("lohan+", machine, shape, workload)
        keeps = system == "lohan"
        blocks = [
            replace(
                block,
                residents=frozenset(),
                input_choice=Choice.KEEP,
                choices=tuple((op.index, Choice.KEEP) for op in kind.operators if op.is_saved)
                if keeps
                else (),
            )
            for block, kind in zip(plan.blocks, shape.blocks, strict=True)
        ]
        return replace(plan, blocks=tuple(blocks), num_update_parts=args.parts)

    config = config_of(args.model, args.seq)
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16).train()
    # Rotary frequencies are a buffer: computed, not loaded.
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    optimizer = lohan.AdamW(model.parameters(), lr=LR, weight_decay=DECAY, max_grad_norm=None)
    policy = "lohan+" if system == "lohan, with RAM" else on_ssd
    with lohan.attach(
        model,
        optimizer,
        ssd=args.ssd,
        ram=args.ram,
        device="cpu",
        policy=policy,
        weights=first_weights(model, 0),
        threads=args.threads,
        is_tracing=bool(args.trace),
    ) as engine:
        meter = Meter(args.warmup)
        read = written = 0
        for step in range(args.warmup + args.steps):
            if step == args.warmup and args.trace:
                engine.synchronize()
            meter.begin(step)
            result = engine.step([batch_of(step, args)])
            meter.end(step, result.loss)
            if step >= args.warmup:
                read, written = read + result.read_bytes, written + result.written_bytes
        count = sum(parameter.numel() for parameter in model.parameters())
        assert engine.prediction is not None
        meter.report(
            args,
            predicted_seconds=engine.prediction.step_seconds,
            read_bytes_per_parameter=read / args.steps / count,
            written_bytes_per_parameter=written / args.steps / count,
            busy={lane: round(share, 3) for lane, share in result.busy.items()},
        )
        if args.trace:
            from lohan.trace import chrome_json

            Path(args.trace).write_text(chrome_json(engine.trace()))
        engine.close(should_delete=True)


def run_one(args, system: str) -> dict:
    """One system in a process of its own."""
    shared = ["model", "batch", "seq", "steps", "warmup"]
    environment = dict(os.environ)
    if system.startswith("DeepSpeed"):
        # Its extension for asynchronous I/O is built without naming the library it needs.
        environment["LD_PRELOAD"] = "libaio.so.1"
        command = [args.deepspeed, str(Path(__file__).with_name("deepspeed_cpu.py"))]
        command += ["--checkpointed"] if "checkpointed" in system else []
    else:
        command = [sys.executable, __file__, "--system", system]
        shared += ["ram", "parts"]
        command += ["--threads", str(args.threads)] if args.threads else []
    command += ["--fp32-products"] if args.fp32_products else []
    for name in shared:
        command += [f"--{name}", str(getattr(args, name))]
    for directory in args.ssd:
        command += ["--ssd", directory]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env=environment)
    if done.returncode:
        return {"error": f"exit code {done.returncode}"}
    return json.loads(done.stdout.strip().splitlines()[-1])


@contextlib.contextmanager
def throttled(args) -> Iterator[None]:
    """Slow the drive down for this process and its children."""
    if not (args.read_mbps or args.write_mbps):
        yield
        return
    group = Path(f"/sys/fs/cgroup/blkio/train_cpu.{os.getpid()}")
    drive = os.stat(args.ssd[0]).st_dev
    try:
        group.mkdir()
        for way, rate in (("read", args.read_mbps), ("write", args.write_mbps)):
            if rate:
                limit = f"{os.major(drive)}:{os.minor(drive)} {rate * 10**6}"
                (group / f"blkio.throttle.{way}_bps_device").write_text(limit)
        (group / "cgroup.procs").write_text(str(os.getpid()))
    except OSError as error:
        sys.exit(f"the drive cannot be throttled ({error}): this needs root and cgroup v1")
    try:
        yield
    finally:
        (group.parent / "cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ssd", action="append", default=[], help="SSD directory; repeat for more")
    parser.add_argument("--model", choices=MODELS, default="llama-134m")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--ram", default="4GiB", help="RAM budget of lohan")
    parser.add_argument("--parts", type=int, default=4, help="pieces of the largest block's update")
    parser.add_argument("--threads", type=int, default=None, help="of lohan's CPU update")
    parser.add_argument("--fp32-products", action="store_true", help="compute products in fp32")
    parser.add_argument("--deepspeed", help="an interpreter that has DeepSpeed for the CPU")
    parser.add_argument("--read-mbps", type=int, help="throttle reads from the drive")
    parser.add_argument("--write-mbps", type=int, help="throttle writes to the drive")
    parser.add_argument("--only", action="append", help="run these systems only")
    parser.add_argument("--trace", help="write what the lanes did to this file (one system)")
    parser.add_argument("--system", choices=SYSTEMS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.system is not None:
        if args.fp32_products:
            compute_in_fp32()
        if args.system.startswith("in memory"):
            train_in_memory(args, is_checkpointed="checkpointed" in args.system)
        else:
            train_with_lohan(args, args.system)
        return
    with tempfile.TemporaryDirectory() as own:
        args.ssd = args.ssd or [own]
        with throttled(args):
            compare(args)


def compare(args) -> None:
    """Run the systems one after another and print their figures and ratios."""
    systems = [one for one in SYSTEMS if args.deepspeed or not one.startswith("DeepSpeed")]
    systems = [one for one in systems if not args.only or one in args.only]
    found = {}
    products = ", products in fp32" if args.fp32_products else ""
    print(f"{args.model}, batch {args.batch} x {args.seq}, {os.cpu_count()} cores{products}")
    for system in systems:
        found[system] = one = run_one(args, system)
        if "error" in one:
            print(f"  {system:24} {one['error']}")
            continue
        traffic = ""
        if "read_bytes_per_parameter" in one:
            traffic = (
                f", {one['read_bytes_per_parameter']:.1f} B read and "
                f"{one['written_bytes_per_parameter']:.1f} B written per parameter"
            )
        print(
            f"  {system:24} {one['tokens_per_second']:8.1f} tokens/s, peak RSS "
            f"{one['peak_rss_mib']:6.0f} MiB{traffic}",
            flush=True,
        )

    def ratio(one: str, other: str, figure: str = "tokens_per_second") -> float | None:
        figures = [found.get(name, {}).get(figure) for name in (one, other)]
        return figures[0] / figures[1] if all(figures) else None

    ratios = {
        "lohan_to_in_memory": ratio("lohan", "in memory"),
        "recomputed_to_checkpointed": ratio("lohan, recomputed", "in memory, checkpointed"),
        "with_ram_to_in_memory": ratio("lohan, with RAM", "in memory"),
        "lohan_to_deepspeed": ratio("lohan", "DeepSpeed"),
        "recomputed_to_deepspeed_checkpointed": ratio(
            "lohan, recomputed", "DeepSpeed, checkpointed"
        ),
        "memory_of_lohan_to_deepspeed": ratio("lohan", "DeepSpeed", "peak_rss_mib"),
        "memory_of_recomputed_to_deepspeed_checkpointed": ratio(
            "lohan, recomputed", "DeepSpeed, checkpointed", "peak_rss_mib"
        ),
    }
    for name, value in ratios.items():
        if value is not None:
            print(f"  {name.replace('_', ' '):50} {value:.3f}")
    print(
        json.dumps(
            {
                "benchmark": "train_cpu",
                "model": args.model,
                "batch": args.batch,
                "sequence": args.seq,
                "fp32_products": args.fp32_products,
                "read_mbps": args.read_mbps,
                "write_mbps": args.write_mbps,
                "ratios": ratios,
                "systems": found,
            }
        )
    )


if __name__ == "__main__":
    main()
