#!/usr/bin/env python3
"""Check that the source speaks the project's language. Run by `scripts/check`.

Fails on: names that say another word for a tier or a lane; public parameters and fields that carry
a number without its unit; text that is not ASCII; notes to do something later. Other words are the
author's: plain English. Knows nothing of behaviour and imports nothing of lohan.

Usage: check_vocabulary.py [ROOT]    (ROOT holds src/lohan and native; default: this repository)
"""

import ast
import pathlib
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass

# (file below ROOT, name) -> why the rule does not hold there. One that is not needed fails too.
EXCEPTIONS: dict[tuple[str, str], str] = {
    ("src/lohan/units.py", "size"): "text with its unit inside, such as '8GiB', is what it takes",
}

# Other people's words for tiers and lanes, as runs of words in a name, and ours.
OUR_WORD = {
    ("nvme",): "ssd",
    ("vram",): "gpu, with memory_bytes or budget_bytes",
    ("hbm",): "gpu",
    ("dram",): "ram",
    ("host", "mem"): "ram",
    ("host", "memory"): "ram",
    ("cpu", "mem"): "ram",
    ("cpu", "memory"): "ram",
    ("h2d",): "ram_to_gpu",
    ("d2h",): "gpu_to_ram",
    ("htod",): "ram_to_gpu",
    ("dtoh",): "gpu_to_ram",
    ("cpu", "to", "gpu"): "ram_to_gpu",
    ("gpu", "to", "cpu"): "gpu_to_ram",
    ("bw",): "bytes_per_second",
}

# Numbers that need a unit: say `_bytes`, `_seconds`, `_per_second`, `_count` or `num_`.
WITHOUT_UNIT = {
    *("size", "bw", "bandwidth", "limit", "time", "timeout", "duration", "latency", "delay"),
    *("elapsed", "interval", "speed", "throughput"),
}

LATER = re.compile(r"\b(TODO|FIXME|XXX)\b")
TEXT_SUFFIXES = {".py", ".pyi", ".cpp", ".hpp", ".h", ".cmake"}
WORD = re.compile(r"[A-Z]+(?![a-z])\d*|[A-Z]?[a-z]+\d*(?:[a-z]+\d*)*|\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that is not as it should be; `name` is what an exception would have to name."""

    path: str
    line: int
    name: str
    says: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.says}"


def words_of(name: str) -> list[str]:
    """Split a name into lower-case words: `StripedFile`, `striped_file` and `_stripedFile`."""
    words: list[str] = []
    for part in name.replace("NVMe", "Nvme").split("_"):
        # H2D and V2 are one word each, though digits end a word elsewhere.
        words += [part] if part.isupper() else WORD.findall(part)
    return [word.lower() for word in words]


def foreign_in(name: str) -> str | None:
    """Return which word of ours a name should have used, or None."""
    words = words_of(name)
    for run, ours in OUR_WORD.items():
        for index in range(len(words) - len(run) + 1):
            if tuple(words[index : index + len(run)]) == run:
                return f'"{name}" says {"_".join(run)}: the word here is {ours}'
    return None


def defined_names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Return every name a file gives to something of its own, with its line."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name, node.lineno
            case ast.arg():
                yield node.arg, node.lineno
            case ast.Name(ctx=ast.Store()):
                yield node.id, node.lineno
            case ast.Attribute(ctx=ast.Store()):
                yield node.attr, node.lineno
            case ast.alias(asname=str() as name):
                yield name, node.lineno


def public_numbers(tree: ast.AST, *, is_public: bool = True) -> Iterator[tuple[str, int]]:
    """Return parameters of public functions and fields of public classes that may be numbers."""
    for node in ast.iter_child_nodes(tree):
        match node:
            case ast.ClassDef():
                is_open = is_public and not node.name.startswith("_")
                for field in node.body:
                    match field:
                        case ast.AnnAssign(target=ast.Name(id=name)) if is_open:
                            yield name, field.lineno
                yield from public_numbers(node, is_public=is_open)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                is_special = node.name.startswith("__") and node.name.endswith("__")
                if is_public and (is_special or not node.name.startswith("_")):
                    arguments = node.args
                    for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
                        yield one.arg, one.lineno
            case ast.If() | ast.Try() | ast.With():
                yield from public_numbers(node, is_public=is_public)


def faults_of_text(path: str, text: str) -> Iterator[Fault]:
    """Return what is wrong with the lines of any source file."""
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.isascii():
            odd = next(letter for letter in line if not letter.isascii())
            says = f"U+{ord(odd):04X} is not ASCII: write it in ASCII, or as an escape in a string"
            yield Fault(path=path, line=number, name="ascii", says=says)
        if LATER.search(line):
            says = "a note to do something later: do it, or write an issue"
            yield Fault(path=path, line=number, name="later", says=says)


def faults_of_names(path: str, text: str) -> Iterator[Fault]:
    """Return what is wrong with the names in a Python file, its own included."""
    stem = pathlib.PurePath(path).stem
    folders = pathlib.PurePath(path).parts[2:-1]
    for part in (*folders, *(() if stem == "__init__" else (stem,))):
        if says := foreign_in(part):
            yield Fault(path=path, line=1, name=part, says=says)
    tree = ast.parse(text, filename=path)
    for name, line in defined_names(tree):
        if says := foreign_in(name):
            yield Fault(path=path, line=line, name=name, says=says)
    for name, line in public_numbers(tree):
        if name in WITHOUT_UNIT:
            says = f'"{name}" has no unit: say {name}_bytes, {name}_seconds, num_... or what it is'
            yield Fault(path=path, line=line, name=name, says=says)


def faults_in(
    root: pathlib.Path, exceptions: dict[tuple[str, str], str] | None = None
) -> list[Fault]:
    """Return everything that is wrong below a root, exceptions taken out, by file and line."""
    allowed = EXCEPTIONS if exceptions is None else exceptions
    found: list[Fault] = []
    for folder in ("src/lohan", "native"):
        for file in sorted((root / folder).rglob("*")):
            if file.suffix not in TEXT_SUFFIXES and file.name != "CMakeLists.txt":
                continue
            path = file.relative_to(root).as_posix()
            text = file.read_bytes().decode("utf-8", "replace")
            found += faults_of_text(path, text)
            if file.suffix in (".py", ".pyi"):
                found += faults_of_names(path, text)
    used = {(fault.path, fault.name) for fault in found}
    kept = {fault for fault in found if (fault.path, fault.name) not in allowed}
    for path, name in allowed.keys() - used:
        says = f'the exception for "{name}" is not needed: take it out of check_vocabulary.py'
        kept.add(Fault(path=path, line=1, name=name, says=says))
    return sorted(kept, key=lambda fault: (fault.path, fault.line, fault.says))


def main(arguments: list[str]) -> int:
    """Print every fault; return 1 if there is one, 2 if there is nothing to check."""
    root = pathlib.Path(arguments[0]) if arguments else pathlib.Path(__file__).parents[1]
    if not (root / "src" / "lohan").is_dir():
        print(f"{root} has no src/lohan: give the root of the repository", file=sys.stderr)
        return 2
    faults = faults_in(root)
    for fault in faults:
        print(fault)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
