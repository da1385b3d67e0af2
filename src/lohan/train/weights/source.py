"""A model to start from: its module without memory, and its weights as a stream.

Owns opening and checking a source before anything is written, and the order tensors are read in.
The files are read by `safetensors_files`, names matched by `checkpoint_names`, the module built by
`meta_model`. Called by trainers, `export_hf` and `check_export`.
"""

import fnmatch
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lohan.engine.model_buffers import persistent_buffers
from lohan.errors import ConfigError
from lohan.train.weights import meta_model
from lohan.train.weights.checkpoint_files import find_stored_tensors, has_all_files, shown
from lohan.train.weights.checkpoint_names import NameGroup, NameMatch, match_names, to_model
from lohan.train.weights.model_identity import source_identity
from lohan.train.weights.model_places import (
    ALL_BUT_WEIGHTS,
    EVERYTHING,
    ModelPlace,
    find_place,
    local_place,
)
from lohan.train.weights.safetensors_files import StoredTensor, is_equal, read_tensor

_OF_TOKENIZERS = ("tokenizer*", "*.model", "*.tiktoken", "vocab*", "merges.txt", "spiece*")

STORED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class WeightsWarning(UserWarning):
    """Something about a model's files that a user should know and that is no error."""


class ModelSource:
    """A checked model on disk. Made by `open_source`; holds no weights and no open files."""

    def __init__(
        self,
        *,
        place: ModelPlace,
        config: Any,
        kind: Any,
        dtype: torch.dtype,
        trust_remote_code: bool,
        head: str | None = None,
        seed: int = 0,
    ) -> None:
        self.directory = place.directory
        self.head = head
        """The table of classes `kind` is of, where the configuration means another one."""
        self._seed = seed
        self.gguf_file = place.gguf_file
        self.config = config
        """transformers' configuration as it was found."""
        self.identity = source_identity(config, place.directory if place.has_files else None)
        self.dtype = dtype
        self.trust_remote_code = trust_remote_code
        self.kind = kind
        """The class `make_model` makes."""
        self.stored: Mapping[str, StoredTensor] = {}
        """Tensors of the files by their stored names; none for GGUF."""
        self.remarks: list[str] = []
        """What `open_source` warned of."""
        self.new: tuple[str, ...] = ()
        """Parameters that the files do not have, because the head of the model is another one."""
        self.unexpected: tuple[str, ...] = ()
        """Stored names the model has no use for."""
        self.skeleton = meta_model.build_untied(kind, config, dtype)
        """The module on `meta`, for names and shapes; buffers have no values."""
        self.match: NameMatch | None = None
        self._untied: frozenset[str] = frozenset()
        self._providers: dict[str, NameGroup] = {}
        self.has_files = place.has_files
        self.has_weights = place.has_files and place.has_weights
        """False where only what they are for is known: they can be planned for, not trained."""
        if self.has_weights and place.gguf_file is None:
            self.stored = find_stored_tensors(place.directory)
            self.match = self._match()
        meta_model.tie(self.skeleton, self._untied)
        self.aliases = meta_model.aliases(self.skeleton)
        """For every name of a parameter the one it is trained under."""
        if self.match is not None:
            self._choose_providers(self.match)
        self._remark_on_fp32()

    @property
    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of what `tensors` gives."""
        return {name: tuple(p.shape) for name, p in self.skeleton.named_parameters()}

    @property
    def groups(self) -> tuple[NameGroup, ...]:
        """The groups whose tensors are used, tied ones once, in the order of the model."""
        if self.match is None:
            return ()
        known = (name for name in self.parameters if name not in self.new)
        chosen = dict.fromkeys(self._providers[name] for name in known)
        new = (NameGroup(stored=(name,), owned=(name,)) for name in self.new)
        return (*chosen, *new, *self._buffer_groups())

    @property
    def is_untied(self) -> bool:
        """Whether the files hold different values for weights the configuration ties."""
        return bool(self._untied)

    def make_model(self) -> nn.Module:
        """The module to train, in training mode: parameters on `meta`, buffers in RAM.

        Parameters are in the compute type; all else is as `from_pretrained` makes it.

        Raises:
            ConfigError: the model's code leaves a buffer without a value.
            StorageError: a stored buffer cannot be read.
        """
        model = meta_model.build_untied(self.kind, self.config, self.dtype)
        meta_model.fill_buffers(model, dict(self.buffers()), self.dtype)
        meta_model.tie(model, self._untied)
        generation = self.directory / "generation_config.json"
        is_there = self.has_files and generation.is_file()
        if is_there and self.gguf_file is None and hasattr(model, "generation_config"):
            with meta_model.explained(f"{generation} cannot be used", "correct or remove it"):
                import transformers

                vars(model)["generation_config"] = transformers.GenerationConfig.from_pretrained(
                    str(self.directory)
                )
        return model

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter once, by the name it is trained under, in the type it is stored in.

        Files are read in order, one tensor in RAM at a time (those of a group with a conversion
        together). A GGUF file is the exception: the whole model is unpacked in RAM, as fp32.

        Raises:
            StorageError: a file has changed or cannot be read; file and tensor are named.
        """
        if not self.has_weights:
            raise ConfigError(
                f"{self.kind.__name__} has no weights",
                why="it was made from a configuration alone",
                remedy="open the directory of a model",
            )
        if self.gguf_file is not None:
            yield from _unpacked(
                self.kind, self.config, self.directory, self.gguf_file, self.aliases
            )
            return
        groups = list(dict.fromkeys(self._providers.values()))
        groups.sort(key=lambda group: self._order(group.stored[0]))
        for group in groups:
            for name, tensor in to_model(self.skeleton, group, self._read).items():
                trained = self.aliases.get(name)
                if trained is not None and self._providers[trained] is group:
                    yield trained, tensor
                del tensor
        yield from meta_model.first_values(self.skeleton, self.new, self._seed)

    def buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every persistent buffer that is stored, as it is stored; zeros while it is not here.

        Raises:
            StorageError: as `tensors`.
        """
        if self.has_files and not self.has_weights:
            for name, buffer in persistent_buffers(self.skeleton).items():
                yield name, torch.zeros(buffer.shape, dtype=buffer.dtype)
        for group in self._buffer_groups():
            yield from to_model(self.skeleton, group, self._read).items()

    def load_tokenizer(self, **options: Any) -> Any:
        """The tokenizer that comes with the model; see `tokenizer_in`."""
        place = ModelPlace(directory=self.directory, gguf_file=self.gguf_file)
        return tokenizer_in(place, trust_remote_code=self.trust_remote_code, **options)

    def _buffer_groups(self) -> tuple[NameGroup, ...]:
        groups = self.match.groups if self.match is not None else ()
        return tuple(
            group for group in groups if not any(name in self.aliases for name in group.owned)
        )

    def _read(self, name: str) -> torch.Tensor:
        return read_tensor(self.stored[name])

    def _order(self, name: str) -> tuple[str, int]:
        return str(self.stored[name].path), self.stored[name].offset_bytes

    def _match(self) -> NameMatch:
        shapes = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            for name, tensor in self.stored.items()
        }
        match = match_names(self.skeleton, shapes)
        self.unexpected = match.unexpected
        if match.unexpected:
            self.remarks.append(
                f"{self.directory} holds {len(match.unexpected)} tensors "
                f"{self.kind.__name__} has no use for, which are left out: "
                f"{shown(match.unexpected)}"
            )
        stored_as = {
            group.owned[0]: self.stored[group.stored[0]]
            for group in match.groups
            if group.conversion is None
        }
        ties: Mapping[str, str] = getattr(self.skeleton, "all_tied_weights_keys", None) or {}
        untied = []
        for name, other in ties.items():
            if name in stored_as and other in stored_as:
                if is_equal(stored_as[name], stored_as[other]):
                    continue
                untied.append(name)
                self.remarks.append(
                    f"the configuration in {self.directory} ties {name} to {other}, but both are "
                    "stored with different values: they are trained as two tensors"
                )
        self._untied = frozenset(untied)
        return match

    def _choose_providers(self, match: NameMatch) -> None:
        for group in match.groups:
            for name in group.owned:
                trained = self.aliases.get(name)
                if trained is not None and (name == trained or trained not in self._providers):
                    self._providers[trained] = group
        missing = [name for name in self.parameters if name not in self._providers]
        provided, may_lack = match.owned, self._may_lack()
        missing += [
            name
            for name in persistent_buffers(self.skeleton)
            if name not in provided and not may_lack(name)
        ]
        if self.head is not None and missing and set(missing) <= self._of_head():
            self.new = tuple(missing)
            self.remarks.append(
                f"{shown(missing)} of {self.kind.__name__} is not in {self.directory} and begins "
                f"with random values, drawn with seed {self._seed}"
            )
            return
        if missing:
            raise ConfigError(
                f"{len(missing)} tensors of {self.kind.__name__} are missing in {self.directory}: "
                f"{shown(missing)}",
                why="training would start from random values there",
                remedy="download the missing files; check that files and config.json are of the "
                "same model",
            )
        for name, group in self._providers.items():
            for one in group.stored:
                if self.stored[one].dtype not in STORED_DTYPES:
                    raise ConfigError(
                        f"the tensor {one} ({name}) is stored as {self.stored[one].dtype}",
                        why="weights are taken as fp32, bf16 or fp16, which give exact masters",
                        remedy="give the model in one of these",
                    )

    def _of_head(self) -> set[str]:
        """Parameters outside of the part that models of this family with other heads share."""
        prefix = f"{getattr(self.skeleton, 'base_model_prefix', '')}."
        return {name for name in self.parameters if not name.startswith(prefix)}

    def _may_lack(self) -> Any:
        patterns = getattr(self.skeleton, "_keys_to_ignore_on_load_missing", None) or ()
        return lambda name: any(re.search(str(one), name) for one in patterns)

    def _remark_on_fp32(self) -> None:
        kept = meta_model.fp32_modules(self.skeleton, self.dtype)
        if any(meta_model.is_kept_in_fp32(name, kept) for name in self.parameters):
            self.remarks.append(
                f"transformers keeps {', '.join(kept)} of {self.kind.__name__} in fp32; here all "
                f"parameters compute in {str(self.dtype).removeprefix('torch.')}"
                + (
                    ": bf16 has the range of fp32, fp16 may overflow"
                    if self.dtype is torch.float16
                    else ""
                )
            )


def tokenizer_in(place: ModelPlace, *, trust_remote_code: bool, **options: Any) -> Any:
    """The tokenizer that comes with a model, by transformers' AutoTokenizer.

    Raises:
        ConfigError: there is none, or it cannot be used.
    """
    directory = place.directory
    if place.gguf_file is None and not any(
        fnmatch.fnmatch(path.name, one) for path in directory.iterdir() for one in _OF_TOKENIZERS
    ):
        raise ConfigError(
            f"{directory} has no tokenizer",
            why="rows are turned into tokens by it (tokenizer.json, or what it is made from)",
            remedy="copy the tokenizer's files of the model there",
        )
    with meta_model.explained(
        f"the tokenizer in {directory} cannot be used",
        "check the tokenizer's files, or give another one",
    ):
        import transformers

        if place.gguf_file is not None:
            options["gguf_file"] = place.gguf_file
        options.setdefault("trust_remote_code", trust_remote_code)
        return transformers.AutoTokenizer.from_pretrained(str(directory), **options)


def open_source(
    model: str | Path,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    should_fetch: bool = True,
    head: str | None = None,
    seed: int = 0,
    should_warn: bool = True,
) -> ModelSource:
    """Find a model and check that all of it is there: nothing is read but headers.

    Args:
        model: a directory, a hub id, or a GGUF file (or a directory with one).
        revision: of a hub id: a branch, tag or commit.
        trust_remote_code: whether code that comes with the model may run.
        dtype: what parameters compute in, bf16 or fp16.
        should_fetch: whether weights on the hub that are not on this machine are downloaded;
            else the source `has_weights` only if they need not be.
        head: the table of transformers that the model's class is taken from
            (`MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING`), with one output: a reward.
        seed: of the values of such a head where the files have none.
        should_warn: whether the source's `remarks` are given as warnings, too.

    Raises:
        ConfigError: there is no such model, its parts do not fit together, or tensors are missing.
        CheckpointError: index and files do not agree.
        StorageError: a file is cut off, damaged or cannot be read; file and tensor are named.
        HardwareError: the hub cannot be reached.
    """
    if dtype not in meta_model.COMPUTE_DTYPES:
        raise ConfigError(
            f"{dtype} is not a compute type",
            why="weights compute in bf16 or fp16; masters are always fp32",
            remedy="use torch.bfloat16",
        )
    should_fetch = should_fetch or local_place(model) is not None
    wanted = EVERYTHING if should_fetch else ALL_BUT_WEIGHTS
    place = find_place(model, wanted, revision=revision, trust_remote_code=trust_remote_code)
    if not should_fetch:
        place = replace(place, has_weights=has_all_files(place.directory))
    config = meta_model.read_config(
        place.directory, trust_remote_code=trust_remote_code, gguf_file=place.gguf_file
    )
    kind = meta_model.model_class(
        config, place.directory, trust_remote_code=trust_remote_code, head=head
    )
    source = ModelSource(
        place=place,
        config=config,
        kind=kind,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
        head=head,
        seed=seed,
    )
    if not should_warn:
        return source
    if source.gguf_file is not None:
        source.remarks.append(
            f"{source.directory / source.gguf_file} is a GGUF file: its weights were rounded when "
            "it was made, and all of them are unpacked in RAM (4 bytes per parameter) while they "
            "are read"
        )
    for remark in source.remarks:
        warnings.warn(remark, WeightsWarning, stacklevel=2)
    return source


def source_of_config(
    config: Any, dtype: torch.dtype = torch.bfloat16, *, kind: Any = None
) -> ModelSource:
    """A source without files: for the export of a model that was made from its configuration.

    Args:
        kind: the model's class, where it is not the one the configuration means.

    Raises:
        ConfigError: no model class fits the configuration.
    """
    place = ModelPlace(directory=Path(), has_files=False)
    if kind is None:
        kind = meta_model.model_class(config, place.directory, trust_remote_code=False)
    return ModelSource(place=place, config=config, kind=kind, dtype=dtype, trust_remote_code=False)


def _unpacked(
    kind: Any, config: Any, directory: Path, gguf_file: str, aliases: Mapping[str, str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter of a GGUF file once in fp32; each is let go when the next one is asked for.

    GGUF packs weights in blocks of a few bits, which transformers unpacks for the model as a whole
    only: this source is held in RAM.

    Raises:
        ConfigError: the file is damaged, or of a kind transformers does not unpack.
    """
    with meta_model.explained(
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
