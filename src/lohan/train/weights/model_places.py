"""Where a model is: a directory, a hub id, or a GGUF file.

Owns telling these apart and downloading from the hub, safetensors and small text files only. Reads
nothing of what it finds, and needs no torch until it downloads. Called by `source` and `config`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lohan.errors import ConfigError, HardwareError

CONFIGURATION = ("config.json", "generation_config.json")
TOKENIZER_FILES = (
    "tokenizer*",
    "*.model",
    "*.tiktoken",
    "vocab.*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
)
TEMPLATES = "additional_chat_templates"
PROCESSORS = ("preprocessor_config.json", "processor_config.json")
TOKENIZER = (*TOKENIZER_FILES, f"{TEMPLATES}/*", *PROCESSORS)
ALL_BUT_WEIGHTS = (*CONFIGURATION, *TOKENIZER, "model.safetensors.index.json", "LICENSE*")
EVERYTHING = (*ALL_BUT_WEIGHTS, "model.safetensors", "model-*-of-*.safetensors")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPlace:
    """A directory on this machine, and the GGUF file in it if that is the model."""

    directory: Path
    gguf_file: str | None = None
    has_files: bool = True
    """False for a model that is known by its configuration only."""
    has_weights: bool = True
    """False for a model on the hub of which everything else is here."""


def find_place(
    model: str | Path,
    wanted: Sequence[str] = EVERYTHING,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> ModelPlace:
    """Find a model, downloading what is wanted of it if it is given by its hub id.

    Raises:
        ConfigError: there is no such file, directory or model.
        HardwareError: the hub cannot be reached and the model is not in its cache.
    """
    place = local_place(model)
    patterns = [*wanted, *(["*.py"] if trust_remote_code else [])]
    return place or _in_directory(_download(str(model), revision, patterns))


def local_place(model: str | Path) -> ModelPlace | None:
    """A model on this machine; None for what has the form of a hub id.

    Raises:
        ConfigError: it is neither.
    """
    if not str(model):
        raise ConfigError(
            "no model is given",
            why="the name is empty",
            remedy="give a directory, a hub id (owner/name), or a GGUF file",
        )
    path = Path(model).expanduser()
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ConfigError(
                f"{path} is a file, and not a GGUF file",
                why="a model in safetensors is a directory with a config.json",
                remedy="give the directory the file is in",
            )
        return ModelPlace(directory=path.parent, gguf_file=path.name)
    if path.is_dir():
        return _in_directory(path)
    words = str(model).split("/")
    is_hub_id = (
        isinstance(model, str) and len(words) <= 2 and all(words) and words[0][0] not in ".~"
    )
    if not is_hub_id:
        raise ConfigError(
            f"there is no model at {model}",
            why="the path does not exist, and it is not the form of a hub id (owner/name)",
            remedy="check the path",
        )
    return None


def _in_directory(path: Path) -> ModelPlace:
    if (path / "config.json").exists() or any(path.glob("*.safetensors")):
        return ModelPlace(directory=path)
    gguf_files = sorted(file.name for file in path.glob("*.gguf"))
    if len(gguf_files) > 1:
        from lohan.train.weights.checkpoint_files import shown

        raise ConfigError(
            f"{path} holds {len(gguf_files)} GGUF files ({shown(gguf_files)})",
            why="each of them is a model of its own",
            remedy="give the path of one of them",
        )
    return ModelPlace(directory=path, gguf_file=gguf_files[0] if gguf_files else None)


def _download(name: str, revision: str | None, patterns: list[str]) -> Path:
    from lohan.train.weights.meta_model import explained

    with explained(
        f"the model {name} cannot be had from the hub",
        "check the id, the revision and your access to it (gated models need `hf auth login`), or "
        "give the path of a directory",
    ):
        import huggingface_hub
        from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

        try:
            found = huggingface_hub.snapshot_download(
                name, revision=revision, allow_patterns=patterns
            )
        except (LocalEntryNotFoundError, OfflineModeIsEnabled, ConnectionError) as error:
            raise HardwareError(
                f"there is no directory {name}, and the hub cannot be reached",
                why=f"the model is not in the hub's cache on this machine "
                f"({' '.join(str(error).split())[:200]})",
                remedy="check the path or the connection, or download the model elsewhere and give "
                "its directory",
            ) from error
    return Path(found)
