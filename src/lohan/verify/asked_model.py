"""The configuration of the model a user names: a known name, a file, a directory, or a hub id.

Owns telling these apart. Of a model on the hub only the configuration is fetched. Builds nothing
and reads no weights. Called by `small_copy`.
"""

import json
import pathlib
from dataclasses import dataclass
from typing import Any

from lohan.errors import ConfigError, HardwareError
from lohan.model.names import canonical_name, known_names
from lohan.model.public_models import PUBLIC_MODELS
from lohan.train.weights.meta_model import explained

_PLACES = ("config.json", "transformer/config.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedModel:
    """What was asked for. Exactly one of `known`, `diffusers` and `transformers` is set."""

    name: str
    directory: pathlib.Path
    known: str | None = None
    """A model of the paper, built from sizes alone."""
    diffusers: dict[str, Any] | None = None
    """Settings as in the file."""
    transformers: Any | None = None
    """A configuration object."""


def find_model(model: str, *, trust_remote_code: bool = False) -> AskedModel:
    """Find the configuration of a model.

    Raises:
        ConfigError: nothing of that name is there, or it is no configuration.
        HardwareError: the hub cannot be reached.
    """
    path = pathlib.Path(model).expanduser()
    known = canonical_name(model)
    if known is not None:
        return _known(known)
    if path.suffix.lower() == ".gguf" and path.is_file():
        return _from_transformers(model, path.parent, trust_remote_code, gguf_file=path.name)
    file = _file_of(path) if path.exists() and model.strip() else _from_hub(model)
    settings = _read(file)
    name = model if not path.exists() else path.name or str(path)
    if "_class_name" in settings:
        return AskedModel(name=name, directory=file.parent, diffusers=settings)
    if "model_type" not in settings and not trust_remote_code:
        raise ConfigError(
            f"{file} is not the configuration of a model",
            why="it has neither a model_type (transformers) nor a _class_name (diffusers)",
            remedy="give the config.json of a transformers or diffusers model",
        )
    place = file.parent if file.name == "config.json" else file
    return _from_transformers(name, place, trust_remote_code)


def _known(name: str) -> AskedModel:
    if name not in PUBLIC_MODELS:
        return AskedModel(name=name, directory=pathlib.Path(), known=name)
    public = PUBLIC_MODELS[name]
    with explained(f"the known model {name} cannot be built", "install another transformers"):
        import transformers

        config = transformers.AutoConfig.for_model(public.model_type, **public.settings)
    return AskedModel(name=name, directory=pathlib.Path(), transformers=config)


def _from_transformers(
    name: str, place: pathlib.Path, trust_remote_code: bool, gguf_file: str | None = None
) -> AskedModel:
    with explained(
        f"the configuration in {place} cannot be used",
        "check it, and that this transformers knows the model; a model that brings its own code "
        "needs --trust-remote-code",
    ):
        import transformers

        options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
        if gguf_file is not None:
            options["gguf_file"] = gguf_file
        config = transformers.AutoConfig.from_pretrained(str(place), **options)
    return AskedModel(name=name, directory=place, transformers=config)


def _file_of(path: pathlib.Path) -> pathlib.Path:
    if path.is_file():
        return path
    for place in _PLACES:
        if (path / place).is_file():
            return path / place
    raise ConfigError(
        f"{path} holds no model configuration",
        why=f"{' and '.join(_PLACES)} were looked for",
        remedy="give the folder of a transformers or diffusers model",
    )


def _from_hub(model: str) -> pathlib.Path:
    words = model.split("/")
    if len(words) != 2 or not all(words) or words[0][0] in ".~":
        raise ConfigError(
            f"there is no model {model!r}",
            why="it is neither a known name, an existing file or folder, nor of the form of a hub "
            "id (owner/name)",
            remedy=f"check the path, or use a known name: {', '.join(known_names())}",
        )
    with explained(
        f"the configuration of {model} cannot be had from the hub",
        "check the id and your access to it (gated models need `hf auth login`), or give the path "
        "of its config.json",
    ):
        import huggingface_hub
        from huggingface_hub import errors

        for place in _PLACES:
            try:
                return pathlib.Path(huggingface_hub.hf_hub_download(model, place))
            except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
                raise HardwareError(
                    f"there is no directory {model}, and the hub cannot be reached",
                    why=f"its configuration is not in the hub's cache on this machine "
                    f"({' '.join(str(error).split())[:200]})",
                    remedy="check the path or the connection, or give a config.json",
                ) from error
            except errors.EntryNotFoundError:
                continue
        raise ConfigError(
            f"{model} has no configuration",
            why=f"{' and '.join(_PLACES)} were looked for",
            remedy="give the id of a transformers or diffusers model",
        )


def _read(file: pathlib.Path) -> dict[str, Any]:
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{file} cannot be read as JSON",
            why=str(error),
            remedy="give the config.json of a transformers or diffusers model",
        ) from error
    if not isinstance(settings, dict):
        raise ConfigError(
            f"{file} is not the configuration of a model",
            why="it is no JSON object",
            remedy="give the config.json of a transformers or diffusers model",
        )
    return settings
