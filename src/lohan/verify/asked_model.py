"""The configuration of the model a user names: a known name, a file, a directory, or a hub id.

Owns telling these apart. Of a model on the hub only the configuration is fetched. Builds nothing
and reads no weights. Called by `small_copy`.
"""

import pathlib
from dataclasses import dataclass
from typing import Any

from lohan.errors import ConfigError
from lohan.model.configs import CONFIG_PLACES, read_config
from lohan.model.names import canonical_name, known_names
from lohan.model.public_models import PUBLIC_MODELS
from lohan.train.weights.meta_model import explained
from lohan.train.weights.model_places import find_place


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
    place = path if path.exists() and model.strip() else _from_hub(model)
    file, settings = read_config(place, needs_type=not trust_remote_code)
    name = model if not path.exists() else path.name or str(path)
    if "_class_name" in settings:
        return AskedModel(name=name, directory=file.parent, diffusers=settings)
    source = file.parent if file.name == "config.json" else file
    return _from_transformers(name, source, trust_remote_code)


def _known(name: str) -> AskedModel:
    if name not in PUBLIC_MODELS:
        return AskedModel(name=name, directory=pathlib.Path(), known=name)
    public = PUBLIC_MODELS[name]
    if public.model_type is None:
        return AskedModel(name=name, directory=pathlib.Path(), diffusers=public.settings)
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


def _from_hub(model: str) -> pathlib.Path:
    if "/" not in model:
        raise ConfigError(
            f"there is no model {model!r}",
            why="it is neither a known name, an existing file or folder, nor of the form of a hub "
            "id (owner/name)",
            remedy=f"check the path, or use a known name: {', '.join(known_names())}",
        )
    return find_place(model, wanted=CONFIG_PLACES).directory
