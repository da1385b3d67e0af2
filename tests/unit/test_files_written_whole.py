"""A file is there whole or not at all, and nothing else is."""

import fcntl
from pathlib import Path

from lohan.durable_files import replace_text


def test_what_killed_writers_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    left = tmp_path / ".report.html.abc.lohan-partial"
    left.write_text("half a pa")
    others = tmp_path / ".report.html.backup", tmp_path / ".other.html.abc.lohan-partial"
    for other in others:
        other.write_text("kept")
    held = tmp_path / ".report.html.def.lohan-partial"
    with held.open("w") as writer:
        fcntl.flock(writer, fcntl.LOCK_EX)
        replace_text(tmp_path / "report.html", "whole")
        assert held.exists()
    assert not left.exists()
    assert all(other.read_text() == "kept" for other in others)
    replace_text(tmp_path / "report.html", "again")
    assert sorted(tmp_path.iterdir()) == sorted([*others, tmp_path / "report.html"])
    assert (tmp_path / "report.html").read_text() == "again"
