"""A model several times larger than the memory it may use, under a hard limit, next to DeepSpeed.

    python benchmarks/larger_than_memory.py --ssd DIR [--model llama-1550m] [--steps 10]
        [--deepspeed PYTHON --deepspeed-limit 6GiB --deepspeed-limit 8GiB ...]

Each system runs in a process under a memory limit of the kernel (cgroup v1, root): what goes above
is killed. lohan gets a fifth of its own states (12 bytes a parameter) for everything, Python and
its libraries included. It runs undisturbed first; then again, killed by SIGKILL a step after its
seal and resumed: the losses must be the same to the last bit. DeepSpeed (ZeRO-Infinity, parameters
and states on the same drive, activations checkpointed) gets the given limits from the smallest on,
until it survives one. Prints tokens/s (median step after warm-up), peaks as the kernel counts them,
bytes per parameter and step; the last line is one JSON object. Exit code 1 if lohan did not
survive, its loss did not fall, or the resumed losses differ.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cpu_workload import DECAY, LR, MODELS, batch_of, config_of, first_weights

import lohan
from lohan.units import GIB, format_bytes, parse_bytes

PROCESS_BYTES = 3 * GIB // 4
"""Left to Python, torch, transformers and the work space of products, beside lohan's budget."""
STATE_BYTES = 12
WARM_UP = 2
NUM_BATCHES = 2
"""Different ones, each met again and again: so few tokens teach nothing about others."""


def train(args) -> None:
    """The process under the limit: a line of JSON for the run, then one for each step."""
    import torch
    from transformers import LlamaForCausalLM

    config = config_of(args.model, args.seq)
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16).train()
    # Rotary frequencies are a buffer: computed, not loaded.
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    optimizer = lohan.AdamW(model.parameters(), lr=LR, weight_decay=DECAY, max_grad_norm=1.0)
    with lohan.attach(
        model,
        optimizer,
        ssd=args.ssd,
        ram=parse_bytes(args.limit) - PROCESS_BYTES,
        device="cpu",
        weights=None if args.run else first_weights(model, 0),
        run=args.run,
    ) as engine:
        print(json.dumps({"run": engine.run_id}), flush=True)
        while engine.num_steps < args.steps:
            result = engine.step([batch_of(engine.num_steps % NUM_BATCHES, args)])
            if result.step == args.steps // 2:
                engine.seal({})
            step = {
                "step": result.step,
                "loss": result.loss,
                "seconds": result.seconds,
                "read_bytes": result.read_bytes,
                "written_bytes": result.written_bytes,
            }
            print(json.dumps(step), flush=True)
        engine.close(should_delete=True)


@contextmanager
def limited(limit_bytes: int) -> Iterator[Path]:
    """A group of processes that the kernel keeps below a limit."""
    group = Path(f"/sys/fs/cgroup/memory/lohan-benchmark.{os.getpid()}")
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(limit_bytes))
    except OSError as error:
        sys.exit(f"memory cannot be limited ({error}): this needs root and cgroup v1")
    try:
        yield group
    finally:
        group.rmdir()


def lines_under(limit_bytes: int, command: list[str], *, kill_at: int = 0, **settings) -> dict:
    """What a command prints under a limit, line by line; killed when it has told step `kill_at`."""
    found = []
    with limited(limit_bytes) as group:
        joined = ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh", *command]
        with subprocess.Popen(joined, stdout=subprocess.PIPE, text=True, **settings) as child:
            for line in child.stdout:
                if line.startswith("{"):
                    found.append(json.loads(line))
                    if kill_at and found[-1].get("step") == kill_at:
                        child.send_signal(signal.SIGKILL)
        peak = int((group / "memory.max_usage_in_bytes").read_text())
    return {
        "exit": child.returncode,
        "lines": found,
        "peak_bytes": peak,
        "limit_bytes": limit_bytes,
    }


def run_lohan(args, *, run: str | None = None, kill_at: int = 0) -> dict:
    command = [sys.executable, __file__, "--child", "--limit", args.limit]
    for name in ("model", "batch", "seq", "steps"):
        command += [f"--{name}", str(getattr(args, name))]
    for directory in args.ssd:
        command += ["--ssd", directory]
    command += ["--run", run] if run else []
    found = lines_under(parse_bytes(args.limit), command, kill_at=kill_at)
    lines = found.pop("lines")
    found["run"] = lines[0]["run"] if lines else None
    found["steps"] = lines[1:]
    return found


