"""DeepSpeed ZeRO-Infinity on the work of `train_cpu.py`: parameters and optimizer states on SSD.

Started by `train_cpu.py --deepspeed PYTHON` with an interpreter that has DeepSpeed, its CPU Adam
and its asynchronous I/O built for the CPU accelerator. Prints one JSON line.
"""

import argparse
import os
import socket
import tempfile
from pathlib import Path

from cpu_workload import DECAY, LR, Meter, batch_of, config_of, first_weights
from fp32_products import compute_in_fp32

# Pieces of the optimizer's states: small ones need less memory, and are no slower on one drive.
SUB_GROUP = 20_000_000


def join_alone() -> None:
    """DeepSpeed wants a process group, also of one."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    fixed = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_SIZE": 1, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in fixed.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", DS_ACCELERATOR="cpu")


def settings_of(args, folder: str, largest: int) -> dict:
    """Its configuration, with the values found fastest on two cores and one drive."""
    on_drive = {"device": "nvme", "nvme_path": folder, "pin_memory": True}
    return {
        "train_micro_batch_size_per_gpu": args.batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": DECAY}},
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": SUB_GROUP,
            "overlap_comm": False,
            "stage3_max_live_parameters": 10**8,
            "stage3_max_reuse_distance": 0,
            # Read-ahead runs out of swap buffers and stops the run.
            "stage3_prefetch_bucket_size": 0,
            "stage3_param_persistence_threshold": 10**4,
            "reduce_bucket_size": max(5 * 10**7, largest),
            "offload_optimizer": {**on_drive, "buffer_count": 5},
            "offload_param": {
                **on_drive,
                "buffer_count": 5,
                "buffer_size": largest * 11 // 10,
                "max_in_cpu": 0,
            },
        },
        "aio": {"block_size": 1 << 20, "queue_depth": 32, "overlap_events": True},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    for name in ("batch", "seq", "steps", "warmup"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--ssd", action="append", required=True)
    parser.add_argument("--checkpointed", action="store_true")
    parser.add_argument("--partitioned", action="store_true", help="never whole in memory")
    parser.add_argument("--num-batches", type=int, default=10**9, help="different ones")
    parser.add_argument("--fp32-products", action="store_true")
    args = parser.parse_args()
    join_alone()
    if args.fp32_products:
        compute_in_fp32()
    import deepspeed
    import torch
    from transformers import LlamaForCausalLM

    config = config_of(args.model, args.seq)
    deepspeed.init_distributed(dist_backend="gloo")
    with tempfile.TemporaryDirectory(dir=args.ssd[0]) as folder:
        settings = settings_of(args, folder, config.vocab_size * config.hidden_size)
        if args.partitioned:
            with deepspeed.zero.Init(config_dict_or_path=settings, dtype=torch.bfloat16):
                model = LlamaForCausalLM(config).train()
        else:
            model = LlamaForCausalLM(config).to(torch.bfloat16).train()
        with torch.device("meta"):
            values = first_weights(LlamaForCausalLM(config), 0)
        with torch.no_grad():
            for (_, value), parameter in zip(values, model.parameters(), strict=True):
                with deepspeed.zero.GatheredParameters(
                    [parameter], modifier_rank=0, enabled=args.partitioned
                ):
                    parameter.copy_(value)
        if args.checkpointed:
            # The other kind of checkpointing trains wrongly with parameters on a drive.
            model.gradient_checkpointing_enable({"use_reentrant": True})
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=settings
        )
        count = sum(parameter.ds_numel for parameter in model.parameters())
        meter = Meter(args.warmup)
        for step in range(args.warmup + args.steps):
            if step == args.warmup:
                before = block_traffic()
            meter.begin(step)
            loss = engine(**batch_of(step % args.num_batches, args)).loss
            engine.backward(loss)
            engine.step()
            meter.end(step, loss.item())
        read, written = (now - then for now, then in zip(block_traffic(), before, strict=True))
        meter.report(
            args,
            version=deepspeed.__version__,
            read_bytes_per_parameter=read / args.steps / count,
            written_bytes_per_parameter=written / args.steps / count,
        )


def block_traffic() -> tuple[int, int]:
    """Bytes this process has read from and written to drives so far."""
    lines = Path("/proc/self/io").read_text().splitlines()
    fields = dict(line.split(": ") for line in lines)
    return int(fields["read_bytes"]), int(fields["write_bytes"])


if __name__ == "__main__":
    main()
