"""Micro-batches for small models of transformers, by what their forward takes.

Owns what pictures and sounds look like to each architecture. Where architectures differ in the form
of a picture, several forms are offered; the one the model's own forward takes is used.
"""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from lohan.verify.batches import batches_for

MakeBatch = Callable[[int], dict[str, Any]]

_NUM_ROWS, _NUM_TOKENS, _NUM_LABELS = 2, 12, 2
_NUM_SAMPLES, _NUM_FRAMES = 4000, 64


def text_batches(model: nn.Module, dtype: torch.dtype) -> Iterator[MakeBatch]:
    """Tokens and labels; none of the tokens stands for a picture or sound."""
    make = batches_for(model, dtype)
    special = _special_ids(model)

    def without_special(seed: int) -> dict[str, Any]:
        batch = make(seed)
        for name in ("input_ids", "decoder_input_ids"):
            if name in batch:
                batch[name] = _plain_ids(batch[name], special)
        return batch

    yield without_special


def picture_classes(model: nn.Module, dtype: torch.dtype) -> Iterator[MakeBatch]:
    """Pictures and the class of each."""
    config: Any = model.config
    part = getattr(config, "vision_config", config)
    channels = getattr(part, "num_channels", 3)
    sides = [getattr(part, "image_size", None), 32, 64, 224]
    for side in [one[0] if isinstance(one, list | tuple) else one for one in sides if one]:

        def make(seed: int, side: int = side) -> dict[str, Any]:
            generator = _generator(seed)
            pixels = torch.randn(_NUM_ROWS, channels, side, side, generator=generator)
            labels = torch.randint(0, _NUM_LABELS, (_NUM_ROWS,), generator=generator)
            return {"pixel_values": pixels.to(dtype), "labels": labels}

        yield make


def sounds(model: nn.Module, dtype: torch.dtype) -> Iterator[MakeBatch]:
    """Sounds as samples or frames, and what is said in them."""
    config: Any = model.config
    accepted = inspect.signature(model.forward).parameters
    vocabulary = config.get_text_config().vocab_size
    bins = getattr(config, "num_mel_bins", None) or getattr(config, "feature_size", 16)
    if hasattr(config, "encoder_config"):
        bins = getattr(config.encoder_config, "num_mel_bins", bins)
    shapes: list[tuple[str, tuple[int, ...]]] = []
    if "input_values" in accepted:
        shapes.append(("input_values", (_NUM_ROWS, _NUM_SAMPLES)))
        shapes.append(("input_values", (_NUM_ROWS, _NUM_FRAMES, bins)))
    if "input_features" in accepted:
        longest = getattr(config, "max_source_positions", None)
        if longest:
            shapes.append(("input_features", (_NUM_ROWS, bins, 2 * longest)))
        for size in {bins, getattr(config, "feature_projection_input_dim", bins)}:
            shapes.append(("input_features", (_NUM_ROWS, _NUM_FRAMES, size)))
            shapes.append(("input_features", (_NUM_ROWS, size, _NUM_FRAMES)))
    for name, shape in shapes:

        def make(seed: int, name: str = name, shape: tuple[int, ...] = shape) -> dict[str, Any]:
            generator = _generator(seed)
            values = torch.randn(shape, generator=generator).to(dtype)
            labels = torch.randint(3, vocabulary, (_NUM_ROWS, 4), generator=generator)
            return {name: values, "labels": labels}

        yield make

        def with_mask(
            seed: int, make: MakeBatch = make, shape: tuple[int, ...] = shape
        ) -> dict[str, Any]:
            return {**make(seed), "attention_mask": torch.ones(shape[:2], dtype=torch.long)}

        if "attention_mask" in accepted:
            yield with_mask


def picture_texts(model: nn.Module, dtype: torch.dtype) -> Iterator[MakeBatch]:
    """Texts with a picture in each row."""
    config: Any = model.config
    accepted = inspect.signature(model.forward).parameters
    names = ("image_token_id", "image_token_index", "im_token_id", "media_token_id")
    found = [getattr(config, name, None) for name in names]
    image_id = next((one for one in found if one is not None), None)
    special = _special_ids(model)
    for pictures in _pictures(model, accepted):
        if "image_merge_sizes" in accepted:
            pictures["image_merge_sizes"] = torch.full((_NUM_ROWS,), 2)
        if "qformer_input_ids" in accepted:
            pictures["qformer_input_ids"] = torch.arange(8).view(_NUM_ROWS, 4)
        count = _count_features(model, pictures, dtype) if image_id is not None else 0
        if count is None:
            continue

        def make(
            seed: int, pictures: dict[str, Any] = pictures, count: int = count
        ) -> dict[str, Any]:
            generator = _generator(seed)
            shape = (_NUM_ROWS, _NUM_TOKENS)
            vocabulary = config.get_text_config().vocab_size
            tokens = torch.randint(0, vocabulary, shape, generator=generator)
            tokens = _plain_ids(tokens, special)
            labels = tokens.clone()
            labels[:, : 1 + 2 * (seed % 3)] = -100
            if count:
                marks = torch.full((_NUM_ROWS, count), image_id)
                tokens = torch.cat([tokens[:, :2], marks, tokens[:, 2:]], dim=1)
                none = torch.full((_NUM_ROWS, count), -100)
                labels = torch.cat([labels[:, :2], none, labels[:, 2:]], dim=1)
            batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
            if "labels" in accepted:
                batch["labels"] = labels
            for name in ("mm_token_type_ids", "token_type_ids"):
                if name in accepted and count:
                    batch[name] = (tokens == image_id).long()
            for name, value in pictures.items():
                batch[name] = _noise_like(value, generator, dtype)
            return batch

        yield make


