"""What the model gave for every row before its first step: the reference of DPO and KTO.

Owns computing it once, through the engine and with the first weights, as TRL does it with
`precompute_ref_log_probs`, and keeping it in every checkpoint, because the weights are then gone.
No second model is on the SSDs or in RAM. Mixed into the trainers by `preferences`.
"""

import contextlib
import inspect
import math
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import safetensors
import torch
from datasets import Dataset, concatenate_datasets
from safetensors.torch import save_file
from torch.utils.data import DataLoader

from lohan.errors import CheckpointError, ConfigError
from lohan.train.data.dataset import hash_rows
from lohan.train.run.randomness_state import random_state, set_random_state
from lohan.train.run.resume_point import REFERENCE_NAME
from lohan.train.trainer.trainer import OffloadMixin
from lohan.units import format_bytes_decimal

_WEIGHT_BYTES = 2
_PRECOMPUTED = "precompute_ref_log_probs"


class ReferenceMixin(OffloadMixin):
    """Put before a trainer of TRL that compares the model with what it was."""

    reference_columns: tuple[str, ...] = ()
    num_reference_forwards = 1
    arguments: Any = None
    """The class of the trainer's arguments."""
    train_dataset: Any
    eval_dataset: Any
    ref_model: Any
    compute_ref_log_probs: Any
    """TRL's: log-probabilities of a batch, by columns of the table."""

    def __init__(self, *given: Any, **kwargs: Any) -> None:
        self._references: dict[str, dict[str, torch.Tensor]] = {}
        self._due: dict[str, int] = {}
        """Rows per batch of the tables whose reference is still to be computed."""
        self._hashes: dict[str, str] = {}
        self._is_made = False
        with _nothing_hashed(type(self)):
            super().__init__(*given, **kwargs)
        self._is_made = True

    def _look_at(self, given: dict[str, Any]) -> None:
        if given.get("ref_model") is not None:
            raise ConfigError(
                "ref_model is not supported",
                why="the reference is the model as it is given, computed with its own weights "
                "before the first step; a second model would not be offloaded",
                remedy="leave it out",
            )
        if given.get("args") is None:
            given["args"] = self.arguments(f"{self._name}-model")
        args = given["args"]
        if args.sync_ref_model:
            raise ConfigError(
                "sync_ref_model is not supported",
                why="the reference is computed once, with the first weights",
                remedy="leave it out",
            )
        for name in ("train_dataset", "eval_dataset"):
            tables = given.get(name)
            for table in tables.values() if isinstance(tables, dict) else [tables]:
                _refuse_unknown_rows(table, name)
        # TRL draws when it makes a loader for this; who did not ask for it has not drawn.
        self._draws = bool(getattr(args, _PRECOMPUTED))
        setattr(args, _PRECOMPUTED, True)

    def _precompute_ref_logps(self, dataset: Any, name: str, batch_size: int) -> Any:
        """Later, when there is an engine; TRL calls it while the trainer is made."""
        if self._is_made:
            return _with_columns(dataset, self._computed(dataset, batch_size))
        self._due[name] = batch_size
        self._hashes[name] = str(hash_rows(dataset, None))
        if self._draws:
            iter(DataLoader(dataset, batch_size=batch_size))
        return dataset

    def _before_training(self) -> None:
        """Compute the reference, where it was not found beside a seal."""
        super()._before_training()
        if not self._due:
            return
        self.plan_ahead()
        due, self._due = self._due, {}
        for name, batch_size in due.items():
            found = self._computed(self._tables()[name], batch_size)
            self._references[name] = found
        self.plan_ahead(may_shrink=True)  # the batches above may be larger than those of a step
        self._put_in_place()

    def evaluate(self, eval_dataset: Any = None, *more: Any, **kwargs: Any) -> Any:
        """TRL's; rows that come after the first step have no reference."""
        is_new = eval_dataset is not None and not isinstance(eval_dataset, str)
        if is_new and self.engine.num_steps > 0:
            raise ConfigError(
                f"rows to evaluate came after step {self.engine.num_steps}",
                why="they are compared with the first weights, which are gone",
                remedy="give them to the trainer as eval_dataset",
            )
        self._before_training()
        return super().evaluate(eval_dataset, *more, **kwargs)

    # ---- computing ----

    def _computed(self, dataset: Any, batch_size: int) -> dict[str, torch.Tensor]:
        if self.engine.num_steps > 0:
            raise ConfigError(
                f"the reference is to be computed after step {self.engine.num_steps}",
                why="it is what the first weights give, and they are gone",
                remedy="train before you ask for it, or start a new run",
            )
        before = random_state()
        loader = DataLoader(dataset, batch_size=batch_size, collate_fn=self.data_collator)
        self._tell_cost(len(loader), len(dataset))
        was_training = self.model.training
        self.model.eval()
        if self.adapting.is_on:
            self.ref_model = self.model  # or TRL switches adapters, batch by batch, in threads
        try:
            with self.adapting.as_reference():
                groups = _groups(loader, self._num_at_once())
                parts = [self._forwards(batches) for batches in groups]
        finally:
            self.ref_model = None
            self.model.train(was_training)
            set_random_state(before)
        columns = zip(*(one for part in parts for one in part), strict=True)
        named = zip(self.reference_columns, columns, strict=True)
        return {name: torch.cat(column).float() for name, column in named}

    def _forwards(self, batches: list[Any]) -> list[Sequence[torch.Tensor]]:
        """The columns of each batch."""
        prepared = [dict(self._prepare_inputs(batch)) for batch in batches]
        return self.without_gradients(prepared, self.compute_ref_log_probs)

    def without_gradients(
        self, batches: list[Any], forward: Callable[[Any, Any], Sequence[torch.Tensor]]
    ) -> list[Sequence[torch.Tensor]]:
        """What a function of model and batch gives for each batch; one forward of the model."""
        found: dict[int, Sequence[torch.Tensor]] = {}
        numbered = [{**batch, _NUMBER: _Number(number)} for number, batch in enumerate(batches)]

        def call(model: Any, batch: Any) -> torch.Tensor:
            given = dict(batch)
            number = given.pop(_NUMBER).value
            with torch.no_grad():
                found[number] = [one.detach().cpu() for one in forward(model, given)]
            return found[number][0].sum()

        self.engine.evaluate(numbered, call)
        return [found[number] for number in range(len(batches))]

    def _num_at_once(self) -> int:
        return max(1, int(self.args.gradient_accumulation_steps))

    def _tell_cost(self, num_batches: int, num_rows: int) -> None:
        if self.tell is None:
            return
        passes = math.ceil(num_batches / self._num_at_once()) * self.num_reference_forwards
        weights = sum(parameter.numel() for parameter in self.model.parameters())
        read = format_bytes_decimal(_WEIGHT_BYTES * weights)
        self.tell(
            f"computing the reference of {num_rows:,} rows with the first weights: {passes:,} "
            f"pass(es) through the model, each reading {read} at most; nothing is written"
        )

    # ---- in tables and checkpoints ----

    def _tables(self) -> dict[str, Any]:
        """Of the names TRL gives them."""
        held_out = self.eval_dataset
        named = held_out if isinstance(held_out, dict) else {"eval": held_out}
        return {"train": self.train_dataset, **named}

    def _put_in_place(self) -> None:
        for name, found in self._references.items():
            table = self._tables().get(name)
            if table is None or set(self.reference_columns) <= set(table.column_names):
                continue
            whole = _with_columns(table, found)
            if name == "train":
                self.train_dataset = whole
            elif isinstance(self.eval_dataset, dict):
                self.eval_dataset[name] = whole
            else:
                self.eval_dataset = whole

    def _write_small_files(self, folder: pathlib.Path, step: int) -> None:
        super()._write_small_files(folder, step)
        tensors = {
            f"{name}/{column}": tensor
            for name, found in self._references.items()
            for column, tensor in found.items()
        }
        hashes = {name: self._hashes[name] for name in self._references}
        save_file(tensors, folder / REFERENCE_NAME, metadata=hashes)

    def _check_unchanged(self, checkpoint: pathlib.Path, sealed: dict[str, Any]) -> None:
        """The rows are compared with their reference, which the checkpoint has."""
        path = checkpoint / REFERENCE_NAME
        if not path.exists():
            raise CheckpointError(
                f"{path} is missing",
                why="what the first weights gave for the rows is in it, and they are gone",
                remedy="restore it, or resume from another checkpoint",
            )
        with safetensors.safe_open(path, framework="pt") as file:
            hashes: Mapping[str, str] = file.metadata() or {}
            # Rows to evaluate on that are not given now may come back with a later resume.
            for name in {**self._due, **hashes}:
                is_same = hashes.get(name) == self._hashes.setdefault(name, hashes.get(name, ""))
                if name != "train" and not is_same:
                    raise ConfigError(
                        f"the rows to evaluate on ({name}) are not those of {checkpoint}",
                        why="they are compared with the first weights, which are gone",
                        remedy="bring them back, or leave them out",
                    )
                if is_same:
                    self._references[name] = {
                        key.removeprefix(f"{name}/"): file.get_tensor(key)
                        for key in file.keys()  # noqa: SIM118 - it is no mapping
                        if key.startswith(f"{name}/")
                    }
        self._due = {}
        self._put_in_place()
        super()._check_unchanged(checkpoint, sealed)


