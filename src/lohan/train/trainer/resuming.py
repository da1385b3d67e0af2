"""How a trainer finds its run again and goes on with it: the newest seal, or an archive.

Owns what is opened and compared before the first step, and what transformers then loads. The
content of the files is in `resume_point` and `archive`. Mixed into the trainers by `saving`.
"""

import contextlib
import pathlib
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any, cast

from datasets import Dataset

from lohan.engine.engine import Engine
from lohan.engine.results import Sealed
from lohan.errors import CheckpointError, LohanError, LohanWarning
from lohan.train.data.dataset import hash_rows
from lohan.train.run import resume_point
from lohan.train.run.out_folder import set_aside
from lohan.train.run.randomness_state import set_random_state
from lohan.train.run.resume_point import RunRecord, is_lost, with_offer
from lohan.train.run.run_files import package_versions
from lohan.train.trainer.continuing import (
    FOLLOWING_EVALUATIONS,
    IS_OTHER_LENGTH,
    check_length,
    rates_for_length,
)
from lohan.train.trainer.engine_optimizer import set_groups
from lohan.train.trainer.rehearsal import may_rehearse
from lohan.train.weights.model_identity import differences
from lohan.working_folder import RUN_NAME, no_run_in, working_folder

# Trainers of this process by the run their engine holds.
_LIVE: "weakref.WeakValueDictionary[str, Any]" = weakref.WeakValueDictionary()
# For the type checker: a mixin has whatever the trainer it is put before has.
_SomeTrainer: Any = object