def _pictures(model: nn.Module, accepted: Any) -> Iterator[dict[str, Any]]:
    """Forms a picture may have; floating tensors are filled with noise later."""
    config: Any = model.config
    vision = getattr(config, "vision_config", None) or getattr(config, "encoder", None) or config
    patch = getattr(vision, "patch_size", 4)
    patch = patch if type(patch) is int else 4
    channels = getattr(vision, "num_channels", None) or getattr(vision, "in_channels", 3)
    channels = channels if type(channels) is int else 3
    side = getattr(vision, "image_size", None)
    side = side[0] if isinstance(side, list | tuple) else side or 4 * patch
    merge = getattr(vision, "spatial_merge_size", None) or getattr(vision, "merge_size", None) or 2
    merge = merge if type(merge) is int else 2
    frames = getattr(vision, "temporal_patch_size", None) or 1
    rows = _NUM_ROWS
    if "image_grid_thw" in accepted or "grid_thw" in accepted:
        name = "image_grid_thw" if "image_grid_thw" in accepted else "grid_thw"
        grid = torch.tensor([[1, 2 * merge, 2 * merge]] * rows)
        num = rows * (2 * merge) ** 2
        for t in {frames, 1}:
            yield {"pixel_values": torch.zeros(num, channels * t * patch * patch), name: grid}
        yield {"pixel_values": torch.zeros(num, channels, patch, patch), name: grid}
    plain = torch.zeros(rows, channels, side, side)
    sizes = torch.tensor([[side, side]] * rows)
    if "aspect_ratio_ids" in accepted:
        tiles = getattr(vision, "max_num_tiles", 4)
        mask = torch.zeros(rows, 1, tiles, dtype=torch.long)
        mask[..., 0] = 1
        yield {
            "pixel_values": torch.zeros(rows, 1, tiles, channels, side, side),
            "aspect_ratio_ids": torch.ones(rows, 1, dtype=torch.long),
            "aspect_ratio_mask": mask,
            "cross_attention_mask": torch.ones(rows, _NUM_TOKENS, 1, tiles, dtype=torch.long),
        }
    if "image_sizes" in accepted:
        yield {"pixel_values": plain, "image_sizes": sizes}
        yield {"pixel_values": torch.zeros(rows, 2, channels, side, side), "image_sizes": sizes}
        yield {"pixel_values": torch.zeros(rows, 3, channels, side, side), "image_sizes": sizes}
    if "image_position_ids" in accepted or "pixel_position_ids" in accepted:
        name = "image_position_ids" if "image_position_ids" in accepted else "pixel_position_ids"
        pool = getattr(vision, "pooling_kernel_size", None) or 1
        edge = 2 * pool
        places = torch.stack(torch.meshgrid(*[torch.arange(edge)] * 2, indexing="xy"), -1)
        places = places.reshape(1, edge * edge, 2).repeat(rows, 1, 1)
        pixels = torch.zeros(rows, edge * edge, channels * patch * patch)
        yield {"pixel_values": pixels, name: places}
    if "spatial_shapes" in accepted:
        yield {
            "pixel_values": torch.zeros(rows, 16, channels * patch * patch),
            "spatial_shapes": torch.full((rows, 2), 4),
            "pixel_attention_mask": torch.ones(rows, 16, dtype=torch.long),
        }
    if "image_attention_mask" in accepted:
        yield {
            "pixel_values": plain[:, None],
            "image_attention_mask": torch.ones(rows, _NUM_TOKENS, 1, dtype=torch.long),
        }
    yield {"pixel_values": plain}
    yield {"pixel_values": plain[:, None]}
    for smaller in (patch * 4, patch * 8):
        yield {"pixel_values": torch.zeros(rows, channels, smaller, smaller)}


def _count_features(model: nn.Module, pictures: dict[str, Any], dtype: torch.dtype) -> int | None:
    """How many tokens of a row stand for its picture; None: the model does not take this form."""
    inner = getattr(model, "model", None)
    get: Any = getattr(model, "get_image_features", getattr(inner, "get_image_features", None))
    if get is None:
        return 0
    takes = inspect.signature(get).parameters
    has_rest = any(one.kind is one.VAR_KEYWORD for one in takes.values())
    filled = {
        name: _noise_like(value, _generator(0), dtype)
        for name, value in pictures.items()
        if name in takes or (has_rest and name != "pixel_values")
    }
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            features = get(**filled)
    except Exception:
        return None
    if hasattr(features, "pooler_output"):
        found = features.pooler_output
        features = found if found is not None else features.last_hidden_state
    width = model.config.get_text_config().hidden_size
    leaves = features if isinstance(features, list | tuple) else [features]
    num = sum(one.numel() for one in leaves if isinstance(one, torch.Tensor))
    return num // width // _NUM_ROWS if num % (width * _NUM_ROWS) == 0 else None


def _noise_like(value: Any, generator: torch.Generator, dtype: torch.dtype) -> Any:
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    return torch.randn(value.shape, generator=generator).to(dtype)


def _special_ids(model: nn.Module) -> set[int]:
    """Ids of tokens that stand for something else than text."""
    config: Any = model.config
    found: set[int] = set()
    for part in (config, config.get_text_config()):
        for key, value in part.to_dict().items():
            if key.endswith(("token_id", "token_index")) and type(value) is int:
                found.add(value)
    return found


def _plain_ids(tokens: torch.Tensor, special: set[int]) -> torch.Tensor:
    free = next(number for number in range(5, 5 + len(special) + 1) if number not in special)
    is_special = torch.isin(tokens, torch.tensor(sorted(special) or [-1]))
    return tokens.masked_fill(is_special, free)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(2000 + seed)
