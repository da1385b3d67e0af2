"""Names of TRL's and transformers' training arguments, read without importing either.

Owns reading them from the packages' sources: importing both takes seconds, and a misspelt key is
named at once. Called by `config`.
"""

import ast
import functools
import importlib.util
import pathlib

_BASES = (
    ("trl", "trainer/base_config.py", "_BaseConfig"),
    ("transformers", "training_args.py", "TrainingArguments"),
)
"""Each is derived from the next: package, file, class."""


@functools.cache
def argument_names(module: str, name: str) -> frozenset[str] | None:
    """Names of the arguments of a class of trl; None where its classes are not laid out as they
    are known."""
    names: set[str] = set()
    classes = (("trl", f"{module.replace('.', '/')}.py", name), *_BASES)
    bases = [base for _, _, base in _BASES]
    for (package, file, one), base in zip(classes, [*bases, None], strict=True):
        found = _class_in(package, file, one)
        expected = [] if base is None else [base]
        if found is None or [ast.unparse(one) for one in found.bases] != expected:
            return None
        names.update(_field_names(found))
    return frozenset(names)


def _class_in(package: str, file: str, name: str) -> ast.ClassDef | None:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    path = pathlib.Path(spec.submodule_search_locations[0], file)
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError):
        return None
    classes = (one for one in tree.body if isinstance(one, ast.ClassDef))
    return next((one for one in classes if one.name == name), None)


def _field_names(found: ast.ClassDef) -> set[str]:
    return {
        line.target.id
        for line in found.body
        if isinstance(line, ast.AnnAssign)
        and isinstance(line.target, ast.Name)
        and not ast.unparse(line.annotation).startswith("ClassVar")
        and not (line.value is not None and "init=False" in ast.unparse(line.value))
    }
