"""Every command and every configuration in the documents uses names that exist."""

import pathlib
import re
import shlex

import pytest
import typer
import yaml

from lohan.cli import app
from lohan.cli.reading.extra_args import read_extra_args
from lohan.train.settings.config import REQUIRED, load_config

ROOT = pathlib.Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# A line of its own in a block: indented, or between fences.
COMMANDS = sorted(
    {
        (path.name, command)
        for path in PAGES
        for command in re.findall(
            r"^(?:    |\$ )?(?:\.venv/bin/)?lohan ([a-z].*)$",
            "\n".join(re.findall(r"^(?: {4}.*|```.*?^```)$", path.read_text(), re.M | re.S)),
            re.M,
        )
    }
)
CONFIGURATIONS = [
    (path.name, block)
    for path in PAGES
    for block in re.findall(r"^```yaml\n(.*?)^```$", path.read_text(), re.M | re.S)
]


def given_for_missing(fields: dict[str, object]) -> list[tuple[str, str]]:
    """What a part of a configuration leaves out and every run needs."""
    missing = [(key, "given") for key in REQUIRED if key not in fields]
    return missing if "offload" in fields else [*missing, ("offload.ssd", "given")]


@pytest.mark.parametrize(("page", "block"), CONFIGURATIONS)
def test_a_configuration_in_a_document_has_known_keys(
    page: str, block: str, tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(block)
    load_config(path, given_for_missing(yaml.safe_load(block)))


@pytest.mark.parametrize(("page", "command"), COMMANDS)
def test_a_command_in_a_document_has_known_words(page: str, command: str) -> None:
    words = shlex.split(command.split("  #")[0])
    found = typer.main.get_command(app)
    context = found.make_context("lohan", list(words), resilient_parsing=True)
    while hasattr(found, "resolve_command"):
        name, found, words = found.resolve_command(context, words)
        context = found.make_context(name, list(words), parent=context)
    if found.ignore_unknown_options:
        _, overrides = read_extra_args(context.args)
        overrides = [(key, value) for key, value in overrides if key not in REQUIRED]
        load_config(None, [*overrides, *given_for_missing({})])


def test_the_documents_have_commands_and_configurations() -> None:
    assert len(COMMANDS) > 25
    assert CONFIGURATIONS
