"""Training arguments on a command line: `--key value` for names that typer does not know.

Owns reading these words, and the refusal where the packages they belong to are missing. Used by
the commands that take every argument of TRL's SFTConfig.
"""

from typing import Any

from lohan.errors import ConfigError

# For typer: leave what is not known to `read_extra_args`.
FREE_OPTIONS = {"allow_extra_args": True, "ignore_unknown_options": True}
_USAGE = "lohan train [CONFIG.yaml] --model M --data rows.jsonl --ssd DIR --out OUT [--key value]"


def read_extra_args(words: list[str]) -> tuple[str | None, list[tuple[str, Any]]]:
    """Read what is left of a command line: at most one file, and pairs of --key and value.

    A --key without a value gives True.

    Raises:
        ConfigError: a word is neither.
    """
    path: str | None = None
    overrides: list[tuple[str, Any]] = []
    left = list(words)
    while left:
        word = left.pop(0)
        if word.startswith("--") and len(word) > 2:
            key, equals, text = word[2:].partition("=")
            value: str | bool = text
            if not equals:
                # A name alone switches on, as in the scripts of TRL; `load_config` refuses it
                # where that is not valid.
                is_alone = not left or (left[0].startswith("--") and len(left[0]) > 2)
                value = is_alone or left.pop(0)
            overrides.append((key.replace("-", "_"), value))
        elif path is None:
            path = word
        else:
            raise ConfigError(
                f'"{word}" stands alone', why=f"usage is {_USAGE}", remedy="put --key before it"
            )
    return path, overrides


def require_train_packages() -> None:
    """Refuse early and in words where only the core is installed.

    Raises:
        ConfigError: a package of the extra `train` is missing.
    """
    from importlib.util import find_spec

    missing = [
        name
        for name in (
            "torch",
            "transformers",
            "trl",
            "peft",
            "datasets",
            "accelerate",
            "yaml",
            "pydantic",
        )
        if find_spec(name) is None
    ]
    if missing:
        raise ConfigError(
            f"{', '.join(missing)} not installed",
            why="training builds on these packages; planning does not need them",
            remedy='install them with pip install "lohan[train]"',
        )
