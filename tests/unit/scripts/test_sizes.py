"""Sizes are counted by room and held to a budget by folder."""

import importlib.machinery
import importlib.util
import pathlib
from collections import Counter
from types import ModuleType

ROOT = pathlib.Path(__file__).parents[3]


def loaded() -> ModuleType:
    loader = importlib.machinery.SourceFileLoader("sizes", str(ROOT / "scripts" / "sizes"))
    spec = importlib.util.spec_from_loader("sizes", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


script = loaded()


def test_files_and_lines_count_for_their_room_and_its_folder(tmp_path: pathlib.Path) -> None:
    for path, text in {
        "top.py": "1\n",
        "store/one.py": "1\n2\n",
        "store/seals/two.py": "1\n2\n3\n",
        "store/data.json": "{}\n",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    files, lines = script.sizes(tmp_path)
    assert files == {".": 1, "store": 1, "store/seals": 1}
    assert lines == {".": 1, "store": 2, "store/seals": 3}
    assert script.by_folder(lines) == {".": 1, "store": 5}


def test_a_folder_within_its_budget_has_no_fault() -> None:
    assert script.faults(Counter(store=5), {"store": 5}) == []


def test_what_is_above_without_or_gone_is_told() -> None:
    above, without, gone = script.faults(Counter(store=6, new=1), {"store": 5, "old": 5})
    assert above.startswith("store has 6 lines, 1 above its budget of 5")
    assert without == "new has no budget: give it one"
    assert gone == "old has a budget and is gone"
