"""`lohan report`: the page of a run folder, made again."""

import pathlib

import pytest

from support.command_line import run_lohan
from support.run_folders import write_run_folder


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    return write_run_folder(tmp_path / "out", num_lines=20)


def test_the_report_goes_into_the_folder_and_is_made_again(folder: pathlib.Path) -> None:
    for _ in range(2):
        ran = run_lohan("report", folder)
        assert ran.exit_code == 0
        assert ran.stdout == f"wrote {folder / 'report.html'}\n"
    assert (folder / "report.html").read_text().startswith("<!doctype html>")


def test_another_place_is_not_overwritten_unasked(folder: pathlib.Path) -> None:
    other = folder.parent / "page.html"
    assert run_lohan("report", folder, "--out", other).exit_code == 0
    refused = run_lohan("report", folder, "--out", other)
    assert refused.exit_code == 2
    assert "exists already" in refused.stderr
    assert run_lohan("report", folder, "--out", other, "--force").exit_code == 0
    assert not (folder / "report.html").exists()


def test_a_folder_without_a_run_is_an_error(tmp_path: pathlib.Path) -> None:
    ran = run_lohan("report", tmp_path)
    assert ran.exit_code == 2
    assert "is not a run folder" in ran.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_page_is_shown_in_a_browser_when_asked(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda url: shown.append(url) or True)
    assert run_lohan("report", folder, "--open").exit_code == 0
    assert shown == [(folder / "report.html").as_uri()]


def test_a_machine_without_a_browser_still_has_the_page(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("webbrowser.open", lambda url: False)
    ran = run_lohan("report", folder, "--open")
    assert ran.exit_code == 2
    assert "was written, and no web browser could be started" in ran.stderr
    assert (folder / "report.html").exists()
