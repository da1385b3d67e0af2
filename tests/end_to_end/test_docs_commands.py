"""Commands shown in the documents run as shown."""

import pathlib
import re
import shlex

import pytest

from support.command_line import run_lohan

DOCS = pathlib.Path(__file__).parents[2] / "docs"
COMMANDS = sorted(
    {
        command
        for name in ("planning.md", "reproduction.md")
        for command in re.findall(r"^(?:\$ |    )lohan (.+)$", (DOCS / name).read_text(), re.M)
        # The shipped rows take long and have a test of their own.
        if command != "reproduce"
    }
)


BLOCKS = dict(
    block
    for name in ("planning.md", "reproduction.md")
    for block in re.findall(
        r"^```console\n\$ lohan ([^\n]+)\n(.*?)^```$", (DOCS / name).read_text(), re.M | re.S
    )
)


# Every policy at every batch. test_cli_compare compares two at their best batches, and the paper's
# claims in tests/unit/paper are of all of them.
SLOWEST = next(command for command in BLOCKS if "--best-batch" in command)


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        pytest.param(one, marks=pytest.mark.long if one == SLOWEST else [])
        for one in sorted({*COMMANDS, *BLOCKS})
    ],
)
def test_command_in_a_document_runs_and_prints_what_is_shown(
    command: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ran = run_lohan(*shlex.split(command))
    text = (DOCS / "planning.md").read_text()
    is_no = "exit code 1:\n\n```console\n$ lohan " + command in text
    assert ran.exit_code == int(is_no)
    assert ran.stderr == ""
    if command not in BLOCKS:
        return
    shown = BLOCKS[command].removeprefix("...\n")
    printed = "".join(f"{line.rstrip()}\n" for line in ran.stdout.splitlines())
    assert printed.endswith(shown), "run scripts/refresh_documents"
    assert printed == shown or BLOCKS[command] != shown


def test_documents_show_commands() -> None:
    assert len(COMMANDS) >= 5
