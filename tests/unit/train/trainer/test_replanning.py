"""A run that has begun is not ended by a plan it does not need."""

import pathlib
from typing import Any

import datasets
import pytest
from trl import SFTConfig

from lohan.engine import run_setup
from lohan.errors import DoesNotFit
from lohan.train.trainer.trainer import SFTTrainer
from support import tiny_chat
from support.trainer_engines import attach_small


def test_a_run_goes_on_where_no_other_plan_fits_beside_what_lives_in_ram(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan_run, num_refused = run_setup.plan_run, []

    def only_once(*given: Any, fixed_residents: Any = None, **more: Any) -> Any:
        if fixed_residents is not None:
            num_refused.append(1)
            raise DoesNotFit("too little RAM", why="states live in it", remedy="more of it")
        return plan_run(*given, fixed_residents=fixed_residents, **more)

    monkeypatch.setattr(run_setup, "plan_run", only_once)
    monkeypatch.setattr("lohan.train.trainer.saving.attach_with", attach_small)
    trainer = SFTTrainer(
        tiny_chat.model(),
        SFTConfig(
            output_dir=str(tmp_path / "out"),
            use_cpu=True,
            max_steps=4,
            per_device_train_batch_size=2,
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
            pad_to_multiple_of=64,
        ),
        train_dataset=datasets.Dataset.from_list(tiny_chat.conversations(8)),
        processing_class=tiny_chat.tokenizer(),
        offload={"ssd": str(tmp_path / "ssd")},
    )
    trainer.train()
    assert num_refused
    assert trainer.engine.sealed.step == 4
    trainer.close()
