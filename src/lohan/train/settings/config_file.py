"""A file of settings: YAML without surprises.

Owns reading it. What the keys mean is `config`'s.
"""

import pathlib
from typing import Any

from lohan.errors import ConfigError


def read_file(path: pathlib.Path) -> dict[str, Any]:
    """What is written in a file, by key.

    Raises:
        ConfigError: it cannot be read, or is not YAML.
    """
    import yaml

    remedy = "correct the file, or leave it out and give everything with --key value"
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(
            f"there is no file {path}", why="the configuration is read from it", remedy=remedy
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read", why=str(error), remedy=remedy) from error
    try:
        found = yaml.load(text, Loader=_strict_loader())
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigError(f"{path} is not YAML", why=_one_line(error), remedy=remedy) from error
    if found is None:
        return {}
    if not isinstance(found, dict):
        why = "lines of the form key: value are expected"
        raise ConfigError(f"{path} holds no settings", why=why, remedy=remedy)
    return found


def _strict_loader() -> Any:
    """YAML without Python objects, and without a key that silently wins over its twin."""
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            own = (key for key, _ in node.value if not key.tag.endswith(":merge"))
            keys = [self.construct_object(key, deep=True) for key in own]
            for key in keys:
                if keys.count(key) > 1:
                    raise yaml.constructor.ConstructorError(
                        None, None, f'the key "{key}" is written twice', node.start_mark
                    )
            found: dict[Any, Any] = super().construct_mapping(node, deep)
            return found

    return Loader


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
