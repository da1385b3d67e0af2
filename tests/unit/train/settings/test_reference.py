"""The configuration reference and the examples agree with the code."""

import importlib
import pathlib

import pytest

from lohan.train.settings.arguments import make_arguments, refuse_unsupported
from lohan.train.settings.config import load_config

ROOT = pathlib.Path(__file__).parents[4]
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))


def test_the_reference_is_the_one_of_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    reference = importlib.import_module("configuration_reference")
    written = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert written == reference.reference_text(), "run scripts/write_configuration_reference"


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_is_a_configuration(path: pathlib.Path) -> None:
    config = load_config(path)
    refuse_unsupported(make_arguments(config))
    assert config.offload.ssd


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 3
