"""A transformers model without memory for its parameters, but with every buffer real and right.

Owns choosing the class a configuration means, building it on the `meta` device, and computing its
buffers as transformers does when it loads a model. Reads no weights. Called by `source`.

Note "buffers". A module computes its rotary frequencies and the like when it is made, which on the
meta device gives nothing. transformers computes them again in `_init_weights`; so does this file,
with parameters marked as done. Before that, buffers are filled with a value nobody means (NaN), so
that one which nothing computes is noticed instead of trained with.
"""

import contextlib
import copy
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lohan.errors import ConfigError, LohanError
from lohan.train.weights.checkpoint_files import shown

COMPUTE_DTYPES = (torch.bfloat16, torch.float16)


@contextlib.contextmanager
def explained(what: str, remedy: str) -> Iterator[None]:
    """Turn what transformers raises about a user's model into a ConfigError."""
    try:
        yield
    except LohanError:
        raise
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{what}: a package is missing",
            why=str(error),
            remedy='install what training needs: pip install "lohan[train]"',
        ) from error
    except Exception as error:
        reason = " ".join(str(error).split())[:400] or "no message"
        raise ConfigError(what, why=f"{type(error).__name__}: {reason}", remedy=remedy) from error


def read_config(directory: Path, *, trust_remote_code: bool, gguf_file: str | None = None) -> Any:
    """The transformers configuration of a model directory or GGUF file.

    Raises:
        ConfigError: there is none, it is damaged, needs code that is not trusted, or describes
            weights that are quantized.
    """
    if gguf_file is None and not (directory / "config.json").is_file():
        raise ConfigError(
            f"{directory} has no config.json",
            why="it says which model the weights are of",
            remedy="give the directory of a transformers model",
        )
    with explained(
        f"the configuration in {directory} cannot be used",
        "check config.json and that this transformers knows the model; a model that brings its own "
        "code needs trust_remote_code",
    ):
        import transformers

        options = {"trust_remote_code": trust_remote_code}
        if gguf_file is not None:
            options["gguf_file"] = gguf_file  # type: ignore[assignment]
        config = transformers.AutoConfig.from_pretrained(str(directory), **options)
    quantization = getattr(config, "quantization_config", None)
    if gguf_file is None and quantization is not None:
        fields = quantization if isinstance(quantization, dict) else quantization.to_dict()
        raise ConfigError(
            f"the weights in {directory} are quantized ({fields.get('quant_method')})",
            why="training changes weights by less than a quantized format can hold",
            remedy="give the model in bf16, fp16 or fp32",
        )
    return config


def model_class(
    config: Any, directory: Path, *, trust_remote_code: bool, head: str | None = None
) -> Any:
    """The class to train: what the configuration names, with a language-modelling head.

    With `head`, a table of transformers' classes, the one of that table, for one output.

    Raises:
        ConfigError: no class fits.
    """
    with explained(
        f"no model class fits the configuration in {directory}",
        'check "architectures" and "model_type" in config.json',
    ):
        import transformers

        auto_map = getattr(config, "auto_map", None) or {}
        if head is not None:
            table: Any = getattr(transformers, head)
            kind = table[type(config)]
            config.num_labels, config.architectures = 1, [kind.__name__]
            return kind
        if trust_remote_code:
            from transformers.dynamic_module_utils import get_class_from_dynamic_module

            for auto in ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModel"):
                if auto in auto_map:
                    return get_class_from_dynamic_module(auto_map[auto], str(directory))
        # Asked for by name: not all of these tables are among the package's typed names.
        tables: Any = transformers
        with_head = [
            tables.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None),
            tables.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING.get(type(config), None),
        ]
        names = getattr(config, "architectures", None) or [""]
        named = getattr(transformers, str(names[0]), None)
        is_headless = named is not None and named is tables.MODEL_MAPPING.get(type(config), None)
        if named is not None and not is_headless:
            return named
        found = next((kind for kind in with_head if kind is not None), named)
        if found is None:
            raise ConfigError(
                f"no model class fits the configuration in {directory}",
                why=f"it names {names} and model_type {config.model_type!r}",
                remedy="install a transformers that knows the model, or allow its own code with "
                "trust_remote_code",
            )
        return found


def build_untied(kind: Any, config: Any, dtype: torch.dtype) -> nn.Module:
    """The model with all parameters on `meta` in the compute type, and tied ones still apart.

    Raises:
        ConfigError: it cannot be built, or a parameter is no floating-point one.
    """
    config = copy.deepcopy(config)
    _set_for_training(config, dtype)
    before = torch.get_default_dtype()
    with explained(
        f"{kind.__name__} cannot be built from its configuration",
        "check the configuration, and that this transformers knows the model",
    ):
        from transformers import initialization

        try:
            torch.set_default_dtype(dtype)
            with (
                torch.device("meta"),
                initialization.no_tie_weights(),
                initialization.meta_device_safe_creation_ops(),
            ):
                model = kind(config)
        finally:
            torch.set_default_dtype(before)
    assert isinstance(model, nn.Module)
    _set_parameter_dtype(model, dtype)
    return model.train()


def _set_for_training(config: Any, dtype: torch.dtype) -> None:
    parts = [config, config.get_text_config()]
    parts += [getattr(config, name, None) for name in getattr(config, "sub_configs", {})]
    for part in parts:
        if part is not None:
            part.dtype = dtype
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # only GGUF files come this far, and are unpacked


