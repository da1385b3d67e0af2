"""The tokenizer of a run, with the chat template that was asked for.

Owns how `chat_template_path` is honoured. Called by `fine_tune`, by the preview's command and by
trainers of a model given by name.
"""

import os
import pathlib
from typing import Any

from lohan.errors import ConfigError
from lohan.train.weights.model_places import ModelPlace


def load_tokenizer(place: ModelPlace, args: Any) -> Any:
    """The tokenizer of a model, with the chat template that was asked for; weights are not needed.

    Raises:
        ConfigError: there is no tokenizer, or the template cannot be read.
    """
    from lohan.train.weights.source import tokenizer_in

    tokenizer = tokenizer_in(place, trust_remote_code=args.trust_remote_code)
    return with_template(tokenizer, args)


def with_template(tokenizer: Any, args: Any) -> Any:
    """The tokenizer with the chat template that was asked for, and with no token more.

    Raises:
        ConfigError: the template cannot be read.
    """
    import transformers

    path = getattr(args, "chat_template_path", None)
    if path is None:
        return tokenizer
    # Set here, so that TRL does not add tokens: the embedding keeps its size.
    args.chat_template_path = None
    if os.path.isfile(path):
        tokenizer.chat_template = _read_template(pathlib.Path(path))
        return tokenizer
    try:
        template = transformers.AutoTokenizer.from_pretrained(path).chat_template
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"chat_template_path is {path}, which is no file and no model",
            why=" ".join(str(error).split())[:300],
            remedy="give a .jinja file, or a model whose tokenizer has a template",
        ) from error
    if not template:
        raise ConfigError(
            f"the tokenizer of {path} has no chat template",
            why="conversations are rendered by it",
            remedy="give a .jinja file, or another model",
        )
    tokenizer.chat_template = template
    return tokenizer


def _read_template(path: pathlib.Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the chat template {path} cannot be read",
            why=str(error),
            remedy="give a .jinja file in UTF-8",
        ) from error
