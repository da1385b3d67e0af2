"""A model traced as the engine will run it, and the sizes of its batches.

Owns how inputs of any size are made like an example, and what of a step's batches a plan depends
on. Decides nothing. Used by `plan_run` and the engine.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map

from lohan.drive.micro_batch import LossFunction
from lohan.drive.surroundings.ambient import memory_features_off
from lohan.drive.surroundings.host_randomness import host_state_kept
from lohan.drive.surroundings.randomness import draw_setting
from lohan.engine.planning.label_watch import LabelWatch
from lohan.errors import ConfigError
from lohan.model.assemble import shape_at
from lohan.model.inputs import inputs_for
from lohan.model.shape import ModelShape
from lohan.model.tracing.objects import settings_in
from lohan.model.tracing.trace_model import Call, MakeInputs, Stretch, TraceableModel
from lohan.model.tracing.trace_ops import tensors_in

_SMALLEST_SIZES = (2, 16)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSizes:
    """Sizes of a step: of its largest micro-batch, and how many there are."""

    num_micro_batches: int
    micro_batch: int
    sequence: int
    is_padded: bool = False
    """Whether a mask masks something: models then make masks, and run other operators."""

    def __str__(self) -> str:
        return f"{self.num_micro_batches} micro-batch(es) of {self.micro_batch} x {self.sequence}"

    def covers(self, other: "BatchSizes") -> bool:
        """Whether a plan for these sizes can run a step of other sizes.

        Fewer micro-batches than planned (the last ones of an epoch) leave places empty.
        """
        return (
            self.num_micro_batches >= other.num_micro_batches
            and self.micro_batch >= other.micro_batch
            and self.sequence >= other.sequence
            and self.is_padded >= other.is_padded
        )

    def with_room_for(self, other: "BatchSizes") -> "BatchSizes":
        """Sizes that cover both; a longer sequence gets some room, so that not every batch that
        is longer than all before needs a plan of its own."""
        longer = other.sequence > self.sequence
        return BatchSizes(
            num_micro_batches=max(self.num_micro_batches, other.num_micro_batches),
            micro_batch=max(self.micro_batch, other.micro_batch),
            sequence=max(self.sequence, -(-other.sequence // 64) * 64 if longer else 0),
            is_padded=self.is_padded or other.is_padded,
        )


def plain_batch(batch: Any) -> Any:
    """A batch whose tensors can be found: what tokenizers return is a mapping but no dictionary."""
    return dict(batch) if isinstance(batch, Mapping) else batch


def sizes_of(batches: Sequence[Any]) -> BatchSizes:
    """The sizes of a step's micro-batches.

    Raises:
        ConfigError: a batch has no tensor with a batch dimension.
    """
    rows, columns = [], []
    for batch in batches:
        tensors = [leaf for leaf in tensors_in(plain_batch(batch)) if leaf.dim() >= 1]
        if not tensors:
            raise ConfigError(
                "a micro-batch has no tensors",
                why="its size is not known",
                remedy="give batches of tensors whose first dimension counts sequences",
            )
        rows.append(_num_rows(tensors))
        lengths = [tensor.shape[1] for tensor in tensors if _is_tokens(tensor)]
        columns.append(max(lengths, default=1))
    return BatchSizes(
        num_micro_batches=len(batches),
        micro_batch=max(rows),
        sequence=max(columns),
        is_padded=any(_is_padded(batch) for batch in batches),
    )


class TracedModel:
    """A model made ready to be traced as the engine runs it."""

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        dtype: torch.dtype,
        device: torch.device,
        example: Any | None,
        loss_fn: Callable[[torch.nn.Module, Any], torch.Tensor] | None,
    ) -> None:
        """`example`: a micro-batch; without one the model must be one whose inputs are known."""
        call: Call | None = loss_fn
        with memory_features_off(model):
            self._traceable = TraceableModel(
                model,
                dtype=dtype,
                device=device,
                should_assume_flash=False,
                call=call if example is not None else None,
            )
        self._make_inputs: MakeInputs
        if example is not None:
            sizes = sizes_of([example])
            self._make_inputs = _like(example, is_padded=sizes.is_padded)
            small: tuple[int, int] = _point(sizes)
        else:
            self._make_inputs, is_fixed = inputs_for(model, dtype)
            small = (2, 0) if is_fixed else _SMALLEST_SIZES
        self._model = model
        self._traced_with = self._description(self._make_inputs, small)
        self.stretches: list[Stretch] = self._run(self._make_inputs, small)
        self.smallest_sizes = BatchSizes(
            num_micro_batches=1, micro_batch=small[0], sequence=small[1]
        )
        """It was traced with; for a shape where no batch is known yet."""
        self._counts_first: dict[Hashable, bool | None] = {}

    @property
    def changed_buffers(self) -> tuple[str, ...]:
        """Buffers that a forward pass in the mode of now changes."""
        return self._traceable.changed_buffers

    def counts_first_label(self, batch: Any, loss_fn: LossFunction | None) -> bool | None:
        """Whether the labels of first tokens count for a loss; None where it cannot be seen.

        Found out once per loss and its settings, by running it on fake tensors.

        Raises:
            ConfigError: it cannot run on fake tensors.
        """
        key = (draw_setting(self._model, loss_fn), settings_in(loss_fn))
        if key not in self._counts_first:
            watch, sizes = LabelWatch(), sizes_of([batch])
            self._run(
                _like(batch, is_padded=sizes.is_padded),
                _point(sizes),
                call=loss_fn,
                watch=watch.following,
            )
            self._counts_first[key] = watch.counts_first
        return self._counts_first[key]

    def shape(self, sizes: BatchSizes, batches: Sequence[Any]) -> ModelShape:
        """The model's shape at the sizes of a run; `batches` are like those of the run.

        Raises:
            ConfigError: it does not run as it did when it was attached.
        """
        # A padded one stands for the others too: its masks come on top of what they need.
        example = next((batch for batch in batches if _is_padded(batch)), batches[0])
        is_known = not isinstance(example, Mapping)
        make_inputs = self._make_inputs if is_known else _like(example, is_padded=sizes.is_padded)
        point = _point(sizes)
        # Most runs have steps like the example they were attached with: one run tells all.
        is_traced = self._description(make_inputs, point) == self._traced_with
        run = self.stretches if is_traced else self._run(make_inputs, point)
        if len(run) != len(self.stretches):
            # It leaves a whole tower out, or uses one more. Planned is what was attached with.
            run = self._run(self._make_inputs, point)
        if len(run) != len(self.stretches):
            raise ConfigError(
                f"the model ran through {len(run)} parts, and through {len(self.stretches)} when "
                "it was attached",
                why="states lie on SSD in the order of these parts",
                remedy="attach with example= set to a batch like those of the run",
            )
        return shape_at(self._traceable, run, point, name=type(self._model).__name__)

    def _run(self, make_inputs: MakeInputs, point: tuple[int, int], **how: Any) -> list[Stretch]:
        """The user's model and process are as before a trace after it."""
        with memory_features_off(self._model), host_state_kept():
            return self._traceable.run(make_inputs, point, **how)

    def _description(self, make_inputs: MakeInputs, point: tuple[int, int]) -> list[Any]:
        """Equal only where the model runs alike: its settings, and inputs but for the numbers in
        tensors."""

        def one(leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor) and leaf.dim():
                return leaf.shape, leaf.dtype
            # What is not known to be alike is like nothing.
            return (type(leaf), leaf) if isinstance(leaf, str | int | float | None) else object()

        with FakeTensorMode(allow_non_fake_inputs=True):
            inputs = make_inputs(*point)
        leaves, structure = tree_flatten(inputs)
        trained = [parameter.requires_grad for parameter in self._model.parameters()]
        settings = draw_setting(self._model, None)
        return [settings, trained, structure, _is_padded(inputs), *map(one, leaves)]


