"""Checkpoints of a trainer on the engine: seals, resume points, archives, the final model.

Owns when and in what order files and seals are written. The content of the files is in
`resume_point` and `archive`, how a run is found again in `resuming`. Mixed into the trainers by
`trainer.OffloadMixin`.

Note "files before the seal". A checkpoint folder is complete on disk before the engine seals the
states of the same step, and the folder of the seal before is removed after that. So at every
instant the newest seal names a folder that is there.
"""

import functools
import os
import pathlib
import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from transformers.trainer_callback import ExportableState

from lohan.attaching import attach_with
from lohan.closing import Closing
from lohan.durable_files import sync_file, write_json
from lohan.engine.engine import Engine
from lohan.engine.model_buffers import changed_buffers
from lohan.engine.options import FirstStates, Options
from lohan.engine.planning.plan_run import PlannedRun
from lohan.engine.results import StepResult
from lohan.errors import CheckpointError, ConfigError
from lohan.hardware import machine_from
from lohan.plan.run_room import STATES, DriveRoom, DriveUse, drive_rooms, states_uses
from lohan.simulate.bottleneck import without_shares
from lohan.store.seals.commits import name_of_rank
from lohan.train.adapters.adapting import Adapting, num_written, with_frozen
from lohan.train.data.dataset import hash_rows
from lohan.train.run import resume_point
from lohan.train.run.disk_reservation import (
    Reservation,
    out_uses,
    refuse_full_drives,
    source_uses,
)
from lohan.train.run.out_folder import refuse_replaced
from lohan.train.run.progress import LOG_NAME, LogFile, RunInWords, step_numbers
from lohan.train.run.pushing import PushingMixin
from lohan.train.run.randomness_state import random_state
from lohan.train.run.ranks import RanksMixin, go_along
from lohan.train.run.resume_point import RunRecord
from lohan.train.run.run_files import PlanFile, package_versions, write_ending
from lohan.train.run.signals import StopRequest, leave, stop_on_signals
from lohan.train.run.writes import planned_steps, write_limit_of
from lohan.train.settings.arguments import refuse_chunked_loss
from lohan.train.settings.offload import OffloadConfig
from lohan.train.trainer.best_model import BestModelMixin, copy_model
from lohan.train.trainer.checkpoint_callback import SealingFlow
from lohan.train.trainer.continuing import RANDOM_IF_LONGER
from lohan.train.trainer.engine_optimizer import groups_of
from lohan.train.trainer.resuming import ResumingMixin
from lohan.train.trainer.samples import Asked, SamplePrompts
from lohan.train.weights import archive
from lohan.train.weights.check_export import ModelDirectoryReport
from lohan.train.weights.export_hf import export_model, exported_as
from lohan.train.weights.file_list import MODEL_LIST_NAME, hash_files, write_list
from lohan.train.weights.model_identity import MODEL_IDENTITY, source_identity, tokenizer_identity
from lohan.train.weights.source import ModelSource
from lohan.working_folder import make_working_folder, private_files

# Methods of transformers' Trainer that are overridden here and in the mixins below.
RELIED_ON = (
    "train",
    "log",
    "_save_checkpoint",
    "save_model",
    "push_to_hub",
    "_push_from_checkpoint",
    "create_model_card",
    "_load_from_checkpoint",
    "_load_optimizer_and_scheduler",
    "_load_rng_state",
    "_load_callback_state",
    "_load_best_model",
    "_determine_best_metric",
    "_finalize_training",
)


