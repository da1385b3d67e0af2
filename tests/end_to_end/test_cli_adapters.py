"""An adapter from the command line: planned, trained, exported, merged."""

import json
import pathlib

import pytest

from lohan.train.settings.adapter import FIELDS, HELP, AdapterSettings
from lohan.train.settings.config import load_config
from support import small_training, tiny_chat
from support.command_line import run_lohan
from support.trainer_engines import attach_small

LORA = ("--use_peft", "--lora_r", "4", "--lora_target_modules", "all-linear")


def test_an_adapter_is_planned_trained_resumed_exported_and_merged(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = small_training.make_place(tmp_path, monkeypatch)
    tiny_chat.save_model(place / "model", tie_word_embeddings=False)
    monkeypatch.setattr("lohan.train.trainer.saving.attach_with", attach_small)
    dry = small_training.train(place, *LORA, "--dry-run")
    assert dry.exit_code == 0, dry.stderr
    assert "of them trained in 4 blocks" in dry.stdout
    assert not (place / "out").exists()

    trained = small_training.train(place, *LORA, max_steps="1")
    assert trained.exit_code == 0, trained.stderr
    files = {path.name for path in (place / "out").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= files
    assert "config.json" not in files
    fields = json.loads((place / "out" / "adapter_config.json").read_text())
    assert (fields["r"], fields["lora_alpha"], fields["lora_dropout"]) == (4, 32, 0.05)

    other = run_lohan("train", place / "out", "--resume", "--lora_alpha", "16")
    assert other.exit_code == 2
    assert "adapter.lora_alpha: 32 -> 16" in other.stderr
    again = run_lohan("train", place / "out", "--resume")
    assert again.exit_code == 0, again.stderr

    for words, expected in (
        ((), {"adapter_config.json", "adapter_model.safetensors"}),
        (("--merged",), {"config.json", "model.safetensors"}),
    ):
        out = place / f"exported{len(words)}"
        exported = run_lohan("export", place / "out", "--out", out, *words)
        assert exported.exit_code == 0, exported.stderr
        assert expected <= {path.name for path in out.iterdir()}
        assert run_lohan("check", out).exit_code == 0


def test_a_plan_with_an_adapter_writes_next_to_nothing(tmp_path: pathlib.Path) -> None:
    tiny_chat.save_model(tmp_path / "model")
    words = ("plan", str(tmp_path / "model"), "--machine", "desktop-4090", "--batch", "8")
    whole = run_lohan(*words, "--seq", "64", "--json")
    adapter = run_lohan(*words, "--seq", "64", "--lora_r", "2", "--json")
    assert adapter.exit_code == 0, adapter.stderr
    found = [json.loads(one.stdout) for one in (whole, adapter)]
    assert found[0]["num_trained_parameters"] == found[0]["num_parameters"]
    # q_proj and v_proj, which PEFT adapts where nothing is said, of both blocks.
    assert found[1]["num_trained_parameters"] == 2 * 2 * (32 + 32 + 32 + 16)
    written = [one["written_bytes_per_step"] for one in found]
    assert written[1] <= written[0]


def test_settings_have_the_names_and_defaults_of_trl() -> None:
    from trl import ModelConfig

    theirs = ModelConfig()
    for name in FIELDS:
        assert getattr(AdapterSettings(), name) == getattr(theirs, name), name
    assert FIELDS.keys() == HELP.keys()


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ({}, None),
        ({"use_peft": False}, None),
        ({"use_peft": True}, AdapterSettings(use_peft=True)),
        (
            {"lora_r": "8", "lora_target_modules": "[q_proj, v_proj]"},
            AdapterSettings(use_peft=True, lora_r=8, lora_target_modules=["q_proj", "v_proj"]),
        ),
    ],
)
def test_an_adapter_is_on_where_one_is_described(
    written: dict[str, object], expected: AdapterSettings | None
) -> None:
    needed = {"model": "m", "data": "d", "out": "o", "offload.ssd": "s"}
    config = load_config(None, list({**needed, **written}.items()))
    assert config.adapter == expected
    assert not any(name in config.arguments for name in FIELDS)