def run_deepspeed(args, limit: str) -> dict:
    command = [args.deepspeed, str(Path(__file__).with_name("deepspeed_cpu.py"))]
    command += ["--checkpointed", "--partitioned", "--warmup", str(WARM_UP)]
    command += ["--num-batches", str(NUM_BATCHES)]
    command += ["--steps", str(args.steps - WARM_UP), "--ssd", args.ssd[0]]
    for name in ("model", "batch", "seq"):
        command += [f"--{name}", str(getattr(args, name))]
    # Its extension for asynchronous I/O is built without naming the library it needs.
    environment = {**os.environ, "LD_PRELOAD": "libaio.so.1"}
    found = lines_under(parse_bytes(limit), command, env=environment)
    lines = found.pop("lines")
    return found | (lines[-1] if lines and found["exit"] == 0 else {})


def num_parameters(model: str) -> int:
    import torch
    from transformers import LlamaForCausalLM

    with torch.device("meta"):
        return sum(p.numel() for p in LlamaForCausalLM(config_of(model, 16)).parameters())


def figures_of(found: dict, args, count: int) -> dict:
    """Of an undisturbed run."""
    timed = found["steps"][WARM_UP:]
    seconds = statistics.median(one["seconds"] for one in timed)
    return {
        "tokens_per_second": args.batch * args.seq / seconds,
        "step_seconds": seconds,
        "first_loss": found["steps"][0]["loss"],
        "last_loss": found["steps"][-1]["loss"],
        **{
            f"{way}_bytes_per_parameter": statistics.mean(one[f"{way}_bytes"] for one in timed)
            / count
            for way in ("read", "written")
        },
        "limit_bytes": found["limit_bytes"],
        "peak_bytes": found["peak_bytes"],
    }


def describe(name: str, one: dict) -> str:
    return (
        f"{name:10} {one['tokens_per_second']:7.2f} tokens/s ({one['step_seconds']:.1f} s a step), "
        f"limit {format_bytes(one['limit_bytes'])}, peak {format_bytes(one['peak_bytes'])}, "
        f"{one['read_bytes_per_parameter']:.1f} B read and "
        f"{one['written_bytes_per_parameter']:.1f} B written per parameter"
    )


def compare(args) -> int:
    count = num_parameters(args.model)
    args.limit = args.limit or str(count * STATE_BYTES // 5)
    print(
        f"{args.model}: {count / 1e9:.2f} B parameters, {format_bytes(count * STATE_BYTES)} of "
        f"states, limit {format_bytes(parse_bytes(args.limit))}, {args.batch} x {args.seq} tokens",
        flush=True,
    )
    whole = run_lohan(args)
    if whole["exit"] or len(whole["steps"]) < args.steps:
        print(f"lohan ended with exit code {whole['exit']} after {len(whole['steps'])} steps")
        return 1
    found = {"lohan": figures_of(whole, args, count)}
    print(describe("lohan", found["lohan"]), flush=True)
    losses = [one["loss"] for one in whole["steps"]]
    print(f"losses: {', '.join(f'{loss:.4f}' for loss in losses)}", flush=True)
    sealed = args.steps // 2
    killed = run_lohan(args, kill_at=sealed + 1)
    resumed = run_lohan(args, run=killed["run"])
    again = [one["loss"] for one in resumed["steps"]]
    is_same = again == losses[sealed:]
    print(
        f"killed after step {sealed + 1} (exit {killed['exit']}), resumed from the seal of step "
        f"{sealed}: losses {'the same' if is_same else f'DIFFER: {again}'}",
        flush=True,
    )
    ratios = {}
    for limit in args.deepspeed_limit if args.deepspeed else ():
        one = run_deepspeed(args, limit)
        if "tokens_per_second" not in one:
            print(f"DeepSpeed under {limit}: exit code {one['exit']}", flush=True)
            continue
        found["deepspeed"] = one
        print(describe("DeepSpeed", one), flush=True)
        ratios = {
            "speed": found["lohan"]["tokens_per_second"] / one["tokens_per_second"],
            "peak": found["lohan"]["peak_bytes"] / one["peak_bytes"],
        }
        print(
            f"lohan over DeepSpeed: {ratios['speed']:.2f}x tokens/s, "
            f"{ratios['peak']:.2f} of its peak"
        )
        break
    print(
        json.dumps(
            {
                "benchmark": "larger_than_memory",
                "model": args.model,
                "parameters": count,
                "batch": args.batch,
                "sequence": args.seq,
                "systems": found,
                "ratios": ratios,
                "losses": losses,
                "resumed_equal": is_same,
            }
        )
    )
    return 0 if is_same and losses[-1] < losses[0] else 1


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ssd", action="append", required=True, help="repeat for more drives")
    parser.add_argument("--model", choices=MODELS, default="llama-1550m")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seq", type=int, default=32)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--limit", help="of lohan's process; left out: a fifth of its states")
    parser.add_argument("--deepspeed", help="an interpreter that has DeepSpeed for the CPU")
    parser.add_argument("--deepspeed-limit", action="append", default=[], help="smallest first")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--run", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        train(args)
        return 0
    return compare(args)


if __name__ == "__main__":
    sys.exit(main())
