"""Fine-tune a diffusion transformer of diffusers end to end, all states on SSD, and look at it.

    python examples/diffusion.py SSD_DIRECTORY --out OUT                 # an SD3-shaped model
    python examples/diffusion.py SSD_DIRECTORY --out OUT --model flux    # or dit
    python examples/diffusion.py SSD_DIRECTORY --out OUT --pretrained DIR --latents FILE

The model here is tiny and starts from random values, and its pictures are drawn: coloured shapes,
each with a caption. So it runs in minutes on a processor, and what it has learned can be seen:
OUT/before.png, after.png and averaged.png (after 400 steps, three minutes on two cores: colours and
places, shapes still blurred). A real one is given by --pretrained (the folder of a
diffusers transformer) and --latents (a safetensors file with `latents` and `text`, as its own
autoencoder and text encoder make them; see `drawn_data` for the shapes); nothing else changes.

What one that does not fit would cost, simulated (`scripts/refresh_documents` writes these lines):

    $ lohan plan flux-12b --machine desktop-4090 --batch 64
    one step of 64 x 4096 tokens: 3m 34s
    limit: waiting of GPU compute (61%) and SSD writes (60%) for each other
    50M tokens: 11.4 hours, 41.6 TB written to SSD, 3.5% of the drives' rated life
    memory: 21.1 GiB of the GPU, 57.5 GiB of RAM, 312.8 GiB on SSD
"""

import argparse
import itertools
import math
import pathlib
import time
from typing import Any

import diffusers
import numpy as np
import torch
from PIL import Image, ImageDraw
from safetensors.torch import load_file, save_file

import lohan

COLOURS = {"red": (230, 60, 50), "green": (70, 200, 90), "blue": (70, 110, 240)}
SHAPES = ("circle", "square", "triangle")
CAPTIONS = [f"a {colour} {shape}" for colour in COLOURS for shape in SHAPES]
SIDE = 32  # of a picture, in pixels
PATCH = 4  # of a picture, as one token: 8 x 8 tokens of 48 numbers
TEXT_WIDTH, TEXT_TOKENS = 64, 3
WIDTH, LAYERS = 128, 6
BATCH, MICRO_BATCHES = 16, 2


# The data ------------------------------------------------------------------------------------


def drawn_data(folder: pathlib.Path) -> pathlib.Path:
    """Draw the pictures and keep what a model is given of them: latents and text embeddings.

    They are made once and read from then on. Nobody has an autoencoder for pictures of 32 pixels:
    here a latent is the picture itself, between -1 and 1, and a word has a vector of its own. With
    `AutoencoderKL` and a text encoder this is the place for them, and they are not needed later.
    """
    file = folder / "latents.safetensors"
    if not file.exists():
        numbers = np.random.default_rng(0)
        pictures = [draw(caption, numbers) for caption in CAPTIONS for _ in range(24)]
        latents = torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2) / 127.5 - 1
        text = torch.stack([embed(caption) for caption in CAPTIONS for _ in range(24)])
        save_file({"latents": latents.contiguous(), "text": text}, file)
    return file


