"""The shape of the code base: imports point downward, rooms stay small, no torch below the line.

How large folders may grow is checked by scripts/sizes.
"""

import ast
import pathlib
import re
import subprocess
import sys

import pytest

SOURCE = pathlib.Path(__file__).parents[1] / "src" / "lohan"

# Rooms from the bottom up: a room imports itself and rooms of lines above its own in this list
# (ARCHITECTURE.md, "Rooms"). A folder's own files come above the rooms inside of it, but for
# `simulate.answers`.
ORDER = [
    {"vocabulary", "errors", "_native"},
    {
        "units",
        "durable_files",
        "working_folder",
        "matrix_tiles",
        "closing",
        "held_locks",
    },
    {"fields"},
    {"trace"},
    {"hardware", "model.tracing"},
    {"model"},
    {"plan"},
    {"schedule"},
    {"simulate", "ssd.engines", "device"},
    {"simulate.answers", "ssd.runs"},
    {"ssd"},
    {"store.format"},
    {"store.files"},
    {"store.seals"},
    {"store", "optimizer"},
    {"parallel"},
    {"drive.surroundings", "drive.weights"},
    {"drive.activations"},
    {"drive.watch"},
    {"drive.edges"},
    {"drive"},
    {"lanes"},
    {"engine.planning"},
    {"engine"},
    {"report"},
    {"measure"},
    {"paper"},
    {"attaching"},
    {"train.weights"},
    {"train.adapters"},
    {"train.data"},
    {"train.settings"},
    {"train.run"},
    {"train.trainer"},
    {"train.tasks"},
    {"train"},
    {"verify", "doctor"},
    {"cli.tables", "cli.reading"},
    {"cli"},
]
ROWS = {room: row for row, rooms in enumerate(ORDER) for room in rooms}

MAX_FILES = 15
# Parts that must answer at once: importing them must not import torch.
WITHOUT_TORCH = [
    "vocabulary",
    "units",
    "errors",
    "fields",
    "durable_files",
    "matrix_tiles",
    "trace",
    "hardware",
    "plan",
    "schedule",
    "simulate",
    "paper",
    "ssd",
    "model",
    "report",
    "doctor",
    "cli",
]


def room_of(name: str) -> str | None:
    """The innermost room that a module, or a name in it, belongs to: `engine.planning`."""
    pieces = name.split(".")
    whole = (".".join(pieces[:count]) for count in range(len(pieces), 0, -1))
    return next((room for room in whole if room in ROWS), None)


def own_room(path: pathlib.Path) -> str | None:
    return room_of(".".join(path.relative_to(SOURCE).with_suffix("").parts))


def imported_rooms(path: pathlib.Path) -> set[str]:
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; write the whole name"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            room = room_of(name.removeprefix("lohan.")) if name.startswith("lohan.") else None
            if room is not None:
                rooms.add(room)
    return rooms


MODULES = sorted(
    path for path in SOURCE.rglob("*.py") if path.name != "__init__.py" or path.parent != SOURCE
)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_downward(path: pathlib.Path) -> None:
    own = own_room(path)
    assert own is not None, "it has no room: add it to ORDER and to ARCHITECTURE.md"
    upward = {room for room in imported_rooms(path) if room != own and ROWS[room] >= ROWS[own]}
    assert not upward, f"{own} imports {upward}, which are not below it"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_published_systems_are_known_only_to_those_who_take_policies_by_name(
    path: pathlib.Path,
) -> None:
    if path.relative_to(SOURCE).with_suffix("").parts[0] not in ("paper", "attaching", "cli"):
        assert "paper" not in imported_rooms(path), "take the policy itself, not its name"


FOLDERS = sorted({path.parent for path in MODULES})


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: str(path.relative_to(SOURCE)))
def test_rooms_stay_small(folder: pathlib.Path) -> None:
    files = list(folder.glob("*.py"))
    assert len(files) <= MAX_FILES, f"{len(files)} files: cut it by concept"


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: str(path.relative_to(SOURCE)))
def test_rooms_say_what_they_are(folder: pathlib.Path) -> None:
    text = (folder / "__init__.py").read_text()
    assert ast.get_docstring(ast.parse(text)), (
        "say what it owns, who may import it, what it never does"
    )


@pytest.mark.parametrize("part", [part for part in WITHOUT_TORCH if list(SOURCE.glob(f"{part}*"))])
def test_part_does_not_import_torch(part: str) -> None:
    code = f"import sys, lohan.{part}; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=False)
    assert done.returncode == 0, f"lohan.{part} imports torch"


def test_a_step_can_be_read_in_one_sitting() -> None:
    """The walk of ARCHITECTURE.md names files that are there, and few enough to be read."""
    text = (SOURCE.parents[1] / "ARCHITECTURE.md").read_text()
    walk = text.partition("## A step, in ten minutes")[2].partition("| Question | Answer |")[0]
    folder, files = "", []
    for name in re.findall(r"`((?:[a-z_]+/)*[a-z_]+\.py)`", walk):
        folder = name.rpartition("/")[0] or folder
        files.append(SOURCE / folder / name.rpartition("/")[2])
    files = list(dict.fromkeys(files))
    assert [str(path) for path in files if not path.exists()] == []
    lines = sum(len(path.read_text().splitlines()) for path in files)
    assert 10 < len(files) <= 18, f"{len(files)} files"
    assert lines <= 6000, f"{lines} lines"
