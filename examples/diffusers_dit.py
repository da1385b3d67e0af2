"""Fine-tune a diffusion transformer of diffusers with a loss of your own, all states on SSD.

    python examples/diffusers_dit.py SSD_DIRECTORY

The model here is tiny and starts from random values, so that this runs in seconds on a processor.
For a real one, load it (DiTTransformer2DModel.from_pretrained) and raise the sizes; nothing else
changes. lohan needs no class of its own around the model: it finds the blocks, moves their weights
in and out while they compute, and updates them on the CPU meanwhile.

What one that does not fit would cost, simulated (`scripts/refresh_documents` writes these lines):

    $ lohan plan dit-10b --machine desktop-4090 --batch 64
    one step of 64 x 1024 tokens: 43.8 s
    limit: SSD writes (86% of the step)
    50M tokens: 9.3 hours, 48.9 TB written to SSD, 4.1% of the drives' rated life
    memory: 21.6 GiB of the GPU, 57.1 GiB of RAM, 103.6 GiB on SSD
"""

import argparse

import torch
from diffusers import DDPMScheduler, DiTTransformer2DModel

import lohan

NUM_CLASSES = 10


def make_model() -> DiTTransformer2DModel:
    """A DiT small enough to watch. bf16 parameters: lohan keeps fp32 masters for them on SSD."""
    torch.manual_seed(0)
    return DiTTransformer2DModel(
        num_attention_heads=4,
        attention_head_dim=16,
        num_layers=6,
        in_channels=4,
        out_channels=8,  # the noise, and a variance that this loss leaves alone
        sample_size=8,
        num_embeds_ada_norm=NUM_CLASSES,
    ).to(torch.bfloat16)


def make_batch(seed: int, noises: DDPMScheduler) -> dict[str, torch.Tensor]:
    """Latents of eight pictures with noise in them, as an encoder and a data loader would give.

    A micro-batch is any dictionary of tensors. Random numbers are drawn here and not in the loss,
    so that a batch means the same whenever it is looked at.
    """
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, NUM_CLASSES, (8,), generator=generator)
    pictures = labels.view(-1, 1, 1, 1) / NUM_CLASSES + torch.zeros(8, 4, 8, 8)
    noise = torch.randn(pictures.shape, generator=generator)
    times = torch.randint(0, noises.config.num_train_timesteps, (8,), generator=generator)
    return {
        "noisy": noises.add_noise(pictures, noise, times).to(torch.bfloat16),
        "times": times,
        "labels": labels,
        "noise": noise,
    }


def noise_loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The loss: how far the predicted noise is from the noise that was added.

    lohan calls this with the model and a micro-batch, and follows its gradient. Anything may happen
    here as long as it ends in one number.
    """
    predicted = model(batch["noisy"], timestep=batch["times"], class_labels=batch["labels"]).sample
    noise = batch["noise"]
    return torch.nn.functional.mse_loss(predicted[:, : noise.shape[1]].float(), noise)


def main() -> None:
    """Train, and print the loss on pictures the model was not trained on."""
    parser = argparse.ArgumentParser()
    parser.add_argument("ssd", nargs="+", help="One directory per SSD.")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--ram", default="16MiB", help="All that lohan may hold in main memory.")
    parser.add_argument("--device", help="cuda or cpu. Default: a GPU if there is one.")
    words = parser.parse_args()

    noises = DDPMScheduler()
    model = make_model()
    optimizer = lohan.AdamW(model.parameters(), lr=2e-3)
    engine = lohan.attach(
        model,
        optimizer,
        ssd=words.ssd,
        ram=words.ram,
        device=words.device,
        # What a micro-batch looks like and how its loss is computed: lohan traces one forward pass
        # with it, without computing anything, to find out what every block needs.
        example=make_batch(0, noises),
        loss_fn=noise_loss,
        progress=print,
    )
    unseen = [make_batch(10_000 + seed, noises) for seed in range(4)]
    try:
        model.eval()  # labels are left out at random in training, not here
        print("loss before:", average(engine.evaluate(unseen)))
        model.train()
        for step in range(words.steps):
            # Two micro-batches, one optimizer step. Weights are read once for both.
            batches = [make_batch(2 * step + number, noises) for number in range(2)]
            result = engine.step(batches)
            print(
                f"step {result.step}: loss {result.loss:.4f}, {result.seconds:.2f} s, "
                f"{result.read_bytes / 2**20:.1f} MiB read from SSD and "
                f"{result.written_bytes / 2**20:.1f} MiB written, waited for {result.bottleneck}"
            )
        model.eval()
        print("loss after:", average(engine.evaluate(unseen)))
    finally:
        # This was a try-out, so its states are removed. Leave should_delete out to keep them; the
        # run can then be taken up again, see training_loop.py.
        engine.close(should_delete=True)


def average(losses: list[float]) -> float:
    """Mean of some losses."""
    return round(sum(losses) / len(losses), 4)


if __name__ == "__main__":
    main()
