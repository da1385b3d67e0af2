"""The commands of the documents about a run, in their order, on a tiny model."""

import pathlib
import re
import shlex

import pytest

from support import tiny_chat
from support.command_line import run_lohan
from support.trainer_engines import attach_small

DOCS = pathlib.Path(__file__).parents[2] / "docs"
PAGES = ("first-run.md", "choosing-ssds.md", "reading-a-report.md")


def commands(page: str) -> list[str]:
    return re.findall(r"^    lohan (.+)$", (DOCS / page).read_text(), re.M)


@pytest.mark.slow
def test_the_commands_of_the_documents_about_a_run_work_in_their_order(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lohan.train.trainer.saving.attach_with", attach_small)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    tiny_chat.save_model(tmp_path / "model")
    tiny_chat.write_jsonl(tmp_path / "chat.jsonl", tiny_chat.conversations(20))
    (tmp_path / "ssd").mkdir()
    for page in PAGES:
        assert commands(page), page
        for command in commands(page):
            ran = run_lohan(*shlex.split(command))
            assert ran.exit_code == 0, f"{page}: {command}\n{ran.stdout}{ran.stderr}"
    assert (tmp_path / "run" / "model.safetensors").is_file()
    assert (tmp_path / "run" / "_lohan" / "report.html").is_file()


@pytest.mark.slow
def test_the_table_of_drives_shows_what_plans_say() -> None:
    table = (DOCS / "choosing-ssds.md").read_text()
    for command in commands("choosing-ssds.md"):
        if not command.startswith("plan"):
            continue
        found = run_lohan(*shlex.split(command)).stdout
        seconds = re.search(r"^step time +([0-9.]+) s", found, re.M)
        share = re.search(r"^endurance used +([0-9.]+)%", found, re.M)
        assert seconds is not None
        assert share is not None
        assert f"| {seconds[1]} s |" in table
        assert f"| {float(share[1]):.1f} % |" in table
