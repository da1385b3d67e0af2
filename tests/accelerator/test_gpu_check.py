"""`scripts/gpu_check` on the test accelerator: what it would show of a card."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from support import accelerator
from support.small_machines import small_machine

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu_check_report.py"
SMALL = {
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("gpu_check_report", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("is_padded", [True, False])
def test_steps_are_shown_beside_the_plan(script: Any, is_padded: bool, tmp_path: Path) -> None:
    shape = script.Shape(settings=SMALL, num_rows=2, num_tokens=16, is_padded=is_padded)
    result = script.of_work(
        "steps",
        lambda: script.steps_of(
            shape,
            num_steps=4,
            ssd=[tmp_path],
            device=accelerator.NAME,
            ram=64 << 20,
            gpu=64 << 20,
            machine=small_machine(1),
        ),
    )
    text = result.text()
    assert result.is_good, text
    assert "| | the plan said | measured |" in text
    for name in ("seconds per step", "GPU peak", "RAM peak", "read per step", "bottleneck"):
        assert f"| {name} | " in text, text
    assert f"device {accelerator.NAME}:0" in text
    assert list(tmp_path.iterdir()) == []


def test_what_fails_is_told_with_its_notes_and_the_rest_goes_on(script: Any) -> None:
    def failing() -> list[str]:
        error = ValueError("no such card")
        error.add_note("in forward b1")
        raise error

    result = script.of_work("steps", failing)
    assert not result.is_good
    assert "FAILED" in result.text()
    assert "no such card" in result.text()
    assert "in forward b1" in result.text()


def test_a_command_is_shown_with_its_end(script: Any) -> None:
    good = script.of_command("echo", [sys.executable, "-c", "print('hello')"])
    assert good.is_good
    assert "hello" in good.text()
    bad = script.of_command("exit", [sys.executable, "-c", "raise SystemExit(3)"])
    assert not bad.is_good
    assert "ended with 3" in bad.text()


def test_the_facts_name_the_card(script: Any) -> None:
    assert "1 x test accelerator, 8.0 GiB" in "\n".join(script.facts())