class SavingMixin(ResumingMixin, PushingMixin, BestModelMixin, RanksMixin):
    """Saving and resuming for `OffloadMixin`."""

    offload: OffloadConfig
    source: ModelSource | None
    adapting: Adapting
    args: Any
    model: Any
    optimizer: Any
    lr_scheduler: Any
    state: Any

    def _prepare_saving(self) -> None:
        self._engine: Engine | None = None
        self.last_step: StepResult | None = None
        """Result of the engine's last step."""
        self.limits: Counter[str] = Counter()
        """How many steps of this process each bottleneck held up."""
        self._written_before_bytes = 0
        self.stop_request = StopRequest()
        self.tell: Callable[[str], None] | None = None
        """Gets one sentence per stage of starting up."""
        self.on_planned: Callable[[PlannedRun], None] | None = None
        """Gets the plan of the largest step, where it is known, before states are written."""
        self.rooms: list[DriveRoom] = []
        """What the run takes of the filesystems it touches, as it was when it was planned."""
        self.data_names: tuple[str, ...] = ()
        """Files of rows, where they are known."""
        self.stopped_because: str | None = None
        """Why the run stopped before its last step, if not by a signal."""
        self._archive_to_load: pathlib.Path | None = None
        self.steps_before = 0
        """Steps the engine took in earlier calls of `train`, which counts anew."""
        self.random_if_longer: tuple[int, dict[str, Any]] | None = None
        """The last step, and the generators after it, where only the end has it evaluated."""

    @property
    def engine(self) -> Engine:
        """The engine; made when first asked for."""
        if self._engine is None:
            return self._start_engine(run=None)
        return self._engine

    @property
    def sealed_step(self) -> int | None:
        """The step a resume would go on from; None while there is no engine, or no seal."""
        sealed = self._engine.sealed if self._engine is not None else None
        return None if sealed is None else int(sealed.metadata.get("step", sealed.step))

    @property
    def written_bytes(self) -> int:
        """Written to the SSDs by the run: first states, steps and seals, earlier processes too; by
        other ranks as of the last seal."""
        since = self._engine.written_bytes if self._engine is not None else 0
        return self._written_before_bytes + int(since) + self._written_elsewhere_bytes

    @functools.cached_property
    def _reservation(self) -> Reservation:
        return Reservation(self.out)

    @functools.cached_property
    def data_hash(self) -> str | None:
        """Hash of the prepared training rows, of the columns the model gets to see."""
        if not self.args.remove_unused_columns:
            return hash_rows(self.train_dataset, None)
        self._set_signature_columns_if_needed()
        seen = (*(self._signature_columns or ()), "labels", "label_ids", "label")
        return hash_rows(self.train_dataset, seen)

    @functools.cached_property
    def model_name(self) -> str:
        """What is trained, as the user called it; of a module given, its class at worst."""
        config = getattr(self.model, "config", None)
        return getattr(config, "_name_or_path", "") or type(self.model).__name__

    @functools.cached_property
    def model_identity(self) -> dict[str, Any]:
        """What makes the model the one of this run, besides its weights."""
        config = getattr(self.model, "config", None)
        known = self.source.identity if self.source is not None else source_identity(config)
        attention = getattr(config, "_attn_implementation", None)
        tokenizer = tokenizer_identity(self.processing_class)
        return {**known, "attention": attention, **tokenizer, **self.adapting.identity()}

    def hold_space(self) -> None:
        """Hold room in the output folder for what is still to be written there.

        Raises:
            OutOfSpace: there is too little.
        """
        if not self.is_first:
            return
        uses = [use for use in self._out_uses() if use.nbytes]
        purpose = " and ".join(use.purpose for use in uses)
        self._reservation.hold(sum(use.nbytes for use in uses), purpose=purpose)

    def _out_uses(self) -> list[DriveUse]:
        num_steps = self.state.max_steps or planned_steps(self) or 0  # 0: not counted yet
        return out_uses(
            str(self.out),
            num_written(self.model),
            num_steps=max(0, num_steps - self.state.global_step),
            archive_steps=self.offload.archive_steps,
            save_model_steps=self.offload.save_model_steps,
            save_total_limit=self.args.save_total_limit,
            num_models=self.num_models_to_come,
        )

    def _accept_plan(self, planned: PlannedRun, *, ssd: Sequence[str], is_resumed: bool) -> None:
        """Refuse a plan the drives have no room for, with all else the run puts on them.

        Raises:
            OutOfSpace: they have not.
        """
        num_here = self.peers.num_here  # on the same drives
        parts = {
            STATES: num_here * planned.states_bytes,
            "swapped activations": num_here * planned.swap_bytes,
        }
        uses = [*states_uses(parts, ssd, is_resumed=is_resumed), *source_uses(self.source)]
        self.rooms = drive_rooms([*uses, *(self._out_uses() if self.is_first else ())])
        refuse_full_drives(self.rooms)
        if self.on_planned is not None:
            self.on_planned(planned)

    def close(self) -> None:
        """Let go of the engine and of held space; the states stay on the SSDs. Twice is fine."""
        with Closing() as stack:
            if self._engine is not None:
                stack.callback(self._engine.close)
            self._release_space()

    def _add_own_callbacks(self) -> None:
        """Those of a run, behind the user's, where there is none of the kind."""
        flow, asking = SealingFlow(self), SamplePrompts(self, self.sample_prompts)
        told = (LogFile(self), PlanFile(self), RunInWords(self)) if self.is_first else ()
        for one in (flow, *told, asking):
            if not any(isinstance(other, type(one)) for other in self.callback_handler.callbacks):
                self.add_callback(one)

    def _release_space(self) -> None:
        if self.is_first:
            self._reservation.release()

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log with what the engine measured."""
        if "loss" in logs:
            logs.update(step_numbers(self))
        super().log(logs, start_time)

    def _note_step(self, result: StepResult) -> None:
        self.last_step = result
        if result.bottleneck:
            self.limits[without_shares(result.bottleneck)] += 1
        if hasattr(self.optimizer, "_is_overflow"):
            # accelerate's flag: a skipped step does not advance the schedule.
            self.optimizer._is_overflow = result.is_skipped

    def _start_engine(self, run: RunRecord | None) -> Engine:
        if self.offload.should_chunk_loss:
            refuse_chunked_loss(self)
        if run is None and self._archive_to_load is None:
            self._refuse_foreign_out()
        self._add_own_callbacks()
        self.create_optimizer()
        self.by_first(lambda: self._prepare_out(is_new=run is None), "the output folder")
        self.model_identity  # noqa: B018 - now: transformers changes the configuration later
        if self.args.world_size > 1:
            self.refuse_unlike_ranks()
            self.model.train()  # as in a step: what it then changes is refused beforehand
        if self.sample_prompts:
            Asked(self, self.sample_prompts)  # so that one that cannot be asked is refused now
        first = FirstStates(run=None if run is None else run.run_id)
        if self._archive_to_load is not None:
            first = archive.read_copy(self._archive_to_load / resume_point.STATES_FOLDER)
            trained = with_frozen(self.model, first.weights, self.first_weights)
            first = replace(first, weights=trained)
        elif run is None:
            first = FirstStates(weights=self.first_weights())
        elif self.adapting.is_on:
            self.first_weights()  # so that an adapter is in the type it computes in
        if first.weights is not None:
            first = replace(first, weights=self.stop_request.between(first.weights))
        offload = self.offload
        ssd = offload.ssd if run is None else self._places_of(run)
        options = Options(
            ssd=ssd,
            ram_bytes=offload.ram,
            gpu_bytes=offload.gpu,
            device=offload.device,
            machine=machine_from(offload.machine) if offload.machine is not None else None,
            largest_step=self.largest_step() or self.shown_step(),
            loss_fn=self._planning_call(),
            write_limit=write_limit_of(self),
            progress=self.tell,
            on_planned=functools.partial(self._accept_plan, ssd=ssd, is_resumed=run is not None),
            should_chunk_loss=offload.should_chunk_loss,
            is_tracing=offload.is_tracing,
            ssd_rated_bytes=offload.ssd_rated_bytes,
            reduction_groups=offload.reduction_groups,
            peers=self.peers,
        )
        engine = attach_with(self.model, self._plain_optimizer(), options, first)
        self._engine = engine
        self._note_live(engine.run_id)
        # A function: blocks are watched for what they change, and a method leads to the trainer.
        self.model.save_pretrained = lambda *given, **kwargs: self._save_pretrained(
            *given, **kwargs
        )
        record = RunRecord(run_id=engine.run_id, ssd=tuple(ssd))
        self.by_first(lambda: record.write(self.out), "the record of the run")
        return engine

    def _prepare_out(self, *, is_new: bool) -> None:
        make_working_folder(self.out)
        self._out_status = os.stat(self.out)
        if is_new:
            resume_point.refuse_foreign_checkpoints(self.out, planned_steps(self))
            self.hold_space()  # so that too little is known before states are written
            self._reservation.release()

    def _places_of(self, run: RunRecord) -> tuple[str, ...]:
        """Where a run lies: where the user says if it is there (drives move), else as recorded."""
        given = self.offload.ssd
        name = f"lohan-{name_of_rank(run.run_id, self.peers.rank, self.peers.num_ranks)}"
        if all((pathlib.Path(p) / name).is_dir() for p in given):
            return given
        self.note(f"{name} is not in {', '.join(given)}: it is taken from {', '.join(run.ssd)}")
        return run.ssd

    def _plain_optimizer(self) -> Any:
        """The optimizer itself, also after accelerate has put its own around it."""
        return getattr(self.optimizer, "optimizer", self.optimizer)

    # ---- training ----

    def _before_training(self) -> None:
        """What is computed with the first weights, before the first step."""

    def _planning_call(self) -> Any:
        """How the model is called to plan with it; None: with all of a batch."""
        return None

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *more: Any, **kwargs: Any
    ) -> Any:
        """Train; `resume_from_checkpoint=True` continues from the newest seal. Ends with a report.

        SIGINT and SIGTERM finish the step, seal it and end the process the usual way
        (KeyboardInterrupt, exit code 143). Before the first step they end it at once, and take
        back what was written for a new run.

        Raises:
            CheckpointError: there is nothing to resume, or it is damaged.
            ConfigError: arguments or data are not those of the run to resume.
        """
        started = time.monotonic()
        self.best_model = None
        with stop_on_signals(is_at_once=True) as self.stop_request, self._training():
            checkpoint = self._find_checkpoint(resume_from_checkpoint)
            if self._engine is None:
                self._start_engine(run=None)
            self._before_training()
            self.stop_request.begin_steps()
            done = super().train(
                str(checkpoint) if checkpoint is not None else None, *more, **kwargs
            )
        leave(self.stop_request)
        self.count_written()
        if not self.is_first:
            return done
        if (
            checkpoint is not None
            and checkpoint.parent == self.out
            and self.sealed_step is not None
        ):
            # A process may have ended between its last seal and this, with no step left to take.
            self._remove_old(self.out / resume_point.checkpoint_name(self.sealed_step))
        write_ending(self, time.monotonic() - started)
        return done

    # ---- saving ----

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self.store_flos()
        step = int(self.state.global_step)
        num_taken = self.engine.num_steps - self.steps_before
        if num_taken != step:
            raise CheckpointError(
                f"the engine took {num_taken} steps, the trainer counts {step}",
                why="a checkpoint must be of one step",
                remedy="do not stop training inside an accumulation window, and do not call "
                "engine.step beside the trainer",
            )
        self.engine.synchronize()  # so that what is still due is counted
        self.count_written(is_sealing=True)
        with private_files():
            temporary = self._write_checkpoint(step)
            metadata = self.by_first(lambda: self._published(temporary, step), "the checkpoint")
        self.engine.seal(metadata)
        if self.is_first:
            self._remove_old(self.out / metadata["checkpoint"])
        if self._has_model(step):
            self.hold_space()

    def _published(self, temporary: pathlib.Path, step: int) -> dict[str, Any]:
        """Give the files of a checkpoint their place; what its seal says about them."""
        list_hash = resume_point.write_files_list(temporary)
        path = resume_point.publish(temporary, self.out, step)
        metadata: dict[str, Any] = {"step": step, "checkpoint": path.name}
        metadata |= {resume_point.LIST_HASH: list_hash, MODEL_IDENTITY: self.model_identity}
        metadata["out"] = str(self.out.absolute())
        if self.source is not None:
            file = self.source.directory / (self.source.gguf_file or "")
            metadata["model"] = str(file.absolute())  # an export may be made from elsewhere
            metadata |= {} if self.source.head is None else {"head": self.source.head}
        metadata |= self.adapting.sealed(self.model_name)
        sync_file(make_working_folder(self.out) / LOG_NAME)  # what is sealed is logged
        refuse_replaced(self.out, self._out_status)
        return metadata

    def _remove_old(self, newest: pathlib.Path) -> None:
        resume_point.remove_old(
            self.out,
            newest=newest,
            best=self.state.best_model_checkpoint,
            save_total_limit=self.args.save_total_limit,
        )

    def _write_checkpoint(self, step: int) -> pathlib.Path:
        temporary = self.out / f".{resume_point.checkpoint_name(step)}.tmp"
        if self.is_best(step):
            self.state.best_model_checkpoint = str(self.out / resume_point.checkpoint_name(step))
        if self.is_first:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            self._write_small_files(temporary, step)
        if self._has_model(step):
            self._release_space()
            self._export(temporary)
        if self._is_archived(step) and not self.is_first:
            go_along(archive.states_of(self.engine))
        elif self._is_archived(step):
            shapes = {
                name: tuple(parameter.shape)
                for name, parameter in self.model.named_parameters()
                if parameter.requires_grad
            }
            archive.write_states(self.engine, shapes, temporary / resume_point.STATES_FOLDER)
        return temporary

    def _is_archived(self, step: int) -> bool:
        every = self.offload.archive_steps
        return every is not None and step > 0 and step % every == 0

    def _is_model_kept(self, step: int) -> bool:
        every = self.offload.save_model_steps
        return every is not None and step > 0 and step % every == 0

    def _has_model(self, step: int) -> bool:
        return self._is_archived(step) or self._is_model_kept(step) or self.is_best(step)

    def _write_small_files(self, folder: pathlib.Path, step: int) -> None:
        self._note_callback_states()
        self.state.save_to_json(str(folder / resume_point.TRAINER_NAME))
        found = {
            "version": resume_point.VERSION,
            "step": step,
            "run_id": self.engine.run_id,
            "random": random_state(),
            "scheduler": self.lr_scheduler.state_dict() if self.lr_scheduler is not None else {},
            "optimizer_groups": groups_of(self._plain_optimizer()),
            "arguments": self._comparable_arguments(),
            "model": self.model_identity,
            "data_hash": self.data_hash,
            resume_point.MODEL_KEPT: self._is_model_kept(step),
            # With what the seal that follows writes: then it is too late.
            "written_bytes": self.written_bytes + self.engine.due_bytes,
            "versions": package_versions(),
        }
        if self.random_if_longer is not None and self.random_if_longer[0] == step:
            found[RANDOM_IF_LONGER] = self.random_if_longer[1]
        try:
            write_json(folder / resume_point.RESUME_NAME, found)
        except TypeError as error:
            raise ConfigError(
                f"the state of {type(self.lr_scheduler).__name__} cannot be saved ({error})",
                why="checkpoints hold plain JSON, never a pickle",
                remedy="use one of transformers' schedulers",
            ) from error

    def _note_callback_states(self) -> None:
        """Callbacks that can be saved, as transformers keeps them in its state."""
        callbacks = [*self.callback_handler.callbacks, self.control]
        states: dict[str, Any] = {}
        for callback in callbacks:
            if isinstance(callback, ExportableState):
                states.setdefault(type(callback).__name__, []).append(callback.state())
        self.state.stateful_callbacks = {
            name: found if len(found) > 1 else found[0] for name, found in states.items()
        }

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model in Hugging Face's layout, one tensor in RAM at a time."""
        with self.told_of_failure():
            self._release_space()
            self.engine.synchronize()
            folder = pathlib.Path(output_dir or self.args.output_dir)
            listed = None
            if self.is_first and folder.resolve() == self.out.resolve():
                listed = make_working_folder(self.out) / MODEL_LIST_NAME
                listed.unlink(missing_ok=True)  # until the next one is written, nothing is known
            files = self._write_model(folder)

            def list_files() -> None:
                if listed is not None:
                    write_list(listed, hash_files(folder, files))

            self.by_first(list_files, "the files of the model")
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _write_model(self, folder: pathlib.Path) -> tuple[str, ...]:
        """The model training ended with: of the best step where that was asked for."""
        best = self.best_model
        if best is not None:
            return self.by_first(lambda: copy_model(best, folder), "the best model")
        report = self._export(folder)
        return () if report is None else report.files

    def _save_pretrained(
        self, save_directory: str | os.PathLike[str], *more: Any, **kwargs: Any
    ) -> None:
        """In place of the model's own, whose weights are not there: one tensor at a time."""
        self.engine.synchronize()
        self._export(pathlib.Path(save_directory))

    def _export(self, folder: pathlib.Path) -> ModelDirectoryReport | None:
        """Write the model of the weights as they are. All ranks give theirs, the first one writes;
        None on the others."""
        weights = self.engine.weights(are_frozen_wanted=self.adapting.are_frozen_written)
        if not self.is_first:
            go_along(weights)
            return None
        if self.adapting.is_on:
            return self.adapting.export(
                weights, folder, model_name=self.model_name, tokenizer=self.processing_class
            )
        return export_model(
            self.source if self.source is not None else exported_as(self.model),
            weights,
            folder,
            buffers=changed_buffers(self.engine.buffers),
            dtype=self.compute_dtype(),
            tokenizer=self.processing_class,
            should_merge=True,
        )
