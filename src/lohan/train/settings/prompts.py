"""`sample_prompts` as it is written: questions, conversations, or files with a question per line.

Owns reading them. Asking a model is `samples`' business.
"""

import os
import pathlib
from collections.abc import Mapping
from typing import Any

from lohan.errors import ConfigError

Prompt = str | list[dict[str, Any]]
"""A question, or the messages of a conversation that the model is to go on with."""


def read_prompts(value: Any) -> tuple[Prompt, ...]:
    """The prompts in a setting: one, or a list of them; a path of a file stands for its lines.

    Raises:
        ConfigError: something is neither a text nor a conversation, or a file cannot be read.
    """
    if value is None:
        return ()
    is_one = isinstance(value, str | os.PathLike) or _is_conversation(value)
    found: list[Prompt] = []
    for one in [value] if is_one else value if isinstance(value, list | tuple) else [value]:
        if _is_conversation(one):
            found.append([dict(message) for message in one])
        elif isinstance(one, str | os.PathLike) and os.fspath(one).strip():
            found += _lines(pathlib.Path(one)) if os.path.isfile(one) else [str(one)]
        else:
            raise ConfigError(
                f"sample_prompts has {one!r}",
                why="a prompt is a text, a list of messages (role, content), or a file of texts",
                remedy="write a question, or a list of questions",
            )
    return tuple(found)


def _is_conversation(value: Any) -> bool:
    return (
        isinstance(value, list | tuple)
        and bool(value)
        and all(isinstance(one, Mapping) and {"role", "content"} <= one.keys() for one in value)
    )


def _lines(path: pathlib.Path) -> list[str]:
    try:
        return [
            line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()
        ]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the prompts in {path} cannot be read", why=str(error), remedy="give a text file"
        ) from error


def shown_prompt(prompt: Prompt) -> str:
    """A prompt in one line; of a conversation its last message."""
    text = prompt if isinstance(prompt, str) else str(prompt[-1]["content"])
    return " ".join(text.split())
