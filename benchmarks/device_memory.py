"""Device memory of a step against the plan's, on the emulated device, line by line if asked.

    python benchmarks/device_memory.py [--only llama] [--lines]

Models of a few layers with the proportions of large ones train for three steps within a budget; the
peak of the third is what the emulated device counted, tensors of compute included. "planned" is
what the plan sets aside: the most of each line, which need not be at the same moment (the head has
the largest working set, and no gradient of another block beside its own), so that it is an upper
bound. The last line is one JSON object.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from lohan.device.emulated import EmulatedDevice
from lohan.engine.attach import attach_engine
from lohan.engine.options import Options
from lohan.optimizer.torch_optimizer import AdamW
from lohan.units import MIB, format_bytes
from lohan.vocabulary import Tier
from support.small_machines import small_machine

VOCABULARY = 2048
SIZES = {"num_hidden_layers": 4, "vocab_size": VOCABULARY, "hidden_size": 256}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 704}


def llama(**more: Any) -> torch.nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **HEADS, **more))


def qwen3(**more: Any) -> torch.nn.Module:
    config = transformers.Qwen3Config(**SIZES, **HEADS, head_dim=64, **more)
    return transformers.Qwen3ForCausalLM(config)


def gpt2() -> torch.nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=256, n_layer=4, n_head=4, n_positions=512
    )
    return transformers.GPT2LMHeadModel(config)


MODELS: dict[str, Callable[[], torch.nn.Module]] = {
    "llama": llama,
    "llama, tied": lambda: llama(tie_word_embeddings=True),
    "qwen3": qwen3,
    "gpt2": gpt2,
}
BATCHES = {(1, 2, 128): (20, 48), (4, 2, 128): (20, 48), (1, 8, 256): (96, 160)}
"""Micro-batches, rows of one, tokens of a row; budgets in MiB, with little room and with much."""


def measure(
    name: str, shape: tuple[int, int, int], gpu_bytes: int, place: str
) -> tuple[dict[str, Any], list[tuple[str, int]]]:
    """Planned and measured peak of a step, and the plan's lines."""
    num_micro_batches, num_rows, num_tokens = shape
    torch.manual_seed(0)
    model = MODELS[name]().to(torch.bfloat16).train()
    tokens = torch.randint(0, VOCABULARY, (num_rows, num_tokens))
    batches = [{"input_ids": tokens, "labels": tokens}] * num_micro_batches
    with EmulatedDevice(memory_bytes=gpu_bytes) as device:
        engine = attach_engine(
            model,
            AdamW(model.parameters(), lr=1e-4, max_grad_norm=1.0),
            Options(
                ssd=[place],
                ram_bytes=256 * MIB,
                gpu_bytes=gpu_bytes,
                machine=small_machine(1),
                device=device,
                largest_step=batches,
            ),
        )
        with engine:
            for _ in range(2):
                engine.step(batches)
            engine.synchronize()
            device.reset_peak()
            engine.step(batches)
            assert engine.plan is not None
            ledger, peak_bytes = engine.plan.ledger, device.peak_bytes
            engine.close(should_delete=True)
    planned_bytes = ledger.total(Tier.GPU)
    found = {
        "model": name,
        "micro_batches": num_micro_batches,
        "rows": num_rows,
        "tokens": num_tokens,
        "budget_bytes": gpu_bytes,
        "planned_bytes": planned_bytes,
        "measured_bytes": peak_bytes,
        "measured_over_planned": round(peak_bytes / planned_bytes, 3),
    }
    return found, [(line.purpose, line.nbytes) for line in ledger.lines_of(Tier.GPU)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="of the models")
    parser.add_argument("--lines", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    print(f"{'model':12} {'batch':>9} {'budget':>9} {'planned':>10} {'measured':>10} {'ratio':>6}")
    for name in MODELS:
        for shape, budgets in BATCHES.items() if asked.only in (None, name) else ():
            for budget in budgets:
                with tempfile.TemporaryDirectory() as place:
                    row, lines = measure(name, shape, budget * MIB, place)
                rows.append(row)
                print(
                    f"{name:12} {'x'.join(map(str, shape)):>9} {budget:>5} MiB "
                    f"{format_bytes(row['planned_bytes']):>10} "
                    f"{format_bytes(row['measured_bytes']):>10} "
                    f"{row['measured_over_planned']:6.3f}",
                    flush=True,
                )
                for purpose, nbytes in lines if asked.lines else ():
                    print(f"    {format_bytes(nbytes):>10} {purpose}")
    ratios = [row["measured_over_planned"] for row in rows]
    print(json.dumps({"least": min(ratios), "most": max(ratios), "rows": rows}))


if __name__ == "__main__":
    main()