_NUMBER = "lohan_number"


class _Number:
    """Of a batch among others; no number for what looks at values of batches."""

    def __init__(self, value: int) -> None:
        self.value = value


def _groups(loader: Any, num_at_once: int) -> Iterator[list[Any]]:
    group: list[Any] = []
    for batch in loader:
        group.append(batch)
        if len(group) == num_at_once:
            yield group
            group = []
    if group:
        yield group


def _with_columns(dataset: Any, found: Mapping[str, torch.Tensor]) -> Any:
    table = Dataset.from_dict({name: tensor.numpy() for name, tensor in found.items()})
    return concatenate_datasets([dataset, table], axis=1)


def _refuse_unknown_rows(table: Any, name: str) -> None:
    if table is None:
        return
    if not isinstance(table, Dataset):
        raise ConfigError(
            f"{name} is a stream ({type(table).__name__})",
            why="the reference of every row is computed before the first step",
            remedy="give a table: datasets.Dataset, or a file of rows",
        )
    pictures = {"image", "images"}.intersection(table.column_names)
    if pictures:
        raise ConfigError(
            f"{name} has the column {pictures.pop()}",
            why="TRL computes no reference beforehand for rows with pictures",
            remedy="train on rows of text",
        )


@contextlib.contextmanager
def _nothing_hashed(kind: type) -> Iterator[None]:
    """TRL names a table it keeps by all weights; here they are not there, and it keeps none."""
    base = next(one for one in kind.__mro__ if one.__module__.startswith("trl.trainer."))
    module: Any = inspect.getmodule(base)
    plain = module.hash_module
    module.hash_module = lambda _: ""
    try:
        yield
    finally:
        module.hash_module = plain