def draw(caption: str, numbers: np.random.Generator) -> np.ndarray:
    """One picture: a shape of about half its width, somewhere."""
    _, colour, shape = caption.split()
    picture = Image.new("RGB", (SIDE, SIDE), (20, 20, 30))
    size = int(numbers.integers(14, 20))
    left, top = (int(numbers.integers(2, SIDE - size - 2)) for _ in range(2))
    box = (left, top, left + size, top + size)
    pen = ImageDraw.Draw(picture)
    if shape == "circle":
        pen.ellipse(box, fill=COLOURS[colour])
    elif shape == "square":
        pen.rectangle(box, fill=COLOURS[colour])
    else:
        pen.polygon([(left, box[3]), (box[2], box[3]), (left + size // 2, top)], COLOURS[colour])
    return np.asarray(picture)


def embed(caption: str) -> torch.Tensor:
    """A vector for each word."""
    words = [*COLOURS, *SHAPES, "a"]
    table = torch.randn(len(words), TEXT_WIDTH, generator=torch.Generator().manual_seed(1))
    return torch.stack([table[words.index(word)] for word in caption.split()])


def make_batch(data: dict[str, torch.Tensor], seed: int, size: int = BATCH) -> dict[str, Any]:
    """A micro-batch of a rectified flow: somewhere between a picture and noise.

    All random numbers are drawn here and not in the loss, so that a batch means the same whenever
    it is looked at.
    """
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randint(0, len(data["latents"]), (size,), generator=generator)
    clean = data["latents"][chosen]
    noise = torch.randn(clean.shape, generator=generator)
    # Times in the middle are met more often.
    times = torch.sigmoid(torch.randn(size, generator=generator))
    between = times.view(-1, 1, 1, 1)
    return {
        "noisy": ((1 - between) * clean + between * noise).to(torch.bfloat16),
        "times": times,
        "text": data["text"][chosen].to(torch.bfloat16),
        "velocity": noise - clean,
    }


# The models ----------------------------------------------------------------------------------


def make_model(kind: str, pretrained: str | None) -> torch.nn.Module:
    """A denoiser in bf16: lohan keeps fp32 masters for it on SSD."""
    classes = {
        "sd3": diffusers.SD3Transformer2DModel,
        "flux": diffusers.FluxTransformer2DModel,
        "dit": diffusers.DiTTransformer2DModel,
    }
    if pretrained is not None:
        return classes[kind].from_pretrained(pretrained, torch_dtype=torch.bfloat16)
    heads = {"num_attention_heads": WIDTH // 32, "attention_head_dim": 32, "num_layers": LAYERS}
    sizes: dict[str, dict[str, Any]] = {
        "sd3": {
            "sample_size": SIDE,
            "patch_size": PATCH,
            "in_channels": 3,
            "out_channels": 3,
            "joint_attention_dim": TEXT_WIDTH,
            "caption_projection_dim": WIDTH,
            "pooled_projection_dim": TEXT_WIDTH,
            "pos_embed_max_size": SIDE // PATCH,
        },
        "flux": {
            "in_channels": 3 * PATCH**2,
            "num_single_layers": LAYERS,
            "joint_attention_dim": TEXT_WIDTH,
            "pooled_projection_dim": TEXT_WIDTH,
            "axes_dims_rope": (8, 12, 12),
        },
        "dit": {
            "sample_size": SIDE,
            "patch_size": PATCH,
            "in_channels": 3,
            "out_channels": 3,
            "num_embeds_ada_norm": len(CAPTIONS),
        },
    }
    torch.manual_seed(0)
    model: torch.nn.Module = classes[kind](**heads, **sizes[kind])
    return torch.nn.Module.to(model, torch.bfloat16)


def predict(model: torch.nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    """The velocity a model sees, for whichever of the three it is."""
    noisy, times, text = batch["noisy"], batch["times"], batch["text"]
    if isinstance(model, diffusers.SD3Transformer2DModel):
        return model(
            noisy,
            encoder_hidden_states=text,
            pooled_projections=text.mean(1),
            timestep=1000 * times,
            return_dict=False,
        )[0]
    if isinstance(model, diffusers.FluxTransformer2DModel):
        side = noisy.shape[-1] // PATCH
        tokens = torch.nn.functional.pixel_unshuffle(noisy, PATCH).flatten(2).transpose(1, 2)
        along = torch.arange(float(side))
        places = torch.cartesian_prod(torch.zeros(1), along, along)
        seen = model(
            tokens,
            encoder_hidden_states=text,
            pooled_projections=text.mean(1),
            timestep=times,
            img_ids=places.to(noisy),
            txt_ids=torch.zeros(text.shape[1], 3).to(noisy),
            return_dict=False,
        )[0]
        channels = seen.transpose(1, 2).unflatten(2, (side, side))
        return torch.nn.functional.pixel_shuffle(channels, PATCH)
    # A DiT knows classes instead of words: the caption whose vectors these are.
    known = torch.stack([embed(caption) for caption in CAPTIONS]).to(text)
    labels = (text[:, None] - known).abs().sum((2, 3)).argmin(1)
    return model(noisy, timestep=1000 * times, class_labels=labels, return_dict=False)[0]


def flow_loss(model: torch.nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    """How far the predicted velocity is from the way from picture to noise."""
    return torch.nn.functional.mse_loss(predict(model, batch).float(), batch["velocity"])


# Looking at it -------------------------------------------------------------------------------


def sample(see: Any, file: pathlib.Path, num_steps: int = 24) -> None:
    """Walk from noise to pictures, three of each caption, and keep them as one picture."""
    generator = torch.Generator().manual_seed(5)
    text = torch.stack([embed(caption) for caption in CAPTIONS for _ in range(3)])
    now = torch.randn(len(text), 3, SIDE, SIDE, generator=generator)
    times = torch.linspace(1, 0, num_steps + 1)
    for time_now, time_next in itertools.pairwise(times):
        batch = {
            "noisy": now.to(torch.bfloat16),
            "times": time_now.expand(len(text)).clone(),
            "text": text.to(torch.bfloat16),
            "velocity": torch.zeros_like(now),
        }
        now = now + (time_next - time_now) * see(batch).float()
    pictures = ((now.clamp(-1, 1) + 1) * 127.5).to(torch.uint8).permute(0, 2, 3, 1).numpy()
    grid = pictures.reshape(3, 9, SIDE, SIDE, 3).transpose(0, 2, 1, 3, 4)
    Image.fromarray(grid.reshape(3 * SIDE, 9 * SIDE, 3)).resize((9 * 96, 3 * 96), 0).save(file)


def seen_through(engine: lohan.Engine, model: torch.nn.Module) -> Any:
    """A forward pass whose weights come from SSD, block by block."""

    def see(batch: dict[str, Any]) -> torch.Tensor:
        seen = []

        def keep(model: torch.nn.Module, batch: dict[str, Any]) -> torch.Tensor:
            seen.append(predict(model, batch).detach().clone())
            return seen[-1].float().mean()

        model.eval()
        engine.evaluate([batch], keep)
        model.train()
        return seen[-1].cpu()

    return see


class Average:
    """An average of the weights over steps (EMA), in one file: larger than memory is fine."""

    def __init__(self, file: pathlib.Path, engine: lohan.Engine) -> None:
        sizes = {name: tensor.shape for name, tensor in engine.weights()}
        count = sum(math.prod(shape) for shape in sizes.values())
        self._all = torch.from_file(str(file), shared=True, size=count)
        parts = self._all.split([math.prod(shape) for shape in sizes.values()])
        self.weights = {
            name: part.view(shape) for (name, shape), part in zip(sizes.items(), parts, strict=True)
        }
        self.update(engine, 0.0)

    def update(self, engine: lohan.Engine, decay: float) -> None:
        """Move towards the weights as they are now; reads every master once."""
        for name, master in engine.weights():
            self.weights[name].lerp_(master, 1 - decay)


def main() -> None:
    """Train, and show what was learned."""
    parser = argparse.ArgumentParser()
    parser.add_argument("ssd", nargs="+", help="One directory per SSD.")
    parser.add_argument("--out", required=True, type=pathlib.Path, help="For pictures and model.")
    parser.add_argument("--model", choices=("sd3", "flux", "dit"), default="sd3")
    parser.add_argument("--pretrained", help="Folder of a diffusers transformer.")
    parser.add_argument("--latents", type=pathlib.Path, help="Encoded pictures and texts.")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--ram", default="96MiB", help="All that lohan may hold in main memory.")
    parser.add_argument("--device", help="cuda or cpu. Default: a GPU if there is one.")
    words = parser.parse_args()

    words.out.mkdir(parents=True, exist_ok=True)
    data = load_file(words.latents or drawn_data(words.out))
    model = make_model(words.model, words.pretrained)
    engine = lohan.attach(
        model,
        lohan.AdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0),
        ssd=words.ssd,
        ram=words.ram,
        device=words.device,
        # What a micro-batch looks like and how its loss is computed: lohan traces one forward pass
        # with it, without computing anything, to find out what every block needs.
        example=make_batch(data, 0),
        loss_fn=flow_loss,
        progress=print,
    )
    try:
        sample(seen_through(engine, model), words.out / "before.png")
        average = Average(words.out / "average.bin", engine)
        began = time.perf_counter()
        for step in range(words.steps):
            # Two micro-batches, one optimizer step. Weights are read once for both.
            seeds = range(MICRO_BATCHES * step, MICRO_BATCHES * (step + 1))
            result = engine.step([make_batch(data, seed) for seed in seeds])
            if result.step % 10 == 0:
                average.update(engine, decay=0.8)
            if result.step % 50 == 0 or result.step in (1, words.steps):
                seconds = (time.perf_counter() - began) / result.step
                print(
                    f"step {result.step}: loss {result.loss:.4f}, {seconds:.2f} s/it, "
                    f"{result.read_bytes / 1e9:.3f} GB read and {result.written_bytes / 1e9:.3f} "
                    f"GB written by this step, limit: {result.bottleneck}"
                )
        sample(seen_through(engine, model), words.out / "after.png")
    finally:
        # This was a try-out, so its states are removed. Leave should_delete out to keep them; the
        # run can then be taken up again, see training_loop.py.
        engine.close(should_delete=True)
    averaged = make_model(words.model, words.pretrained)
    averaged.load_state_dict(average.weights, strict=False)
    averaged.save_pretrained(words.out / "averaged")
    with torch.no_grad():
        sample(lambda batch: predict(averaged.eval(), batch), words.out / "averaged.png")
    print(f"pictures: {words.out}/before.png, after.png, averaged.png")


if __name__ == "__main__":
    main()
