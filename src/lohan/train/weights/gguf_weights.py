"""Weights out of a GGUF file, by transformers: the one source that is held in RAM whole.

Owns unpacking and handing out one tensor after the other. GGUF packs weights in blocks of a few
bits; transformers unpacks them for the model as a whole only.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from lohan.train.weights.meta_model import explained


def unpack(
    kind: Any, config: Any, directory: Path, gguf_file: str, aliases: Mapping[str, str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter once in fp32; each is let go when the next one is asked for.

    Raises:
        ConfigError: the file is damaged, or of a kind transformers does not unpack.
    """
    with explained(
        f"the weights in {directory / gguf_file} cannot be unpacked",
        "check the file; use a safetensors version of the model if there is one",
    ):
        from transformers.utils.quantization_config import GgufConfig

        model = kind.from_pretrained(
            str(directory),
            config=config,  # else it is read again, which takes seconds
            gguf_file=gguf_file,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
        )
    for name, parameter in list(model.named_parameters()):
        yield aliases[name], parameter.detach()
        parameter.data = torch.empty(0)
