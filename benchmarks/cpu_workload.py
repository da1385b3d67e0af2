"""The work of `train_cpu.py`: models, batches, first weights and the meter of all systems.

Imported by the trainers, each in a process of its own; needs torch and transformers only.
"""

import json
import statistics
import time
from pathlib import Path

MODELS = {
    # hidden, intermediate, layers, heads, key-value heads, vocabulary
    "llama-20m": (256, 704, 4, 4, 4, 32000),
    "llama-134m": (768, 2048, 12, 12, 12, 32000),
    "llama-271m": (1024, 2816, 16, 16, 16, 32000),
    "llama-1100m": (2048, 5632, 22, 32, 4, 32000),
    "llama-1550m": (2304, 6144, 22, 18, 18, 32000),
}
LR, DECAY = 3e-4, 0.01


def config_of(name: str, sequence: int):
    from transformers import LlamaConfig

    hidden, inner, layers, heads, kv_heads, vocabulary = MODELS[name]
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocabulary,
        max_position_embeddings=max(2048, sequence),
        use_cache=False,
        tie_word_embeddings=False,
    )


def batch_of(step: int, args) -> dict:
    import torch

    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(0, 512, (args.batch, args.seq), generator=generator)
    return {"input_ids": tokens, "labels": tokens}


def first_weights(model, seed: int):
    """Every parameter's first value, the same for all systems, one tensor at a time."""
    import torch

    for name, parameter in model.named_parameters():
        generator = torch.Generator().manual_seed(seed * 1_000_003 + len(name) + parameter.numel())
        if parameter.dim() == 1:
            yield name, torch.ones(parameter.shape, dtype=torch.bfloat16)
        else:
            values = torch.empty(parameter.shape)
            yield name, values.normal_(0.0, 0.02, generator=generator).to(torch.bfloat16)


class Meter:
    """Step times and the peak of resident memory after warm-up."""

    def __init__(self, warmup: int) -> None:
        self.warmup, self.seconds, self.losses = warmup, [], []

    def begin(self, step: int) -> None:
        """A step begins."""
        if step == self.warmup:
            Path("/proc/self/clear_refs").write_text("5")
        self._started = time.perf_counter()

    def end(self, step: int, loss: float) -> None:
        """A step has ended."""
        if step >= self.warmup:
            self.seconds.append(time.perf_counter() - self._started)
        self.losses.append(loss)

    def report(self, args, **more) -> None:
        """Print one JSON line for the parent process."""
        status = Path("/proc/self/status").read_text()
        peak = next(line for line in status.splitlines() if line.startswith("VmHWM"))
        print(
            json.dumps(
                {
                    "tokens_per_second": args.batch * args.seq / statistics.median(self.seconds),
                    "step_seconds": statistics.median(self.seconds),
                    "peak_rss_mib": int(peak.split()[1]) / 1024,
                    "last_loss": self.losses[-1],
                    **more,
                }
            )
        )


def plain_steps(args, model, parameters) -> Meter:
    """The plain loop: bf16 gradients, fp32 masters, torch's AdamW."""
    import torch

    masters = [parameter.detach().float().clone() for parameter in parameters]
    optimizer = torch.optim.AdamW(masters, lr=LR, weight_decay=DECAY, fused=True)
    meter = Meter(args.warmup)
    for step in range(args.warmup + args.steps):
        meter.begin(step)
        loss = model(**batch_of(step, args)).loss
        loss.backward()
        for master, parameter in zip(masters, parameters, strict=True):
            master.grad = parameter.grad.float()
        optimizer.step()
        for master, parameter in zip(masters, parameters, strict=True):
            parameter.data.copy_(master)
            master.grad = parameter.grad = None
        meter.end(step, loss.item())
    return meter