class ResumingMixin(_SomeTrainer):  # type: ignore[misc]
    """Resuming for `SavingMixin`."""

    _engine: Engine | None
    _sealed: dict[str, Any]
    """Of the checkpoint the run goes on from."""
    _archive_to_load: pathlib.Path | None
    _is_training = False
    tell: Callable[[str], None] | None

    def _find_checkpoint(self, asked: str | bool | None) -> pathlib.Path | None:
        if asked is None or asked is False:
            self._refuse_foreign_out()
            return None
        record = self._recorded_run()
        self._let_go_of(record)
        if isinstance(asked, str):
            return self._checkpoint_at(pathlib.Path(asked), record)
        if record is None:
            raise no_run_in(self.out)
        return self._resume_seal(record)

    def _recorded_run(self) -> RunRecord | None:
        return cast(
            RunRecord | None,
            self.by_first(lambda: resume_point.read_run(self.out), "the record of the run"),
        )

    def _refuse_foreign_out(self) -> None:
        record = self._recorded_run()
        if self._engine is not None or record is None:
            return
        self._let_go_of(record)
        run_id = record.run_id
        aside = self.by_first(lambda: set_aside(self.out, run_id), "the folder of the run before")
        if aside is None:
            raise CheckpointError(
                f"{self.out} is the folder of another run, which has not ended",
                why="its checkpoints would be mixed with those of this run",
                remedy="continue that run with --resume, in a script with "
                "train(resume_from_checkpoint=True), or give another output folder",
            )
        self.note(
            f"run {record.run_id} in {self.out} has ended: its files are in {aside.name}; its "
            f"states stay on the SSDs until `lohan clean --remove {record.run_id}`"
        )

    @contextlib.contextmanager
    def _training(self) -> Iterator[None]:
        self._is_training = True
        try:
            yield
        finally:
            self._is_training = False

    def _note_live(self, run_id: str) -> None:
        _LIVE[run_id] = self

    def _let_go_of(self, record: RunRecord | None) -> None:
        """A trainer of this process that ended, by an error perhaps, still holds its run."""
        holder = None if record is None else _LIVE.get(record.run_id)
        if holder is self:
            self._drop_engine()
        elif holder is not None and not holder._is_training:
            holder.close()

    def _checkpoint_at(self, path: pathlib.Path, record: RunRecord | None) -> pathlib.Path:
        if not path.is_dir():
            raise CheckpointError(
                f"Can't find a valid checkpoint at {path}: there is no such folder",
                why="only that of the newest seal is kept, and copies where they are asked for",
                remedy="resume with --resume alone (resume_from_checkpoint=True); of later runs, "
                "offload.archive_steps keeps copies that can be resumed from",
            )
        sealed = self.by_first(lambda: resume_point.read_resume(path), "the checkpoint")
        newest = [one.resolve() for one in resume_point.checkpoints(self.out)[-1:]]
        # Not opened for a copy of an older step: opening takes the weights of the model away, and
        # those that are not trained are in no copy.
        is_older = resume_point.has_archive(path) and path.resolve() not in newest
        if record is not None and sealed.get("run_id") == record.run_id and not is_older:
            try:
                found = self._resume_seal(record)
                if found is not None and found.resolve() == path.resolve():
                    return found
                self._drop_engine()
            except LohanError as error:
                # A run that another process holds must not be continued beside it.
                if not resume_point.has_archive(path) or not is_lost(error):
                    raise
        if not resume_point.has_archive(path):
            raise CheckpointError(
                f"{path} is not the newest seal of its run and holds no copy of the states",
                why="only the newest seal is kept on the SSDs",
                remedy="resume with --resume alone (resume_from_checkpoint=True), or from a "
                "checkpoint with a states folder",
            )
        self._check_unchanged(path, sealed)
        self._archive_to_load = path
        return path

    def _resume_seal(self, record: RunRecord) -> pathlib.Path | None:
        try:
            seal = self._start_engine(run=record).sealed
            checkpoint = self._folder_of_seal(record, seal)
            sealed = None
            if checkpoint is not None and seal is not None:
                folder, said = checkpoint, seal.metadata
                sealed = self.by_first(
                    lambda: resume_point.read_resume(folder, said), "the checkpoint"
                )
        except LohanError as error:
            self._drop_engine()
            offered = with_offer(error, self.out, record.run_id)
            if offered is error:
                raise
            raise offered from error
        if checkpoint is not None and sealed is not None:
            self._check_unchanged(checkpoint, sealed)
        return checkpoint

    def _drop_engine(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def _folder_of_seal(self, record: RunRecord, seal: Sealed | None) -> pathlib.Path | None:
        """The folder the newest seal names; None if that is the seal of the first states."""
        if seal is None:
            raise CheckpointError(
                f"run {record.run_id} was stopped before its first seal",
                why="there is no step to continue from",
                remedy=f"remove {working_folder(self.out) / RUN_NAME} and start without resuming",
            )
        if "checkpoint" not in seal.metadata:
            # Stopped after its states were written and before its first step was sealed.
            return None
        return pathlib.Path(self.out) / str(seal.metadata["checkpoint"])

    def _check_unchanged(self, checkpoint: pathlib.Path, sealed: dict[str, Any]) -> None:
        """Refuse what would make it another run, and say what might change bits all the same."""
        data_hash = self.data_hash
        if sealed["version"] == resume_point.UNLISTED_VERSION:
            data_hash = hash_rows(self.train_dataset, ())  # they knew only the usual columns
            self.note(
                f"{checkpoint} is of an older release, without hashes of its files and of the "
                "model: damage there, or another model, would not be noticed"
            )
        resume_point.refuse_changes(
            checkpoint,
            sealed,
            arguments=self._comparable_arguments(),
            model=self.model_identity,
            data_hash=data_hash,
            may_differ=self._without_trace_in_weights(),
        )
        self._sealed = check_length(self, checkpoint, sealed)
        self.find_best(checkpoint)
        now = {name: one for name, one in package_versions().items() if name in sealed["versions"]}
        changed = differences(sealed["versions"], now)
        if changed:
            self.note(
                f"{checkpoint} was sealed with other versions ({'; '.join(changed)}): what follows "
                "may differ in its last bits from a run that was never stopped"
            )
        self._written_before_bytes = int(sealed["written_bytes"])

    def _without_trace_in_weights(self) -> frozenset[str]:
        """Arguments that change no weight of this run, though they might of another."""
        found: set[str] = set()
        args = self.args
        # Each worker has generators of its own, and a stream is cut into their shares.
        is_table = isinstance(self.train_dataset, Dataset)
        draws = getattr(self.data_collator, "mlm", False)
        if is_table and may_rehearse(self.data_collator) and not draws:
            found.add("dataloader_num_workers")
        schedule = str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type))
        if args.metric_for_best_model is None and schedule not in FOLLOWING_EVALUATIONS:
            found.add("per_device_eval_batch_size")
        return frozenset(found)

    def note(self, sentence: str) -> None:
        """Say what a user should know and what is no error."""
        if not self.is_first:
            return
        if self.tell is not None:
            self.tell(f"note: {sentence}")
        else:
            warnings.warn(sentence, LohanWarning, stacklevel=2)

    def _comparable_arguments(self) -> dict[str, Any]:
        found = resume_point.comparable(self.args.to_dict())
        # A step has as many rows by half as many ranks with twice as many micro-batches each.
        name = "gradient_accumulation_steps"
        return {**found, name: found[name] * self.args.world_size}

    # ---- what transformers calls to load ----

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Nothing: the engine opened the states."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            set_groups(self._plain_optimizer(), self._sealed["optimizer_groups"])
            self.lr_scheduler.load_state_dict(self._sealed["scheduler"])
            if IS_OTHER_LENGTH in self._sealed:
                rates_for_length(self.lr_scheduler, self._plain_optimizer())

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            set_random_state(self._sealed["random"])