def _point(sizes: BatchSizes) -> tuple[int, int]:
    return sizes.micro_batch, sizes.sequence


def _like(example: Any, *, is_padded: bool) -> MakeInputs:
    """Inputs like an example, of any batch and sequence length: its rows again and again, their
    last tokens too."""

    def make(batch: int, sequence: int) -> dict[str, Any]:
        def one(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0:
                return leaf
            leaf = leaf.detach()
            # Without values it stays so.
            leaf = leaf.cpu() if not leaf.is_meta else leaf
            if leaf.shape[0] == num_rows:
                leaf = leaf[torch.arange(batch, device=leaf.device) % num_rows]
                if _is_tokens(leaf) and leaf.shape[1] == length:
                    places = torch.arange(sequence, device=leaf.device)
                    leaf = leaf[:, places.clamp(max=leaf.shape[1] - 1)]
            return leaf.clone()

        with _disable_current_modes():
            made: dict[str, Any] = tree_map(one, kept)
        return made

    kept = dict(example)
    # Other whole numbers in rows are sizes of pictures.
    num_rows, length = _point(sizes_of([example]))
    if is_padded and not _is_padded(example) and "attention_mask" in kept:
        # Models leave a mask that masks nothing out, and then run other operators.
        kept["attention_mask"] = kept["attention_mask"].clone()
        kept["attention_mask"][:, -1] = 0
    return make


def _is_padded(batch: Any) -> bool:
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    # Without values it is not known, and a mask may come.
    return isinstance(mask, torch.Tensor) and (mask.is_meta or not bool(mask.all()))


def _num_rows(tensors: Sequence[torch.Tensor]) -> int:
    """Sequences in a batch: the first dimension most tensors have. The others (positions in an
    image, say) are the same for all sequences."""
    counts = Counter(tensor.shape[0] for tensor in tensors)
    return max(counts, key=lambda size: (counts[size], size), default=0)


def _is_tokens(tensor: torch.Tensor) -> bool:
    return tensor.dim() == 2 and not tensor.is_floating_point()
