"""Files about a run, for people, for `lohan report` and for bug reports.

Owns lohan.yaml, plan.json, plan.txt, machine.json, trace.json and summary.json; the log is written
by `progress`. Only lohan.yaml is read back, by a resume. Called by the trainer's callbacks and by
`fine_tune`.
"""

import contextlib
import importlib.metadata
import pathlib
import platform
import resource
import time
from dataclasses import asdict
from typing import Any

from transformers import TrainerCallback

from lohan.durable_files import write_json, write_text
from lohan.errors import ConfigError, DoesNotFit
from lohan.report.page import write_report
from lohan.simulate.answers.advice import Advice, advice_for, limit_sentence
from lohan.trace import chrome_json
from lohan.train.run.out_folder import HeldFolder
from lohan.train.run.plan_summary import plan_in_words
from lohan.train.run.writes import planned_seals, write_limit_of
from lohan.train.settings.config import TrainConfig
from lohan.units import KIB
from lohan.working_folder import CONFIG_NAME, make_working_folder

_PACKAGES = ("lohan", "torch", "transformers", "trl", "datasets", "accelerate", "safetensors")


class AcceptedRun(TrainerCallback):
    """Writes the configuration when training begins: one that was refused is not the run's."""

    def __init__(self, held: HeldFolder, config: TrainConfig) -> None:
        self._held, self._config = held, config

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep the folder from now on."""
        self._held.is_accepted = True
        folder = make_working_folder(pathlib.Path(args.output_dir))
        write_text(folder / CONFIG_NAME, self._config.to_text())


class PlanFile(TrainerCallback):
    """Writes the plan when it is known, at the latest after the first step, and the machine."""

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._written = trainer, None
        self._machine: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the plan in use, again when batches outgrew it."""
        plan = self._trainer.engine.plan
        folder = make_working_folder(pathlib.Path(args.output_dir))
        if plan is not None and self._trainer.engine.machine is not self._machine:
            self._machine = self._trainer.engine.machine
            write_text(folder / "machine.json", self._machine.to_json())
        if plan is None or plan is self._written:
            return
        lines = plan_in_words(
            plan,
            self._trainer.engine.prediction,
            num_steps=state.max_steps,
            num_seals=planned_seals(self._trainer, state.max_steps),
            write_limit=write_limit_of(self._trainer),
            rates_note=self._trainer.engine.rates_note,
            machine=self._trainer.engine.machine,
        )
        write_text(folder / "plan.txt", "".join(f"{line}\n" for line in lines))
        write_text(folder / "plan.json", plan.to_json())
        self._written = plan


def package_versions() -> dict[str, str]:
    """The versions of what computes a run."""
    found = {name: importlib.metadata.version(name) for name in _PACKAGES}
    return {"python": platform.python_version(), **found}


def write_ending(trainer: Any, seconds: float) -> None:
    """Write the files of a run that has ended, and say what limited it and where they are."""
    out = trainer.out
    write_trace(trainer, out)
    summary = write_summary(trainer, out, seconds=seconds)
    try:
        sentences = [f"report: {write_report(out)}"]
    except ConfigError as error:
        # Nothing of the run is lost: `lohan report` writes it later.
        sentences = [f"note: there is no report: {error}"]
    if "limit" in summary:
        advice = summary.get("advice")
        known = None if advice is None else [Advice(**one) for one in advice]
        sentences.insert(0, limit_sentence(summary["limit"], summary["limit_share"], known))
    if trainer.stopped_because is not None:
        sentences.insert(0, f"stopped: {trainer.stopped_because}")
    for sentence in sentences if trainer.tell is not None else ():
        trainer.tell(sentence)


def write_summary(trainer: Any, out: pathlib.Path, *, seconds: float) -> dict[str, Any]:
    """Write what a run was in numbers, with the versions it ran with."""
    peaks = {"RAM": trainer.engine.ram_peak_bytes, "GPU": trainer.engine.gpu_peak_bytes}
    state = trainer.state
    losses = [entry["loss"] for entry in state.log_history if "loss" in entry]
    found = {
        "run_id": trainer.engine.run_id,
        "model": trainer.model_name,
        "data": [pathlib.PurePath(path).name for path in trainer.data_names],
        "ended": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "num_steps": state.global_step,
        "max_steps": state.max_steps,
        "stopped_because": trainer.stopped_because,
        "seconds": seconds,
        "first_loss": losses[0] if losses else None,
        "last_loss": losses[-1] if losses else None,
        "written_bytes": trainer.written_bytes,
        "peak_bytes": {tier: nbytes for tier, nbytes in peaks.items() if nbytes is not None},
        "gpu_reserved_bytes": trainer.engine.gpu_reserved_bytes,
        "process_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB,
        "data_hash": trainer.data_hash,
        "versions": package_versions(),
        **_limit_and_advice(trainer),
    }
    write_json(make_working_folder(out) / "summary.json", found)
    return found


def _limit_and_advice(trainer: Any) -> dict[str, Any]:
    """What held most steps of this process up, and what would help (simulated)."""
    if not trainer.limits:
        return {}
    bottleneck, count = trainer.limits.most_common(1)[0]
    found = {"limit": bottleneck, "limit_share": count / trainer.limits.total()}
    advice = None
    if trainer.engine.plan is not None:
        # What cannot be planned, such as a policy that is a function, is not advised on.
        with contextlib.suppress(ConfigError, DoesNotFit):
            advice = advice_for(trainer.engine.plan, trainer.engine.machine)
    return found if advice is None else {**found, "advice": [asdict(one) for one in advice]}


def write_trace(trainer: Any, out: pathlib.Path) -> None:
    """Write the lanes as they were recorded, if they were."""
    if trainer.offload.is_tracing:
        folder = make_working_folder(out)
        write_text(folder / "trace.json", chrome_json(trainer.engine.trace()))
        predicted = trainer.engine.predicted_trace()
        if predicted is not None:
            write_text(folder / "predicted_trace.json", chrome_json(predicted))
