"""How much RAM reading and exporting a model takes; run as a program of its own.

Usage: python -m support.flat_memory DIRECTORY

Makes a model of about 190 MB by exporting random tensors, reads it, exports it again. Prints the
bytes of the model, of its largest tensor, and the growth of resident memory in each of the three.
"""

import json
import pathlib
import sys
from collections.abc import Iterator

import torch
import transformers

from lohan.train.weights.export_hf import export_model
from lohan.train.weights.source import open_source, source_of_config


def _status(field: str) -> int:
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(field)


class Growth:
    """Peak of resident memory over its value at the start."""

    def __enter__(self) -> "Growth":
        pathlib.Path("/proc/self/clear_refs").write_text("5")
        self._before = _status("VmRSS")
        return self

    def __exit__(self, *error: object) -> None:
        self.peak_bytes = _status("VmHWM") - self._before


def main() -> None:
    torch.set_num_threads(1)  # threads begin with a stack each, on some machines of 2 MiB at once
    root = pathlib.Path(sys.argv[1])
    config = transformers.LlamaConfig(
        vocab_size=2048,
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=22,
        num_attention_heads=8,
        architectures=["LlamaForCausalLM"],
    )
    shapes = source_of_config(config).parameters

    def random_tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name, shape in shapes.items():
            yield name, torch.randn(shape)

    with Growth() as making:
        made = export_model(config, random_tensors(), root / "made", max_shard_bytes=50_000_000)
    source = open_source(root / "made")
    largest = max(tensor.nbytes for tensor in source.stored.values())
    with Growth() as reading:
        for _ in source.tensors():
            pass
    with Growth() as writing:
        export_model(source, source.tensors(), root / "again", dtype=torch.float32)
    growth = {"making": making, "reading": reading, "writing": writing}
    print(
        json.dumps(
            {"model": made.total_bytes, "largest": largest}
            | {name: one.peak_bytes for name, one in growth.items()}
        )
    )


if __name__ == "__main__":
    main()
