"""Names of training arguments without importing TRL, and mistakes that are named before it is."""

import pathlib
import subprocess
import sys

import pytest

from lohan.train.settings import tasks as module
from lohan.train.settings.config import argument_fields
from lohan.train.settings.tasks import TASKS, Task, argument_names


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS.keys())
def test_the_names_are_those_of_the_class_itself(task: Task) -> None:
    import dataclasses

    fields = dataclasses.fields(task.arguments_class())
    expected = {field.name for field in fields if field.init}
    assert argument_names(*task.arguments) == expected
    assert argument_fields(task).keys() < expected


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("trainer.sft_config", "OtherConfig"),
        ("trainer.none", "SFTConfig"),
        ("trainer.base_config", "_BaseConfig"),
    ],
    ids=["class", "file", "base"],
)
def test_another_layout_is_not_guessed_at(file: str, name: str) -> None:
    assert argument_names(file, name) is None


def test_a_package_that_is_not_there_is_not_guessed_at(monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = ("no_such_package", "training_args.py", "TrainingArguments")
    monkeypatch.setattr(module, "_BASES", (module._BASES[0], unknown))
    argument_names.cache_clear()
    assert argument_names("trainer.sft_config", "SFTConfig") is None
    argument_names.cache_clear()


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--lora_rank", "8"), 'unknown key "lora_rank"'),
        (("--ram", "5Gx"), "'5Gx' is not a size"),
        (("--model", "/no/such/model"), "there is no model at /no/such/model"),
        (("--data", "none.jsonl"), "there is no file none.jsonl"),
        (("--ssd", "/no/such/drive"), "/no/such/drive"),
    ],
)
def test_keys_sizes_and_paths_are_refused_before_anything_long_is_imported(
    tmp_path: pathlib.Path, words: tuple[str, str], named: str
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "a"}\n')
    out = tmp_path / "out"
    given = {"--model": "some/model", "--data": str(rows), "--ssd": str(tmp_path)}
    given |= {"--out": str(out), words[0]: words[1]}
    code = (
        "import sys\n"
        "from lohan.cli import main\n"
        "try:\n"
        "    main()\n"
        "finally:\n"
        "    print(*{'torch', 'transformers', 'trl', 'datasets'} & sys.modules.keys())\n"
    )
    line = [word for pair in given.items() for word in pair]
    done = subprocess.run(
        [sys.executable, "-c", code, "train", *line], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2, done.stderr
    assert named in done.stderr
    assert done.stdout.split() == []
    assert not out.exists()
