"""What besides its weights makes a model the one a run was training, to tell another one.

Owns which of it counts: the configuration, the revision and code of its source, how attention is
computed, tokenizer and chat template. Where a model lies does not count, nor what a run sets
itself. Kept in seals and resume files, compared by resumes and exports.
"""

import hashlib
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from lohan.errors import ConfigError

MODEL_IDENTITY = "model_identity"
"""Its name in a seal."""
_CONFIG = "config."
_RELEASE = "transformers"
# Who wrote the configuration and where it lay; the run decides on number type and cache itself.
_NOT_THE_MODEL = frozenset(
    ("transformers_version", "_name_or_path", "name_or_path", "dtype", "torch_dtype", "use_cache")
)
# The tokenizer's last use, which rows from a table skip.
_OF_ITS_USE = ("truncation", "padding")
# What a tokenizer does besides its vocabulary: where it pads, where it cuts.
_OF_TOKENIZERS = ("padding_side", "truncation_side", "model_max_length", "special_tokens_map")


def source_identity(config: Any, directory: Path | None = None) -> dict[str, Any]:
    """What is known of a model from its files: one flat object for JSON.

    Args:
        config: transformers' configuration as it was found; None has none.
        directory: with the files, if there are any.
    """
    import transformers

    fields = config.to_dict() if hasattr(config, "to_dict") else {}
    found = {_RELEASE: transformers.__version__, **_flat(as_json(fields), _CONFIG)}
    if directory is not None:
        # The hub's cache names the folder of a snapshot by its commit.
        found["revision"] = directory.name if directory.parent.name == "snapshots" else None
        code = sorted(directory.glob("*.py")) if getattr(config, "auto_map", None) else []
        found["code"] = _hash(b"".join(path.read_bytes() for path in code)) if code else None
    return found


def tokenizer_identity(tokenizer: Any) -> dict[str, Any]:
    """Hashes of a tokenizer, or of that of a processor, and of its chat template; its settings."""
    template = getattr(tokenizer, "chat_template", None)
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
    fast = getattr(tokenizer, "backend_tokenizer", None)
    content: Any = None
    if fast is not None:
        content = json.loads(fast.to_str())
        content = {key: value for key, value in content.items() if key not in _OF_ITS_USE}
    elif hasattr(tokenizer, "get_vocab"):
        content = tokenizer.get_vocab()
    settings = {name: getattr(tokenizer, name, None) for name in _OF_TOKENIZERS}
    hashes = {"tokenizer": _hash_json(content), "chat_template": _hash_json(template)}
    return {**hashes, **_flat(as_json(settings), "tokenizer.")}


def of_source(identity: Mapping[str, Any]) -> dict[str, Any]:
    """The part of an identity that `source_identity` gives."""
    names = (_RELEASE, "revision", "code")
    return {k: v for k, v in identity.items() if k.startswith(_CONFIG) or k in names}


def refuse_other_model(
    before: Mapping[str, Any] | None, now: Mapping[str, Any], *, what: str
) -> None:
    """Refuse a model that is not the one it was, and show the difference.

    Args:
        before: as it was kept; None for seals of older releases, which know nothing of it.
        what: kept it.

    Raises:
        ConfigError: something is different.
    """
    if before is None:
        return
    unknown: set[str] = set()
    if before.get(_RELEASE) != now.get(_RELEASE):
        # Another release has settings with defaults that this one does not know.
        unknown = {name for name in before.keys() ^ now.keys() if name.startswith(_CONFIG)}
    changed = differences(before, now, but={_RELEASE, *unknown})
    if changed:
        pinned = before.get("revision")
        raise ConfigError(
            f"the model is not that of {what}: " + "; ".join(changed),
            why="the weights were trained with what was there before, and do not fit another",
            remedy="bring the model's files back as they were"
            + (f" (model_init_kwargs with revision: {pinned})" if pinned else "")
            + ", or name a model that has them",
        )


def differences(
    before: Mapping[str, Any], now: Mapping[str, Any], *, but: Collection[str] = ()
) -> list[str]:
    """`name: then -> now` for each name whose values differ."""
    return [
        f"{name}: {_shown(before.get(name))} -> {_shown(now.get(name))}"
        for name in sorted(before.keys() | now.keys())
        if name not in but and before.get(name) != now.get(name)
    ]


def as_json(found: Mapping[str, Any]) -> dict[str, Any]:
    """As JSON gives it back; what JSON cannot hold, infinity too, becomes its text."""
    plain = json.loads(json.dumps(dict(found), default=str), parse_constant=str)
    assert isinstance(plain, dict)
    return plain


def _flat(fields: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in fields.items():
        if name in _NOT_THE_MODEL:
            continue
        found |= (
            _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
        )
    return found


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:120]}..."


def _hash_json(content: Any) -> str | None:
    return None if content is None else _hash(json.dumps(content, sort_keys=True).encode())


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
