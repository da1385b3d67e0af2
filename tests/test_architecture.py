"""The shape of the code base: imports point downward, files stay small, no torch below the line."""

import ast
import pathlib
import subprocess
import sys

import pytest

SOURCE = pathlib.Path(__file__).parents[1] / "src" / "lohan"

# Row of every part. A part imports only itself and parts of lower rows (ARCHITECTURE.md, "Rows").
ROWS = {
    "cli": 10,
    "verify": 8.75,
    "doctor": 8.75,
    "train": 8.5,
    "attaching": 8.25,
    "measure": 8,
    "report": 7.5,
    "runtime": 7,
    "store": 6,
    "optimizer": 6,
    "parallel": 6,
    "simulate": 5,
    "ssd": 5,
    "device": 5,
    "schedule": 4,
    "plan": 3,
    "hardware": 2,
    "model": 2,
    "trace": 1,
    "fields": 0.75,
    "units": 0.5,
    "whole_file": 0.5,
    "working_folder": 0.5,
    "matrix_tiles": 0.5,
    "vocabulary": 0,
    "errors": 0,
    "_native": 0,
}

MAX_LINES = 400
# Parts that must answer at once: importing them must not import torch.
WITHOUT_TORCH = [
    "vocabulary",
    "units",
    "errors",
    "fields",
    "whole_file",
    "matrix_tiles",
    "trace",
    "hardware",
    "plan",
    "schedule",
    "simulate",
    "ssd",
    "model",
    "report",
    "doctor",
    "cli",
]


def part_of(path: pathlib.Path) -> str:
    first = path.relative_to(SOURCE).parts[0]
    return first.removesuffix(".py").removesuffix(".pyi")


def imported_parts(path: pathlib.Path) -> set[str]:
    parts = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; write the whole name"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            pieces = name.split(".")
            if pieces[0] == "lohan" and len(pieces) > 1 and pieces[1] in ROWS:
                parts.add(pieces[1])
    return parts


MODULES = sorted(
    path for path in SOURCE.rglob("*.py") if path.name != "__init__.py" or path.parent != SOURCE
)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_downward(path: pathlib.Path) -> None:
    own = part_of(path)
    assert own in ROWS, f"{own} has no row: add it to ROWS and to ARCHITECTURE.md"
    upward = {part for part in imported_parts(path) if part != own and ROWS[part] >= ROWS[own]}
    assert not upward, f"{own} (row {ROWS[own]}) imports {upward}, which are not below it"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_files_stay_small(path: pathlib.Path) -> None:
    lines = len(path.read_text().splitlines())
    assert lines <= MAX_LINES, f"{lines} lines: split by concept"


@pytest.mark.parametrize("part", [part for part in WITHOUT_TORCH if list(SOURCE.glob(f"{part}*"))])
def test_part_does_not_import_torch(part: str) -> None:
    code = f"import sys, lohan.{part}; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=False)
    assert done.returncode == 0, f"lohan.{part} imports torch"
