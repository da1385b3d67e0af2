"""A training loop of your own on lohan: steps, a learning-rate schedule, seals, and resuming.

    python examples/training_loop.py SSD_DIRECTORY            # prints the id of its run
    python examples/training_loop.py SSD_DIRECTORY --run ID   # goes on from its last seal

Stop it in any way, Ctrl-C or kill -9: what was sealed is whole, and a run that goes on from there
has the same losses, bit for bit, as one that was never stopped.
"""

import argparse
from typing import Any

import torch
import transformers

import lohan

TOTAL_STEPS = 12
SEAL_STEPS = 2
MICRO_BATCHES = 2


def make_model() -> torch.nn.Module:
    """A tiny Llama with random weights; any transformers model will do.

    For one that does not fit in memory see lohan.train.weights.source.open_source: it builds the
    model without weights and streams them from its files, for attach(..., weights=...).
    """
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return transformers.LlamaForCausalLM(config).to(torch.bfloat16)


def make_batch(number: int) -> dict[str, torch.Tensor]:
    """Rows to learn: counting upwards from a random byte."""
    generator = torch.Generator().manual_seed(number)
    first = torch.randint(0, 256, (4, 1), generator=generator)
    tokens = (first + torch.arange(32)) % 256
    return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    """Train until the last step, from the beginning or from a seal."""
    parser = argparse.ArgumentParser()
    parser.add_argument("ssd", nargs="+", help="One directory per SSD.")
    parser.add_argument("--run", help="Id of a run to go on with.")
    parser.add_argument("--until", type=int, default=TOTAL_STEPS, help="Stop after this step.")
    parser.add_argument("--ram", default="16MiB", help="All that lohan may hold in main memory.")
    parser.add_argument("--device", help="cuda or cpu. Default: a GPU if there is one.")
    words = parser.parse_args()

    model = make_model()
    # Groups, as for any optimizer: no weight decay for the scales of norms.
    optimizer = lohan.AdamW(
        [
            {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0},
        ],
        lr=3e-3,
        max_grad_norm=1.0,
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=TOTAL_STEPS)

    # From here on the weights are lohan's: on SSD, and on the device while they compute. A run that
    # is taken up again starts from its seal, whatever values the model has.
    with lohan.attach(
        model, optimizer, ssd=words.ssd, ram=words.ram, device=words.device, run=words.run
    ) as engine:
        print("run", engine.run_id)
        if words.run is not None:
            go_on_from(engine.sealed.metadata, optimizer, schedule)
        while engine.num_steps < words.until:
            # All micro-batches of a step at once, in place of forward, backward and step: lohan
            # takes each block's weights in once for all of them. Which rows come is told by the
            # number of steps, so going on needs no further state of the data.
            first = engine.num_steps * MICRO_BATCHES
            result = engine.step([make_batch(first + n) for n in range(MICRO_BATCHES)])
            schedule.step()
            print(
                f"step {result.step}: loss {result.loss!r}, gradient norm {result.grad_norm:.3f}, "
                f"next lr {schedule.get_last_lr()[0]:.2e}"
            )
            if result.step % SEAL_STEPS == 0:
                # Costs next to nothing: the states are on SSD already, nothing is copied.
                # What else going on needs is sealed with them, as plain JSON.
                engine.seal({"schedule": schedule.state_dict()})
        print("loss on other rows:", engine.evaluate([make_batch(10_000)])[0])
        # The trained weights, one at a time, as fp32 masters.
        count = sum(tensor.numel() for _, tensor in engine.weights())
        print(f"{count:,} parameters trained")


def go_on_from(
    sealed: Any, optimizer: lohan.AdamW, schedule: torch.optim.lr_scheduler.LRScheduler
) -> None:
    """Set the schedule to where it was, and with it the rates the next step reads."""
    schedule.load_state_dict(sealed["schedule"])
    for group, lr in zip(optimizer.param_groups, schedule.get_last_lr(), strict=True):
        group["lr"] = lr


if __name__ == "__main__":
    main()
