"""A training script on one or several ranks, as torchrun starts it: a program for `run_forked`.

Words: a directory, then runs as JSON (`ScriptRun`); a line is printed for each, with what every
rank found or its error.
"""

import json
import os
import pathlib
import socket
import sys
import tempfile
import traceback
from dataclasses import asdict, dataclass, field
from typing import Any

import datasets
import torch
from transformers import TrainerCallback
from trl import SFTConfig

import lohan.train.trainer.saving
from lohan.train.trainer.trainer import SFTTrainer
from support import tiny_chat
from support.rank_runs import digest
from support.trainer_engines import attach_small

ROWS = tiny_chat.conversations(16)


@dataclass(frozen=True, kw_only=True)
class ScriptRun:
    """What is run, and by how many."""

    out: str
    num_ranks: int = 1
    resume: str | bool | None = None
    stops_after: int | None = None
    """The script ends after this step, as if it had failed, on every rank."""
    fails: int | None = None
    """This rank fails before its second step."""
    settings: dict[str, Any] = field(default_factory=dict)
    offload: dict[str, Any] = field(default_factory=dict)
    rows: int = 16
    other_rows_on: int | None = None
    """This rank has its rows in another order."""


class _Ends(Exception):
    """The script fails."""


class _End(TrainerCallback):
    def __init__(self, run: ScriptRun, rank: int) -> None:
        self._run, self._rank = run, rank

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self._run.stops_after:
            raise _Ends("this script ends")
        if self._rank == self._run.fails:
            raise ValueError("this rank fails")


def script(run: ScriptRun, directory: pathlib.Path, rank: int) -> dict[str, Any]:
    """One rank of a run; what it found."""
    settings: dict[str, Any] = {
        "use_cpu": True,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 4 // run.num_ranks,
        "max_steps": 5,  # more than an epoch
        "learning_rate": 1e-3,
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "save_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "per_device_eval_batch_size": 1,
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "pad_to_multiple_of": 16,
        **run.settings,
    }
    rows = ROWS[: run.rows]
    if rank == run.other_rows_on:
        rows = rows[::-1]
    trainer = SFTTrainer(
        str(directory / "model"),
        SFTConfig(output_dir=str(directory / run.out), **settings),
        train_dataset=datasets.Dataset.from_list(rows),
        eval_dataset=datasets.Dataset.from_list(ROWS[:4]),
        processing_class=tiny_chat.tokenizer(),
        callbacks=[_End(run, rank)],
        offload={"ssd": [str(directory / "ssd")], **run.offload},
    )
    trainer.train(resume_from_checkpoint=run.resume)
    trainer.save_model()
    history = trainer.state.log_history
    told = {
        "run": trainer.engine.run_id,
        "losses": [one["loss"] for one in history if "loss" in one],
        "norms": [one["grad_norm"] for one in history if "grad_norm" in one],
        "evaluated": [one["eval_loss"] for one in history if "eval_loss" in one],
        "masters": digest(dict(trainer.engine.weights())),
        "m": digest({name: m for name, m, _ in trainer.engine.moments()}),
        "v": digest({name: v for name, _, v in trainer.engine.moments()}),
        "written_bytes": trainer.written_bytes,
    }
    trainer.close()
    return told


def run_script(run: ScriptRun, directory: pathlib.Path) -> list[dict[str, Any]]:
    """Fork the ranks; what each found, or its error."""
    with socket.socket() as probe, tempfile.TemporaryDirectory() as place:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        outputs = [pathlib.Path(place, f"{rank}.json") for rank in range(run.num_ranks)]
        children = [
            _fork(run, directory, rank, port, outputs[rank]) for rank in range(len(outputs))
        ]
        for child in children:
            os.waitpid(child, 0)
        return [json.loads(one.read_text()) for one in outputs]


def _fork(
    run: ScriptRun, directory: pathlib.Path, rank: int, port: int, output: pathlib.Path
) -> int:
    child = os.fork()
    if child:
        return child
    torch.set_num_threads(1)
    lohan.train.trainer.saving.attach_with = attach_small
    if run.num_ranks > 1:
        env = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": run.num_ranks}
        env |= {"LOCAL_WORLD_SIZE": run.num_ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in env.items()})
    try:
        told = script(run, directory, rank)
    except BaseException as error:
        told = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
    output.write_text(json.dumps(told))
    os._exit(0)


def as_word(run: ScriptRun) -> str:
    """For `main`."""
    return json.dumps(asdict(run))


def main() -> None:
    """Run what the words say."""
    directory = pathlib.Path(sys.argv[1])
    tiny_chat.save_model(directory / "model", attention_dropout=0.1)
    for word in sys.argv[2:]:
        print(json.dumps(run_script(ScriptRun(**json.loads(word)), directory)), flush=True)
