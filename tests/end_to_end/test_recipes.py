"""Every recipe in `examples/` trains a tiny model of its family, and says what its plan says."""

import json
import math
import pathlib
import re
import runpy
import shlex

import pytest

from lohan.train.data.dataset import load_rows
from lohan.train.data.preview import prepare_tokens
from lohan.train.settings.arguments import make_arguments
from lohan.train.settings.config import load_config
from support import tiny_chat
from support.chat_families import family_of, shown
from support.command_line import run_lohan
from support.trainer_engines import attach_small

ROOT = pathlib.Path(__file__).parents[2]
RECIPES = sorted((ROOT / "examples").glob("*.yaml"))
REFRESH = runpy.run_path(str(ROOT / "scripts" / "refresh_documents"))
recipes = pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)


@recipes
def test_a_recipe_trains_on_the_answers(
    recipe: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lohan.train.trainer.saving.attach_with", attach_small)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    config = load_config(recipe)
    family = family_of(config.model)
    model = family.save_model(tmp_path / "model")
    *asked, answer = family.chat
    worse = [{**answer, "content": "three"}]
    row = {
        "sft": {"messages": family.chat},
        "pairs": {"prompt": asked, "chosen": [answer], "rejected": worse},
    }[config.task.rows]
    rows = tiny_chat.write_jsonl(tmp_path / "rows.jsonl", [row] * 8)
    tokenizer = family.tokenizer()
    prepared = prepare_tokens(
        load_rows([str(rows)], forms=config.task.rows),
        tokenizer,
        make_arguments(config),
        "m",
        config.task.trainer_class(),
    )
    for row in prepared if config.task.rows == "sft" else ():
        assert shown(row["input_ids"], row["labels"], tokenizer).endswith(family.expected)
    words = ["--model", model, "--data", rows, "--out", tmp_path / "out", "--device", "cpu"]
    words += ["--ssd", tmp_path / "ssd", "--max_steps", "2"]
    words += ["--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "2"]
    if config.eval_data:
        words += ["--eval_data", rows, "--eval_steps", "1"]
    (tmp_path / "ssd").mkdir()
    done = run_lohan("train", recipe, *words)
    assert done.exit_code == 0, done.stderr
    lines = (tmp_path / "out" / "_lohan" / "log.jsonl").read_text().splitlines()
    losses = [entry["loss"] for entry in map(json.loads, lines) if "loss" in entry]
    assert len(losses) == 2
    assert all(map(math.isfinite, losses))
    assert losses[0] > 0


def plan_command(recipe: pathlib.Path) -> dict[str, str]:
    """Options of the plan in a recipe's head, its model as `model`."""
    found = re.search(r"^# \$ lohan plan (.*)$", recipe.read_text(), re.M)
    assert found is not None
    model, *words = shlex.split(found[1])
    options = dict(zip(words[::2], words[1::2], strict=True))
    return {"model": model, **{key.removeprefix("--"): value for key, value in options.items()}}


@recipes
def test_the_plan_of_a_recipe_is_about_the_recipe(recipe: pathlib.Path) -> None:
    config, asked = load_config(recipe), plan_command(recipe)
    arguments = config.arguments
    assert config.model.split("/")[-1].lower().startswith(asked["model"])
    batch = arguments["per_device_train_batch_size"] * arguments["gradient_accumulation_steps"]
    batch *= 2 if config.task.rows == "pairs" else 1
    assert int(asked["batch"]) == batch
    assert int(asked["seq"]) == arguments["max_length"]
    rank = None if config.adapter is None else str(config.adapter.lora_r)
    assert asked.get("lora_r") == rank
    preset = {"desktop-4090": "1", "workstation-4090": "2"}[asked["machine"]]
    assert int(asked.get("ssds", preset)) == len(config.offload.ssd)


# Its plan takes as long as those of all others together, which have adapters and 70B too.
SLOWEST = "llama-3.1-70b-lora-4090"


@pytest.mark.slow
@pytest.mark.parametrize(
    "example",
    [
        pytest.param(path, marks=pytest.mark.long if path.stem == SLOWEST else [], id=path.stem)
        for path in (*RECIPES, ROOT / "examples" / "diffusion.py")
    ],
)
def test_an_example_says_what_its_plan_says_today(example: pathlib.Path) -> None:
    text = example.read_text()
    assert "$ lohan plan" in text

    def ask(command: str) -> str:
        ran = run_lohan(*shlex.split(command))
        assert ran.exit_code == 0, ran.stderr
        return ran.stdout

    assert REFRESH["refreshed_example"](text, ask) == text, "run scripts/refresh_documents"
