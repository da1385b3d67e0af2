"""The model of the best step: kept where its seal was made, and written as the run's model.

Owns `load_best_model_at_end`. A seal is of the newest states, so the model of a step that was the
best so far is streamed into its checkpoint folder before that step is sealed; the one before goes
after the seal, so at every instant the newest seal finds the best model it knows of. Mixed into
the trainers by `saving`.
"""

import os
import pathlib
import shutil
from typing import Any

from transformers import EarlyStoppingCallback
from transformers.trainer_callback import ExportableState

from lohan.errors import CheckpointError, ConfigError
from lohan.ssd.runs.partial_directory import partial_directory
from lohan.train.run import resume_point
from lohan.train.weights.export_hf import place_model, refuse_taken
from lohan.train.weights.file_list import LIST_NAME, check_files, read_list

# For the type checker: a mixin has whatever the trainer it is put before has.
_SomeTrainer: Any = object


class BestModelMixin(_SomeTrainer):  # type: ignore[misc]
    """`load_best_model_at_end` for `SavingMixin`."""

    best_model: pathlib.Path | None = None
    """Folder of the model that training ended with, where the best one was asked for."""
    _best_found: str | None = None

    def is_best(self, step: int) -> bool:
        """Whether the model of this step is to be kept as the best one so far."""
        return bool(self.args.load_best_model_at_end) and step == self.state.best_global_step

    @property
    def num_models_to_come(self) -> int:
        """How many models OUT has to have room for besides what is there."""
        if not self.args.load_best_model_at_end:
            return 1
        # The best one, and another: a better one before it goes, and in the end that in OUT.
        return 2 if self.state.best_model_checkpoint is None else 1

    @property
    def is_over(self) -> bool:
        """Whether no further step is to be taken: the last one is, or patience has ended."""
        patient = [
            one
            for one in self.callback_handler.callbacks
            if isinstance(one, EarlyStoppingCallback)
            and one.early_stopping_patience_counter >= one.early_stopping_patience
        ]
        return bool(patient) or self.state.global_step >= self.state.max_steps

    def find_best(self, checkpoint: pathlib.Path) -> None:
        """Find the best model that a checkpoint knows of, in OUT or beside the checkpoint.

        Raises:
            CheckpointError: it is not there.
        """
        if not self.args.load_best_model_at_end:
            return
        named = resume_point.read_state(checkpoint).get("best_model_checkpoint")
        if named is None:
            return
        name = pathlib.PurePath(named).name
        for place in (self.out, checkpoint.parent):
            if (place / name / LIST_NAME).exists():
                self._best_found = str(place / name)
                return
        raise CheckpointError(
            f"{checkpoint} names {name} as the best so far, and {self.out / name} is not there",
            why="with load_best_model_at_end the run's model may be the one in it",
            remedy=f"copy {name} into {self.out}, or resume from another checkpoint",
        )

    # ---- what transformers calls ----

    def _load_callback_state(self) -> None:
        """How far the patience of callbacks has gone, which transformers begins anew."""
        self.state.best_model_checkpoint = self._best_found  # OUT may have been moved
        super()._load_callback_state()
        if self.args.restore_callback_states_from_checkpoint:
            return
        for name, found in self.state.stateful_callbacks.items():
            callbacks = [
                one
                for one in self.callback_handler.callbacks
                if isinstance(one, ExportableState) and type(one).__name__ == name
            ]
            kept = found if isinstance(found, list) else [found]
            for callback, one in zip(callbacks, kept, strict=False):
                vars(callback).update(one.get("attributes", {}))

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        try:
            is_best = bool(super()._determine_best_metric(metrics=metrics, trial=trial))
            # With save_strategy=best nothing else would be sealed: no stop, no archive.
            return is_best or bool(self.control.should_save)
        except KeyError as error:
            raise ConfigError(
                f"metric_for_best_model is {self.args.metric_for_best_model}, and an evaluation "
                "has no such number",
                why=f"it has {', '.join(sorted(metrics))}",
                remedy="name one of these, or add it with compute_metrics, in a new run",
            ) from error

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """transformers', with a note where it is not of the model that training ended with."""
        if self.best_model is not None:
            self.note(
                f"this evaluates the weights of step {self.state.global_step}, which the engine "
                f"has; save_model writes those of {self.best_model.name}"
            )
        return super().evaluation_loop(*args, **kwargs)

    def _load_best_model(self) -> None:
        """The model is taken from its folder; states and engine stay with the last step."""
        self.best_model = pathlib.Path(self.state.best_model_checkpoint)
        if self.tell is not None:
            self.tell(
                f"the model is that of {self.best_model.name}, the best by "
                f"{self.args.metric_for_best_model} ({self.state.best_metric:.4g})"
            )

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        """transformers', which with save_total_limit=1 would delete the folder of the last seal."""
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            return super()._finalize_training(*args, **kwargs)
        finally:
            self.args.save_total_limit = limit


def copy_model(folder: pathlib.Path, out: pathlib.Path) -> tuple[str, ...]:
    """Put the model of a checkpoint folder into `out`, beside what is there; returns its files.

    Whole or not at all, as an export is. May block: yes, it is read twice.

    Raises:
        CheckpointError, Corrupt: a file is missing, or does not have the bytes that were written.
        StorageError: `out` cannot be written.
    """
    files = read_list(folder / LIST_NAME)
    names = resume_point.model_files(files)
    check_files(folder, files, names)
    out = pathlib.Path(os.path.realpath(out))
    refuse_taken(out, should_merge=True)
    is_merge = out.is_dir()
    with partial_directory(out, is_merge) as partial:
        for name in names:
            (partial / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(folder / name, partial / name)
        place_model(partial, out, is_merge=is_merge)
    return tuple(names)
