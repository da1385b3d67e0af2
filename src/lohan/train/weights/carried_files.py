"""The files beside the weights: configuration, generation settings, tokenizer, chat template, code.

Owns which of them go along into an export, and what changes in the configuration: the number type,
the class, and ties that the weights do not have. Called by `export_hf`.
"""

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import torch

from lohan.ssd.engines.storage_errors import storage_errors
from lohan.train.weights.meta_model import explained
from lohan.train.weights.model_places import PROCESSORS, TEMPLATES, TOKENIZER_FILES
from lohan.train.weights.source import ModelSource

_OTHER_FILES = ("generation_config.json", *PROCESSORS, "LICENSE*", "NOTICE*", "USE_POLICY*")


def write_carried_files(
    source: ModelSource, out: Path, *, dtype: torch.dtype, tokenizer: Any = None
) -> None:
    """Write everything but the weights.

    Args:
        tokenizer: saved instead of the source's tokenizer files.

    Raises:
        ConfigError: the configuration or the tokenizer cannot be written.
        StorageError: a file cannot be copied.
    """
    is_directory = source.has_files and source.gguf_file is None
    if is_directory:
        _copy_config(source, out, dtype, tokenizer)
        patterns = [*_OTHER_FILES, *(() if tokenizer else TOKENIZER_FILES)]
        if getattr(source.config, "auto_map", None):
            patterns.append("*.py")
        _copy(source.directory, out, patterns)
        templates = source.directory / TEMPLATES
        if tokenizer is None and templates.is_dir():
            with storage_errors(f"{templates} cannot be copied", out / TEMPLATES):
                shutil.copytree(templates, out / TEMPLATES)
    else:
        _make_config(source, out, dtype)
        if tokenizer is None and source.has_files:
            tokenizer = source.load_tokenizer()
    if tokenizer is not None:
        with explained("the tokenizer cannot be saved", "check the tokenizer"):
            tokenizer.save_pretrained(str(out))


def _copy_config(source: ModelSource, out: Path, dtype: torch.dtype, tokenizer: Any) -> None:
    """The source's own text with few changes: what this transformers does not know survives."""
    name = str(dtype).removeprefix("torch.")
    with explained(f"config.json in {source.directory} cannot be carried over", "correct it"):
        fields = json.loads((source.directory / "config.json").read_text(encoding="utf-8"))
        parts = [fields, *(part for part in fields.values() if isinstance(part, dict))]
        for part in parts:
            for key in ("dtype", "torch_dtype"):
                if key in part:
                    part[key] = name
            if source.is_untied and part.get("tie_word_embeddings", part is fields):
                part["tie_word_embeddings"] = False
        if "torch_dtype" not in fields:
            fields["dtype"] = name
        fields["architectures"] = [source.kind.__name__]
        if source.head is not None:
            fields |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
            if getattr(tokenizer, "pad_token_id", None) is not None:
                # Where a row ends is told by it.
                fields["pad_token_id"] = tokenizer.pad_token_id
        text = json.dumps(fields, indent=2) + "\n"
    with storage_errors("config.json cannot be written", out / "config.json"):
        (out / "config.json").write_text(text, encoding="utf-8")


def _make_config(source: ModelSource, out: Path, dtype: torch.dtype) -> None:
    with explained("the configuration cannot be saved", "check the configuration"):
        import transformers

        config = copy.deepcopy(source.config)
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        config.dtype = dtype
        config.architectures = [source.kind.__name__]
        config.save_pretrained(str(out))
        if source.kind.can_generate():
            generation = transformers.GenerationConfig.from_model_config(config)
            generation.save_pretrained(str(out))


def _copy(source: Path, out: Path, patterns: list[str]) -> None:
    for pattern in patterns:
        for path in sorted(source.glob(pattern)):
            if not path.is_file() or path.suffix in (".safetensors", ".bin", ".gguf"):
                continue
            # The content only: a link into a cache becomes a file, with usual permissions.
            with storage_errors(f"{path} cannot be copied", out / path.name):
                shutil.copyfile(path, out / path.name)
