"""What a script with `lohan.SFTTrainer` shows and leaves: what `lohan train` does but for steps."""

import json
import pathlib
from typing import Any

import datasets
import pytest
import transformers
from trl import SFTConfig

from lohan.engine.options import FirstStates, Options
from lohan.train.trainer.trainer import SFTTrainer
from support import tiny_chat
from support.trainer_engines import attach_small


def trained(out: pathlib.Path, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    def attach(model: Any, optimizer: Any, options: Options, first: FirstStates) -> Any:
        options.tell("measuring nothing")
        return attach_small(model, optimizer, options, first)

    monkeypatch.setattr("lohan.train.trainer.saving.attach_with", attach)
    trainer = SFTTrainer(
        tiny_chat.model(),
        SFTConfig(
            output_dir=str(out),
            use_cpu=True,
            max_steps=2,
            per_device_train_batch_size=2,
            logging_steps=1,
            report_to="none",
            dataloader_pin_memory=False,
            pad_to_multiple_of=64,
            **changes,
        ),
        train_dataset=datasets.Dataset.from_list(tiny_chat.conversations(8)),
        processing_class=tiny_chat.tokenizer(),
        offload={"ssd": str(out.parent / "ssd")},
    )
    trainer.train()
    trainer.close()


def test_a_script_is_told_plan_limit_and_report(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    trained(out, monkeypatch, disable_tqdm=True)
    said = capsys.readouterr().out
    in_order = ["measuring nothing", "training begins at step 0 of 2", "predicted for 2 steps"]
    in_order += ["'loss':", "limited this run (in", f"report: {out / '_lohan' / 'report.html'}"]
    places = [said.index(words) for words in in_order]
    assert places == sorted(places)
    assert "limited this run" in (out / "_lohan" / "report.html").read_text()
    summary = json.loads((out / "_lohan" / "summary.json").read_text())
    assert summary["num_steps"] == 2
    assert summary["model"] == "LlamaForCausalLM"


def test_a_script_that_wants_errors_alone_is_told_nothing(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    verbosity = transformers.logging.get_verbosity()
    try:
        trained(tmp_path / "out", monkeypatch, log_level="error")
    finally:
        transformers.logging.set_verbosity(verbosity)
    said = capsys.readouterr()
    assert "training begins" not in said.out + said.err
    assert (tmp_path / "out" / "_lohan" / "report.html").is_file()
