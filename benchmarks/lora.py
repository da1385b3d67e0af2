"""LoRA on a base that is several times as large as the RAM that is allowed, next to memory.

    python benchmarks/lora.py --ssd DIR [--layers 64] [--times 5] [--rank 16] [--seq 16]

Runs, each in a process of its own, on the same batches from the same weights:
  in memory   PEFT on bf16 weights in RAM, fp32 masters of the adapter, torch's fused AdamW
  lohan       the base on SSD, with RAM for 1/--times of it; the processor computes

Prints tokens/s (median step), peak RSS after warm-up, and the bytes read and written per step, each
next to what the plan says; the last line is one JSON object.
"""

import argparse
import json
import subprocess
import sys
import tempfile

from cpu_workload import DECAY, LR, Meter, batch_of, first_weights, plain_steps

import lohan  # here, for what it leaves out must reach the other system's process too

HIDDEN, INNER, VOCABULARY = 768, 2048, 2048


def adapted(args, *, is_meta: bool):
    """The model, its adapter in the type of its base; without values if asked."""
    import peft
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=args.layers,
        num_attention_heads=12,
        vocab_size=VOCABULARY,
        use_cache=False,
        tie_word_embeddings=False,
    )
    settings = peft.LoraConfig(r=args.rank, lora_alpha=32, target_modules="all-linear")
    with torch.device("meta" if is_meta else "cpu"):
        base = LlamaForCausalLM(config).to(torch.bfloat16)
    # Rotary frequencies are a buffer in fp32: computed, not loaded.
    with torch.device("cpu"):
        base.model.rotary_emb = type(base.model.rotary_emb)(config)
    return peft.get_peft_model(
        base, settings, autocast_adapter_dtype=False, low_cpu_mem_usage=is_meta
    ).train()


def counts(model) -> tuple[int, int]:
    """Parameters that are frozen, and that are trained."""
    trained = sum(one.numel() for one in model.parameters() if one.requires_grad)
    return sum(one.numel() for one in model.parameters()) - trained, trained


def train_in_memory(args) -> None:
    import torch

    model = adapted(args, is_meta=False)
    weights = dict(first_weights(model, 0))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights.pop(name))
    parameters = [one for one in model.parameters() if one.requires_grad]
    meter = plain_steps(args, model, parameters)
    meter.report(args, first_loss=meter.losses[0])


def train_with_lohan(args) -> None:
    from lohan.plan import make_plan

    def planned_once(machine, shape, workload):
        """The project's plan; one given as a function stays, so that bytes are of one plan."""
        return make_plan("lohan+", machine, shape, workload)

    model = adapted(args, is_meta=True)
    num_frozen, num_trained = counts(model)
    ram_bytes = 2 * num_frozen // args.times
    parameters = [one for one in model.parameters() if one.requires_grad]
    optimizer = lohan.AdamW(parameters, lr=LR, weight_decay=DECAY, max_grad_norm=None)
    with lohan.attach(
        model,
        optimizer,
        ssd=args.ssd,
        ram=f"{ram_bytes}B",
        device="cpu",
        policy=planned_once,
        weights=first_weights(model, 0),
        largest_step=[batch_of(0, args)],
    ) as engine:
        first_bytes = engine.written_bytes - engine.measuring_bytes
        meter = Meter(args.warmup)
        for step in range(args.warmup + args.steps):
            if step == args.warmup:
                engine.synchronize()
                before = engine.traffic
            meter.begin(step)
            meter.end(step, engine.step([batch_of(step, args)]).loss)
        engine.synchronize()
        after, prediction = engine.traffic, engine.prediction
        assert prediction is not None
        meter.report(
            args,
            first_loss=meter.losses[0],
            num_frozen=num_frozen,
            num_trained=num_trained,
            ram_bytes=ram_bytes,
            held_bytes=engine.ram_peak_bytes,
            written_at_first_bytes=first_bytes,
            read_bytes_per_step=(after.read_bytes - before.read_bytes) / args.steps,
            written_bytes_per_step=(after.written_bytes - before.written_bytes) / args.steps,
            planned_read_bytes=prediction.read_bytes,
            planned_written_bytes=prediction.written_bytes,
        )
        engine.close(should_delete=True)


def run_one(args, system: str) -> dict:
    """One system in a process of its own."""
    command = [sys.executable, __file__, "--system", system]
    for name in ("layers", "times", "rank", "batch", "seq", "steps", "warmup"):
        command += [f"--{name}", str(getattr(args, name))]
    for directory in args.ssd:
        command += ["--ssd", directory]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"{system} ended with exit code {done.returncode}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ssd", action="append", default=[], help="SSD directory; repeat for more")
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--times", type=int, default=5, help="base against allowed RAM")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seq", type=int, default=16)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--system", choices=("in memory", "lohan"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.system is not None:
        train_with_lohan(args) if args.system == "lohan" else train_in_memory(args)
        return
    with tempfile.TemporaryDirectory() as scratch:
        args.ssd = args.ssd or [scratch]
        found = {system: run_one(args, system) for system in ("in memory", "lohan")}
    ours, theirs = found["lohan"], found["in memory"]
    print(
        f"base {2 * ours['num_frozen'] / 1e6:.0f} MB in 16 bits, RAM allowed "
        f"{ours['ram_bytes'] / 1e6:.0f} MB, held at most {ours['held_bytes'] / 1e6:.0f} MB; "
        f"{ours['num_trained']:,} parameters trained"
    )
    for system, one in found.items():
        print(
            f"{system:10} {one['tokens_per_second']:8.1f} tokens/s, peak RSS "
            f"{one['peak_rss_mib']:.0f} MiB, first loss {one['first_loss']:.6f}"
        )
    for way in ("read", "written"):
        print(
            f"{way:8} {ours[f'{way}_bytes_per_step'] / 1e6:8.1f} MB per step, planned "
            f"{ours[f'planned_{way}_bytes'] / 1e6:.1f} MB"
        )
    is_equal = ours["first_loss"] == theirs["first_loss"]
    share = ours["tokens_per_second"] / theirs["tokens_per_second"]
    print(json.dumps({"share_of_memory": share, "is_first_loss_equal": is_equal, **found}))


if __name__ == "__main__":
    main()
