"""The check of the vocabulary finds each kind of fault, and nothing in the source as it stands."""

import importlib.util
import pathlib
import sys
from types import ModuleType

import pytest

ROOT = pathlib.Path(__file__).parents[3]


def loaded() -> ModuleType:
    path = ROOT / "scripts" / "check_vocabulary.py"
    spec = importlib.util.spec_from_file_location("check_vocabulary", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["check_vocabulary"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


check = loaded()


def faults(root: pathlib.Path, text: str, path: str = "src/lohan/part/good.py") -> list[str]:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    return [str(fault) for fault in check.faults_in(root, exceptions={})]


def test_the_source_as_it_stands_is_clean() -> None:
    assert [str(fault) for fault in check.faults_in(ROOT)] == []


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("StripedFile", ["striped", "file"]),
        ("_striped_file", ["striped", "file"]),
        ("SSDFile", ["ssd", "file"]),
        ("NVMeStore", ["nvme", "store"]),
        ("H2D_RATE", ["h2d", "rate"]),
        ("adamw_v2", ["adamw", "v2"]),
        ("AdamWV2", ["adam", "wv2"]),
        ("__init__", ["init"]),
        ("P16", ["p16"]),
        ("ram_to_gpu", ["ram", "to", "gpu"]),
    ],
)
def test_names_are_split_into_words(name: str, words: list[str]) -> None:
    assert check.words_of(name) == words


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("nvme_path", "ssd"),
        ("NVMePath", "ssd"),
        ("vram_bytes", "gpu"),
        ("host_mem_bytes", "ram"),
        ("copy_h2d", "ram_to_gpu"),
        ("D2H", "gpu_to_ram"),
        ("gpu_to_cpu", "gpu_to_ram"),
        ("read_bw", "bytes_per_second"),
    ],
)
@pytest.mark.parametrize(
    "source",
    [
        "def {name}(): ...",
        "class {name}: ...",
        "{name} = 1",
        "def f(*, {name}): ...",
        "lambda {name}: 0",
        "self.{name} = 1",
        "import x as {name}",
        "for {name} in y: ...",
        "class A:\n    {name}: int",
    ],
)
def test_another_word_for_a_tier_or_lane_is_found_wherever_a_name_is_given(
    name: str, ours: str, source: str, tmp_path: pathlib.Path
) -> None:
    (found,) = faults(tmp_path, source.format(name=name))
    assert f"the word here is {ours}" in found


@pytest.mark.parametrize(
    "source", ["torch.vram()", "x.h2d", "import nvme", "'nvme'", "# nvme", "host = 1; memory = 2"]
)
def test_other_peoples_words_may_be_used_where_they_name_their_things(
    source: str, tmp_path: pathlib.Path
) -> None:
    assert faults(tmp_path, source) == []


@pytest.mark.parametrize("name", ["size", "bw", "limit", "time", "timeout"])
@pytest.mark.parametrize(
    "source",
    [
        "def read({name}): ...",
        "def read(*, {name}=1): ...",
        "async def read({name}, /): ...",
        "class Store:\n    def __init__(self, {name}): ...",
        "class Store:\n    {name}: int = 0",
        "if True:\n    def read({name}): ...",
    ],
)
def test_a_public_number_without_a_unit_is_found(
    name: str, source: str, tmp_path: pathlib.Path
) -> None:
    found = faults(tmp_path, source.format(name=name))
    assert any(f'"{name}" has no unit' in fault for fault in found)


@pytest.mark.parametrize(
    "source",
    [
        "def read(size_bytes, num_blocks, timeout_seconds): ...",
        "def _read(size): ...",
        "class _Row:\n    size: int",
        "class _Row:\n    def read(self, size): ...",
        "class Row:\n    def _read(self, size): ...",
        "def read():\n    size = 3\n    def inner(size): ...",
        "import time",
    ],
)
def test_private_and_local_names_may_be_short(source: str, tmp_path: pathlib.Path) -> None:
    assert faults(tmp_path, source) == []


def test_text_that_is_not_ascii_is_found_in_python_and_native_code(tmp_path: pathlib.Path) -> None:
    (found,) = faults(tmp_path / "a", "x = 1\n# caf\u00e9\n")
    assert found == (
        "src/lohan/part/good.py:2: U+00E9 is not ASCII: write it in ASCII, or as an escape in a "
        "string"
    )
    assert len(faults(tmp_path / "b", "// \u2013\n", path="native/src/io.cpp")) == 1


@pytest.mark.parametrize("word", ["TO" + "DO", "FIX" + "ME", "XXX"])
def test_a_note_for_later_is_found(word: str, tmp_path: pathlib.Path) -> None:
    assert len(faults(tmp_path / "a", f"x = 1  # {word}: later\n")) == 1
    assert len(faults(tmp_path / "b", f"// {word}\n", path="native/src/io.hpp")) == 1
    assert faults(tmp_path / "c", f"x = 1  # {word}ING\n") == []


def test_an_exception_lets_one_name_in_one_file_pass(tmp_path: pathlib.Path) -> None:
    assert len(faults(tmp_path, "def read(size): ...\n")) == 1
    excepted = {("src/lohan/part/good.py", "size"): "a reason"}
    assert check.faults_in(tmp_path, exceptions=excepted) == []


def test_an_exception_that_is_not_needed_is_a_fault(tmp_path: pathlib.Path) -> None:
    assert faults(tmp_path, "x = 1\n") == []
    (found,) = check.faults_in(tmp_path, exceptions={("src/lohan/old.py", "size"): "a reason"})
    assert "is not needed" in str(found)


def test_every_exception_has_a_reason() -> None:
    assert all(reason.strip() for reason in check.EXCEPTIONS.values())


def test_the_command_prints_faults_and_fails(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check.main([str(tmp_path)]) == 2
    assert "no src/lohan" in capsys.readouterr().err
    faults(tmp_path, "def copy_h2d(): ...\n")
    assert check.main([str(tmp_path)]) == 1
    assert "src/lohan/part/good.py:1:" in capsys.readouterr().out
    assert check.main([str(ROOT)]) == 0
