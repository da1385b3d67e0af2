"""`pip install lohan` without extras: what plans answers, what computes says what to install."""

import json
import pathlib
import subprocess
import sys
import tomllib

import pytest

from lohan.errors import missing_package

ROOT = pathlib.Path(__file__).parents[2]

# None of the packages can be imported; then every command, in one process, as JSON.
PROGRAM = """
import json, sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in MISSING:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

MISSING, COMMANDS = json.loads(sys.argv[1])
sys.meta_path.insert(0, Missing())
from typer.testing import CliRunner
from lohan.cli import app
done = [CliRunner().invoke(app, words) for words in COMMANDS]
import lohan
try:
    lohan.attach
except Exception as error:
    attaching = f"{type(error).__name__}: {error}"
print(json.dumps([attaching, [[one.exit_code, one.stdout, one.stderr] for one in done]]))
"""
MODEL = ["gpt2", "--machine", "desktop-4090", "--batch", "8"]
ANSWERING = [
    ["--help"],
    ["train", "--help"],
    ["models"],
    ["machines"],
    ["plan", *MODEL],
    ["simulate", *MODEL],
    ["compare", *MODEL],
    ["reproduce", "--rows", "rows.csv"],
]
REFUSING = [
    ["train", "--model", "m"],
    ["data", "preview", "rows.jsonl", "--model", "m"],
    ["verify", "gpt-13b"],
    ["profile", "--ssd", "."],
    ["check", "."],
    ["clean", "--ssd", "."],
    ["export", "r", "--ssd", ".", "--out", "o"],
    ["plan", "config.json", "--machine", "desktop-4090"],
]


def packages_of_extras() -> set[str]:
    """Importable names of what the extras for training bring and the core does not."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    lines = [line for name in ("models", "train") for line in extras[name]]
    names = {line.partition(">")[0].partition("[")[0] for line in lines} - {"lohan"}
    assert "torch" in names
    # The command line's own library builds on pydantic.
    return (names - {"pydantic", "pyyaml"}) | {"yaml"}


@pytest.mark.slow
def test_planning_needs_no_torch_and_the_rest_says_what_to_install(tmp_path: pathlib.Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    rows = (ROOT / "src" / "lohan" / "paper" / "published_numbers.csv").read_text()
    (tmp_path / "rows.csv").write_text("\n".join(rows.splitlines()[:6]))
    commands = [*ANSWERING, ["doctor", "--ssd", ".", "--json"], *REFUSING]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps([sorted(packages_of_extras()), commands])],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    attaching, results = json.loads(done.stdout)
    assert attaching.startswith("ConfigError: the package torch is not installed")
    assert "lohan[train]" in attaching
    by_command = dict(zip(map(tuple, commands), results, strict=True))
    for words in ANSWERING:
        code, stdout, stderr = by_command[tuple(words)]
        assert (code, stderr) == (0, ""), words
        assert stdout, words
    code, stdout, _ = by_command["doctor", "--ssd", ".", "--json"]
    found = {one["name"]: one for one in json.loads(stdout)["findings"]}
    assert code == 1
    assert "torch is not installed" in found["device"]["found"]
    assert "lohan[train]" in found["device"]["remedy"]
    assert found["SSD directory ."]["level"] != "problem"
    assert found["update kernels"]["found"].endswith("results not checked")
    for words in REFUSING:
        code, stdout, stderr = by_command[tuple(words)]
        assert code == 2, (words, stderr)
        assert stderr.count("error:") == 1, words
        assert "torch" in stderr, words
        assert 'pip install "lohan[train]"' in stderr, words
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "rows.csv"}


def test_a_missing_part_of_lohan_is_no_missing_package() -> None:
    with pytest.raises(ModuleNotFoundError, match="parts"):
        missing_package(ModuleNotFoundError("no parts", name="lohan.parts"))
