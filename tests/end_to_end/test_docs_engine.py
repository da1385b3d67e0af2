"""The code in docs/engine.md runs, one piece after the other, as a reader would type it."""

import re
from pathlib import Path
from typing import Any

import pytest

from support.profiles import keep_quick_profile

PAGE = Path(__file__).parents[2] / "docs" / "engine.md"
PIECES = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S)


@pytest.mark.slow
def test_the_code_of_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    drives = [tmp_path / "nvme0" / "lohan", tmp_path / "nvme1" / "lohan"]
    for drive in drives:
        drive.mkdir(parents=True)
    for used in (drives, drives[:1]):
        keep_quick_profile(tmp_path / "cache", used)
    names: dict[str, Any] = {"__name__": "engine_page"}
    for number, piece in enumerate(PIECES):
        code = piece.replace("/mnt/", f"{tmp_path}/")
        exec(compile(code, f"piece {number} of {PAGE.name}", "exec"), names)
    assert [list(drive.iterdir()) for drive in drives] == [[], []]
    assert (tmp_path / "step.json").stat().st_size > 1000
    printed = capsys.readouterr().out
    assert "does not fit in 2.0 MiB" in printed
    assert "allow at least ram=" in printed
    assert "busy" in printed


def test_the_page_shows_every_call_of_the_engine() -> None:
    """What the engine offers and the page does not say would not be found."""
    from lohan.engine.engine import Engine

    text = PAGE.read_text()
    offered = {name for name in dir(Engine) if not name.startswith("_")}
    # For trainers; a user has `largest_step`, `Engine.weights` and `run=`.
    inner = {"prepare", "counters", "buffers", "store", "layout", "synchronize", "device"}
    inner |= {"is_rehearsing"}
    assert {name for name in offered - inner if name not in text} == set()
    assert inner <= offered | {"device"}