def _set_parameter_dtype(model: nn.Module, dtype: torch.dtype) -> None:
    changed: dict[int, nn.Parameter] = {}  # one per parameter, which modules may share
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if not parameter.is_floating_point():
                raise ConfigError(
                    f"the parameter {module_name}.{name} is of {parameter.dtype}",
                    why="only floating-point parameters can be trained",
                    remedy="give the model in bf16, fp16 or fp32",
                )
            if parameter.dtype is not dtype:
                made = nn.Parameter(parameter.to(dtype), requires_grad=parameter.requires_grad)
                setattr(module, name, changed.setdefault(id(parameter), made))


def fp32_modules(model: nn.Module, dtype: torch.dtype) -> tuple[str, ...]:
    """Patterns of names that transformers would keep in fp32 beside this compute type."""
    kept = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if dtype is torch.float16:
        kept |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    return tuple(sorted(str(name) for name in kept))


def is_kept_in_fp32(name: str, kept: Iterable[str]) -> bool:
    """Whether a name fits one of `fp32_modules`."""
    return any(re.search(pattern.replace("*", ".*"), name) for pattern in kept)


def fill_buffers(model: nn.Module, loaded: Mapping[str, torch.Tensor], dtype: torch.dtype) -> None:
    """Set every buffer: loaded ones in the model's type, the others computed by its own code.

    Raises:
        ConfigError: the model's code leaves a buffer without a value.
    """
    computed: dict[str, torch.Tensor] = {}
    kept = fp32_modules(model, dtype)
    for name, buffer in list(model.named_buffers(remove_duplicate=False)):
        parent, _, own_name = name.rpartition(".")
        if name in loaded:
            is_wide = buffer.is_floating_point() and is_kept_in_fp32(name, kept)
            value = loaded[name].to(torch.float32 if is_wide else buffer.dtype)
        else:
            value = _unmeant(buffer)
            computed[name] = value
        model.get_submodule(parent)._buffers[own_name] = value
        _mark(value, name in loaded)
    for parameter in model.parameters():
        _mark(parameter, True)
    with explained(
        f"{type(model).__name__} cannot compute its buffers",
        "check that this transformers knows the model",
    ):
        initialize: Any = model.initialize_weights
        initialize()
    _refuse_left_out(model, computed)


def first_values(
    model: nn.Module, names: Sequence[str], seed: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """Values of parameters that are in no file, in fp32, as the model's code draws them.

    As transformers does it after `set_seed`: modules in order, by `_init_weights`. Generators are
    left as they were.
    """
    if not names:
        return
    model = copy.deepcopy(model)  # on `meta`, so it costs nothing
    for name in names:
        owner, _, own_name = name.rpartition(".")
        shape = model.get_parameter(name).shape
        made = nn.Parameter(torch.zeros(shape, dtype=torch.float32))
        setattr(model.get_submodule(owner), own_name, made)
    with (
        torch.random.fork_rng(devices=[]),
        explained(
            f"{type(model).__name__} cannot draw the values of its head",
            "check that this transformers knows the model",
        ),
    ):
        torch.manual_seed(seed)
        for module in model.modules():
            if any(not one.is_meta for one in module.parameters(recurse=False)):
                initialize: Any = model._init_weights
                initialize(module)
    for name in names:
        yield name, model.get_parameter(name).detach()


def _mark(tensor: torch.Tensor, is_done: bool) -> None:
    # transformers' own mark: its initializers leave marked tensors alone.
    tensor._is_hf_initialized = is_done  # type: ignore[attr-defined]


def _unmeant(buffer: torch.Tensor) -> torch.Tensor:
    """Memory for a buffer with a value in every byte that no code computes."""
    num_bytes = buffer.numel() * buffer.element_size()
    # All ones are NaN in every floating-point type, and in a bool no value at all.
    memory = torch.full((num_bytes,), 0xFF, dtype=torch.uint8, device="cpu")
    if not (buffer.is_floating_point() or buffer.is_complex() or buffer.dtype is torch.bool):
        memory.fill_(0xA5)  # -1 is an index that code does mean
    return memory.view(buffer.dtype).view(buffer.shape)


def _is_unmeant(value: torch.Tensor) -> bool:
    if value.is_floating_point() or value.is_complex():
        return bool(value.isnan().all())
    is_bool = value.dtype is torch.bool
    return bool(
        (value.contiguous().view(-1).view(torch.uint8) == (0xFF if is_bool else 0xA5)).all()
    )


def _refuse_left_out(model: nn.Module, computed: Mapping[str, torch.Tensor]) -> None:
    left = [name for name, buffer in model.named_buffers() if buffer.is_meta]
    for name, value in computed.items():
        if model.get_buffer(name) is value and value.numel() > 0 and _is_unmeant(value):
            left.append(name)
    if left:
        raise ConfigError(
            f"{type(model).__name__} leaves buffers without a value: {shown(sorted(left))}",
            why="they are neither in the weights files nor computed by `_init_weights`, which is "
            "where transformers 5 computes buffers of a model that is loaded",
            remedy="use a version of the model's code made for transformers 5",
        )


def tie(model: nn.Module, untied: frozenset[str]) -> None:
    """Tie what the model ties, except the names in `untied`, whose stored values differ."""
    ties: Any = getattr(model, "all_tied_weights_keys", None)
    if ties is None:
        return
    for name in untied:
        ties.pop(name, None)
    tie_weights: Any = model.tie_weights
    tie_weights(recompute_mapping=False)


def aliases(model: nn.Module) -> dict[str, str]:
    """The name a parameter is trained under, by each of its names (tied ones have several)."""
    first: dict[int, str] = {}
    return {
        name: first.setdefault(id(parameter), name)
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }
