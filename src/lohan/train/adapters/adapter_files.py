"""An adapter in PEFT's layout: `adapter_config.json` and `adapter_model.safetensors`.

Owns the two files; which tensors belong to an adapter, and what they are called there, is asked of
PEFT itself. What was trained is written as its fp32 master. Whole or not at all, as a model's
export is. Called by the trainers and by `lohan export`; `lohan check` looks at what was written.
"""

import dataclasses
import json
import os
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from lohan.errors import ConfigError, LohanError
from lohan.ssd.engines.storage_errors import storage_errors
from lohan.ssd.runs.partial_directory import partial_directory
from lohan.train.adapters.kinds import adapter_of
from lohan.train.adapters.prompts import (
    PROMPTS,
    are_of_prompts,
    encoder_names,
    has_prompts,
    prompts_of,
)
from lohan.train.weights import meta_model
from lohan.train.weights.check_export import ModelDirectoryReport, look_at_values
from lohan.train.weights.checkpoint_files import shown
from lohan.train.weights.export_hf import (
    place_model,
    refuse_all_nan,
    refuse_taken,
    write_files_list,
)
from lohan.train.weights.file_list import files_below
from lohan.train.weights.model_identity import as_json
from lohan.train.weights.safetensors_files import ShardWriter, StoredTensor, read_header

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"


def config_fields(model: Any, base: str | None = None) -> dict[str, Any]:
    """A model's adapter as `adapter_config.json` has it; the same whatever order sets have.

    Args:
        base: what the base is called; what PEFT knows it by if not given.
    """
    _, config = adapter_of(model)
    fields = {
        name: sorted(value) if isinstance(value, set) else value
        for name, value in config.to_dict().items()
    }
    fields |= {"inference_mode": True, "base_model_name_or_path": base or _base_name(model, config)}
    if config.task_type is None:
        kind = type(model.get_base_model())
        fields["auto_mapping"] = {
            "base_model_class": kind.__name__,
            "parent_library": kind.__module__,
        }
    return as_json(fields)


def _base_name(model: Any, config: Any) -> str | None:
    return config.base_model_name_or_path or getattr(model.get_base_model(), "name_or_path", None)


def saved_names(model: Any, *, is_named: bool) -> dict[str, str]:
    """Names in an adapter's file, each with the name the tensor is trained under.

    Of prompts they are those of the network that computes what is in the file.

    Args:
        is_named: whether the base is a model on disk as it is there. Of others PEFT finds out
            whether its embeddings have grown, and then saves them too.
    """
    from peft import get_peft_model_state_dict

    adapter, config = adapter_of(model)
    if has_prompts(config):
        return encoder_names(model, adapter)
    aliases = meta_model.aliases(model)
    parts = {name: torch.empty(0, device="meta") for name in aliases}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # says that embeddings are saved
        found = get_peft_model_state_dict(
            model,
            state_dict=parts,
            adapter_name=adapter,
            save_embedding_layers=False if is_named else "auto",
        )
    owners = {id(part): aliases[name] for name, part in parts.items()}
    return {name: owners[id(part)] for name, part in found.items()}


def export_adapter(
    shapes: Mapping[str, tuple[int, ...]],
    names: Mapping[str, str],
    tensors: Iterable[tuple[str, torch.Tensor]],
    out: Path,
    *,
    fields: dict[str, Any],
    tokenizer: Any = None,
    should_merge: bool = False,
) -> ModelDirectoryReport:
    """Write an adapter that `PeftModel.from_pretrained` loads; one tensor is in RAM at a time.

    Args:
        shapes: of the tensors by the names they are trained under.
        names: of `saved_names`.
        tensors: names and fp32 masters; those of no use here are left out.
        fields: of `config_fields`.
        should_merge: put the files into `out` as it is, beside what is there.

    Raises:
        ConfigError: a tensor is missing.
        OutOfSpace, StorageError: it cannot be written; nothing is left.
        CheckpointError: a tensor is NaN throughout.
    """
    out = Path(os.path.realpath(out))
    is_merge = should_merge and out.is_dir()
    refuse_taken(out, should_merge=should_merge)
    if are_of_prompts(names):
        of_network = {name: one for name, one in tensors if name in names.values()}
        prompts = prompts_of(names, of_network, fields)
        names, tensors = {PROMPTS: PROMPTS}, [(PROMPTS, prompts)]
        shapes = {PROMPTS: tuple(prompts.shape)}
    content = [(saved, torch.float32, shapes[name]) for saved, name in names.items()]
    with partial_directory(out, is_merge) as partial:
        writer = ShardWriter(partial / WEIGHTS_NAME, content)
        try:
            _write_tensors(writer, names, tensors)
            writer.finish()
        finally:
            writer.close()
        with storage_errors(f"{CONFIG_NAME} cannot be written", partial / CONFIG_NAME):
            text = json.dumps(fields, indent=2, sort_keys=True)
            (partial / CONFIG_NAME).write_text(text, encoding="utf-8")
        if tokenizer is not None:
            with meta_model.explained("the tokenizer cannot be saved", "check the tokenizer"):
                tokenizer.save_pretrained(str(partial))
        files = tuple(files_below(partial))
        if not is_merge:
            write_files_list(partial, files)
        report = check_adapter_directory(partial, should_read_values=False)
        place_model(partial, out, is_merge=is_merge)
    return dataclasses.replace(report, path=out, files=files)


def _write_tensors(
    writer: ShardWriter, names: Mapping[str, str], tensors: Iterable[tuple[str, torch.Tensor]]
) -> None:
    places: dict[str, list[StoredTensor]] = {}
    for place in writer.places:
        places.setdefault(names[place.name], []).append(place)
    for name, tensor in tensors:
        for place in places.pop(name, ()):
            refuse_all_nan(name, tensor)
            writer.write(place, tensor)
        del tensor
    if places:
        raise ConfigError(
            f"{len(places)} tensors of the adapter were not given: {shown(places)}",
            why="the adapter would be incomplete",
            remedy="export with the model the run started from",
        )


def is_adapter_directory(directory: Path) -> bool:
    """Whether it holds an adapter, and no whole model."""
    return (directory / CONFIG_NAME).is_file() and not (directory / "config.json").is_file()


def check_adapter_directory(
    directory: Path, *, should_read_values: bool = True
) -> ModelDirectoryReport:
    """Check that an adapter's files are whole. Never raises for damage."""
    problems: list[str] = []
    remarks: list[str] = []
    fields: dict[str, Any] = {}
    stored: tuple[StoredTensor, ...] = ()
    try:
        fields = json.loads((directory / CONFIG_NAME).read_text(encoding="utf-8"))
        stored = read_header(directory / WEIGHTS_NAME)
        if should_read_values:
            look_at_values(list(stored), problems, remarks, None)
    except (OSError, ValueError) as error:
        problems.append(f"{CONFIG_NAME} cannot be read: {error}")
    except LohanError as error:
        problems.append(f"{error.what}: {error.why}")
    base = fields.get("base_model_name_or_path") or "a base that is not named"
    architecture = f"{fields.get('peft_type')} adapter of {base}"
    return ModelDirectoryReport.of(directory, architecture, stored, problems, remarks)
