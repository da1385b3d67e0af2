"""`scripts/trl_suite` on a checkout with three tests, as TRL writes them."""

import json
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
TESTS = """
import torch
from datasets import load_dataset
from trl import RewardConfig, RewardTrainer


def made(folder, **changes):
    rows = load_dataset("trl-internal-testing/zen", "conversational_preference", split="train")
    args = RewardConfig(str(folder), report_to="none", max_steps=1, use_cpu=True, **changes)
    name = "trl-internal-testing/tiny-Qwen2ForCausalLM-2.5"
    return RewardTrainer(model=name, args=args, train_dataset=rows)


def test_train(tmp_path):
    trainer = made(tmp_path, learning_rate=0.1)
    before = {name: one.clone() for name, one in trainer.model.named_parameters()}
    trainer.train()
    for name, one in before.items():
        assert not torch.equal(one, trainer.model.get_parameter(name)), name


def test_refused(tmp_path):
    made(tmp_path, ignore_data_skip=True)


def test_fails_on_both():
    raise ValueError("as ever")
"""


def result(test: str, outcome: str, *, trainers: int, reason: str = "") -> dict[str, object]:
    return {"test": test, "outcome": outcome, "trainers": trainers, "reason": reason}


def test_known_results_are_counted_and_what_is_worse_is_named(tmp_path: pathlib.Path) -> None:
    """What was saved is not run again: this covers the long test, whose tests are really run."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_reward_trainer.py").touch()
    plain = [
        result("t::train", "passed", trainers=1),
        result("t::refused", "passed", trainers=1),
        result("t::both", "failed", trainers=0, reason="as ever"),
    ]
    ours = [
        result("t::train", "passed", trainers=1),
        result("t::refused", "refused", trainers=0, reason="ConfigError: is not"),
        result("t::both", "failed", trainers=0, reason="as ever"),
    ]
    sides = {"plain": plain, "ours": ours}
    known = {side: {str(one["test"]): one for one in found} for side, found in sides.items()}
    (tmp_path / "known.json").write_text(json.dumps({"reward": known}))
    ran = subprocess.run(
        [
            sys.executable,
            ROOT / "scripts" / "trl_suite",
            tmp_path,
            "--save",
            tmp_path / "known.json",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    counts = json.loads(ran.stdout.splitlines()[-1])["reward"]
    both = {"passed": 0, "refused": 0, "failed": 1, "skipped": 0}
    assert counts["plain"] == {**both, "trainer": 2, "passed": 2}
    assert counts["ours"] == {**both, "trainer": 1, "passed": 1, "refused": 1}
    worse = [line for line in ran.stdout.splitlines() if line.startswith("    ")]
    assert worse == ["    refused: t::refused: ConfigError: is not"]


@pytest.mark.long
def test_both_sides_are_counted_and_what_is_worse_is_named(tmp_path: pathlib.Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_reward_trainer.py").write_text(TESTS)
    ran = subprocess.run(
        [sys.executable, ROOT / "scripts" / "trl_suite", tmp_path, "--stand-ins"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    counts = json.loads(ran.stdout.splitlines()[-1])["reward"]
    both = {"trainer": 0, "passed": 0, "refused": 0, "failed": 1, "skipped": 0}
    assert counts["plain"] == {**both, "trainer": 2, "passed": 2}, ran.stdout
    assert counts["ours"] == {**both, "trainer": 1, "passed": 1, "refused": 1}, ran.stdout
    named = "refused: test_reward_trainer.py::test_refused: ConfigError: ignore_data_skip is not"
    assert named in ran.stdout


def test_a_folder_without_tests_is_refused(tmp_path: pathlib.Path) -> None:
    ran = subprocess.run(
        [sys.executable, ROOT / "scripts" / "trl_suite", tmp_path], capture_output=True, check=False
    )
    assert ran.returncode == 2
