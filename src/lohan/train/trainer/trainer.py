"""`lohan.Trainer` and `lohan.SFTTrainer`: transformers' and TRL's trainers on the engine.

Owns the mixin that hands whole optimizer steps and evaluation batches to the engine. Data,
schedules, callbacks, logging and arguments stay where they are maintained. Saving and resuming are
in `saving`; the arguments that cannot work are in `arguments`.

Note "a window at once". transformers fetches the micro-batches of an optimizer step together
(`get_batch_samples`) and then calls `training_step` for each. The first of these calls runs the
whole step in the engine, the following ones return their share of the losses, so that sums and
logs see the same numbers in the same order as in memory.
"""

import contextlib
import copy
import functools
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
import transformers
import trl
from transformers.trainer_utils import has_length

from lohan.device import torch_device_named
from lohan.drive.weights.offloaded import note_used_gradients
from lohan.errors import ConfigError, LohanWarning
from lohan.model.inputs import is_known
from lohan.train.adapters.adapting import Adapting
from lohan.train.adapters.kinds import QUANTIZED_BASE, is_adapted, refuse_prompts_in_pairs
from lohan.train.data.answer_marks import every_template_marked
from lohan.train.run.out_folder import locked_folder
from lohan.train.run.progress import teller
from lohan.train.run.randomness_state import random_state, set_random_state
from lohan.train.settings.arguments import (
    refuse_broken_window,
    refuse_generating,
    refuse_unsupported,
    switch_off,
)
from lohan.train.settings.offload import OffloadConfig, read_offload
from lohan.train.settings.prompts import Prompt, read_prompts
from lohan.train.trainer.engine_optimizer import SteppedByEngine, groups_of_adamw
from lohan.train.trainer.evaluation import GroupedBatches, Prediction
from lohan.train.trainer.fp32_losses import compute_losses_in_fp32, narrow_inputs
from lohan.train.trainer.largest_batch import longest_rows, refuse_unknown_tokens
from lohan.train.trainer.named_model import make_named, named_parameters, open_named, templated
from lohan.train.trainer.rehearsal import collated_without_trace, may_rehearse, without_trace
from lohan.train.trainer.samples import Asked
from lohan.train.trainer.saving import RELIED_ON, SavingMixin
from lohan.train.trainer.shared_forward import OneForward, refuse_second_draws
from lohan.train.weights.source import ModelSource

# Methods of transformers' Trainer that are overridden here and in `saving`. If a release renames
# one, ours would silently not be called.
_RELIED_ON = (
    "create_accelerator_and_postprocess",
    "_move_model_to_device",
    "create_optimizer",
    "_run_epoch",
    "get_batch_samples",
    "training_step",
    "compute_loss",
    "prediction_step",
    "evaluation_loop",
    "_get_dataloader",
    "_remove_unused_columns",
    "_clip_grad_norm",
    "_get_grad_norm",
    *RELIED_ON,
)
_REFUSED_PARAMETERS = {
    "model_init": "the model is made once, where its weights lie",
    "optimizer_cls_and_kwargs": "the engine runs AdamW with fp32 states",
    "quantization_config": QUANTIZED_BASE,
}


class OffloadMixin(SavingMixin):
    """Put before a trainer class: its steps, evaluations and checkpoints go through the engine.

    Besides the arguments of the trainer it takes `offload` (`OffloadConfig`, or a mapping with the
    keys of the `offload:` block) and `sample_prompts`, answered before and after training. A model
    given by name is never loaded into RAM.
    """

    token_columns: tuple[tuple[str, ...], ...] = (("input_ids",),)
    """Columns of a prepared table with tokens: those of one sequence in order, each way."""
    _head: str | None = None
    """What a model given by name has on top, where that is not what its configuration says."""
    is_loss_of_tokens = True
    """Whether the loss is a mean over tokens, which has a perplexity."""

    def __init__(
        self,
        *given: Any,
        offload: OffloadConfig | Mapping[str, Any] | None = None,
        sample_prompts: Sequence[Prompt] = (),
        **kwargs: Any,
    ) -> None:
        refuse_generating(type(self))
        self.sample_prompts = read_prompts(sample_prompts)
        self.offload = read_offload(offload or {}, where="offload")
        self._refuse_unknown_release()
        # By name: TRL's trainers have their parameters in different orders.
        kwargs = named_parameters(type(self), OffloadMixin, given, kwargs)
        for name, why in _REFUSED_PARAMETERS.items():
            if kwargs.get(name) not in (None, (None, None)):
                raise ConfigError(f"{name} is not supported", why=why, remedy="leave it out")
        self._given_groups = groups_of_adamw(kwargs.pop("optimizers", None))
        self._look_at(kwargs)
        model, args = kwargs.pop("model", None), kwargs.get("args")
        self.source: ModelSource | None = None
        if isinstance(model, ModelSource):
            self.source = model
        elif isinstance(model, str | os.PathLike):
            self.source = open_named(os.fspath(model), args, self._head)
            self.model_name = os.fspath(model)
        if self.source is not None:
            model = make_named(self.source, args)
            tokenizer = templated(self.source, args, kwargs.get("processing_class"))
            kwargs["processing_class"] = tokenizer
        if not self.is_loss_of_tokens:
            refuse_prompts_in_pairs(model, kwargs.get("peft_config"), type(self).__name__)
        self.adapting = Adapting(model, kwargs.get("peft_config"), is_named=self.source is not None)
        self._prepare_saving()
        self.is_out_held = False
        """Whether whoever made this trainer keeps others out of the output folder already."""
        self._micro_batches: list[Any] = []
        self._losses: list[float] = []
        self._evaluating: GroupedBatches | None = None
        self._given: list[Any] | None = None
        """Batches of an evaluation that comes before the first step."""
        super().__init__(model=model, **kwargs)
        self.adapting.finish(self.model)
        self._one_forward = OneForward(self.model)
        if self.args.bf16 or self.args.fp16:
            compute_losses_in_fp32(self.model)
            narrow_inputs(self.model)
        self.tell = teller(self.args)
        self.is_first  # noqa: B018 - now: accelerate's state may be reset before `close`

    def _look_at(self, given: dict[str, Any]) -> None:
        """Refuse or complete the parameters of the trainer, before it is made."""
        if hasattr(self, "compute_ref_log_probs"):
            raise ConfigError(
                f"{type(self).__name__} has a ref_model, which the engine knows nothing of",
                why="it would be in RAM as a whole, beside what is planned",
                remedy="use lohan.DPOTrainer or lohan.KTOTrainer, whose reference is computed "
                "with the first weights",
            )

    @classmethod
    def _refuse_unknown_release(cls) -> None:
        missing = [name for name in _RELIED_ON if not hasattr(transformers.Trainer, name)]
        if missing:
            raise ConfigError(
                f"transformers {transformers.__version__} has no Trainer.{missing[0]}",
                why="steps and checkpoints reach the engine through it",
                remedy="install a release that lohan is tested with: see constraints.txt",
            )

    def _send_telemetry(self) -> None:
        """Nothing about a run leaves the machine."""

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As `SavingMixin.train`, with the output folder locked against other processes."""
        for what, table in (("training", self.train_dataset), ("evaluation", self.eval_dataset)):
            refuse_unknown_tokens(table, self.model, self.token_columns, what=what)
        with self.told_of_failure():
            if self.is_out_held or not self.is_first:
                return super().train(*args, **kwargs)
            self.out.mkdir(parents=True, exist_ok=True)
            with locked_folder(self.out):
                return super().train(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        """Keep accelerate from moving, wrapping or casting the model."""
        refuse_unsupported(self.args)
        for note in switch_off(self.args):
            warnings.warn(f"without effect: {note}", LohanWarning, stacklevel=2)
        # Weights are in their compute format; autocast would only add roundings.
        self.args.mixed_precision = "no"
        if self.model is not None:  # transformers says so
            self.compute_dtype()
        super().create_accelerator_and_postprocess()
        self.accelerator.device_placement = False
        # Among ranks accelerate would put a reducer of gradients around it.
        self.accelerator.prepare_model = functools.partial(
            self.accelerator.prepare_model, evaluation_mode=True
        )
        # transformers takes the first of all GPUs it sees, and shares out losses among them; the
        # engine computes on one, which may be another, or on none.
        device = torch_device_named(self.offload.device)
        self.args._n_gpu = int(device.type != "cpu")
        self.args.__dict__["_setup_devices"] = device
        self.accelerator.state.device = device

    def _get_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """transformers'; accelerate makes another one of a stream where it places no batches."""
        self.accelerator.device_placement = True
        try:
            return super()._get_dataloader(*args, **kwargs)
        finally:
            self.accelerator.device_placement = False

    def _move_model_to_device(self, model: Any, device: Any) -> None:
        """Nothing: weights come and go by the engine."""

    def compute_dtype(self) -> torch.dtype:
        """Format of the compute weights: from `bf16` and `fp16`, else that of the module given.

        Raises:
            ConfigError: neither says a 16-bit format.
        """
        if self.args.bf16:
            return torch.bfloat16
        if self.args.fp16:
            return torch.float16
        given = "the model is given by its name"
        if self.source is None:
            # Of an adapter on a base in 16 bits PEFT makes fp32, which masters are.
            is_all = not is_adapted(self.model)
            found = {p.dtype for p in self.model.parameters() if is_all or not p.requires_grad}
            if found <= {torch.bfloat16} or found <= {torch.float16}:
                return cast(torch.dtype, found.pop())
            given = f"the model is in {', '.join(sorted(map(str, found)))}"
        raise ConfigError(
            f"{given} and neither bf16 nor fp16 is on",
            why="weights are computed with in a 16-bit format; masters and moments are fp32",
            remedy="set bf16=True",
        )

    def first_weights(self) -> Iterable[tuple[str, torch.Tensor]] | None:
        """First values of the masters, in the precision they have, one tensor at a time."""
        if self.source is not None:
            return self.adapting.first_weights(self.source.tensors(), self.compute_dtype())
        dtype = self.compute_dtype()
        if all(parameter.dtype == dtype for parameter in self.model.parameters()):
            return None
        before = [(name, one.detach()) for name, one in self.model.named_parameters()]
        for parameter in self.model.parameters():
            parameter.data = parameter.data.to(dtype)
        return _each_once(before)

    def create_optimizer(self, model: Any = None) -> Any:
        """AdamW over `parameter_groups`, or over those of the AdamW that was given."""
        if self.optimizer is None:
            groups = self._given_groups or self.parameter_groups()
            if not groups:
                raise ConfigError(
                    f"no parameter of {type(self.model).__name__} is trained",
                    why="requires_grad is off for all of them",
                    remedy="load an adapter with PeftModel.from_pretrained(..., "
                    "is_trainable=True), or switch requires_grad on for what is to be trained",
                )
            self.optimizer = SteppedByEngine(
                groups,
                lr=self.args.learning_rate,
                betas=(self.args.adam_beta1, self.args.adam_beta2),
                eps=self.args.adam_epsilon,
                max_grad_norm=self.args.max_grad_norm or None,
            )
        return self.optimizer

    def parameter_groups(self) -> list[dict[str, Any]]:
        """transformers' two groups, with weight decay and without; for others override this.

        A group may have `lr`, `weight_decay`, `betas` and `eps` of its own.
        """
        decayed = set(self.get_decay_parameter_names(self.model))
        named = [(n, p) for n, p in self.model.named_parameters() if p.requires_grad]
        groups = [
            {
                "params": [p for n, p in named if n in decayed],
                "weight_decay": self.args.weight_decay,
            },
            {"params": [p for n, p in named if n not in decayed], "weight_decay": 0.0},
        ]
        return [group for group in groups if group["params"]]

    def answers(self, prompts: Sequence[Prompt]) -> list[str]:
        """What the model writes after a few prompts, greedily, from the weights where they are.

        Each token is a pass through the model. May block: yes, long.
        """
        return Asked(self, read_prompts(prompts)).answers()

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """transformers' epoch; it would take one more step where a finished run is resumed."""
        if self.is_over:
            self.control.should_training_stop = True
            return
        super()._run_epoch(*args, **kwargs)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """Remember the micro-batches of the window: the engine gets them together."""
        found = super().get_batch_samples(epoch_iterator, num_batches, device)
        self._micro_batches, self._losses = list(found[0]), []
        return cast(tuple[list[Any], Any], found)

    def training_step(
        self, model: Any, inputs: Any, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """Loss of one micro-batch; the first one of a window runs the step of all of them."""
        if not self._losses:
            batches = self._micro_batches
            if not any(batch is inputs for batch in batches):
                batches = [inputs]  # called by hand, outside of a window
            self._run_step(batches, num_items_in_batch)
        return torch.tensor(self._losses.pop(0), dtype=torch.float32, device=self.args.device)

    def _run_step(self, batches: list[Any], num_items_in_batch: Any) -> None:
        refuse_broken_window(self, len(batches))
        self.model.train()
        prepared = [self._for_engine(self._prepare_inputs(batch)) for batch in batches]
        self._add_known(prepared)
        # accelerate deals every rank equally many. Here gradients are sums over ranks, not means.
        num_batches = self.current_gradient_accumulation_steps = len(batches) * self.args.world_size
        divisor = 1 if self._is_loss_scaled(num_items_in_batch) else num_batches

        def loss_of(model: Any, batch: Any) -> torch.Tensor:
            # A copy of the batch, because compute_loss takes keys out.
            with self._rehearsal():
                inputs = self._of_trainer(batch)
                loss = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
            return cast(torch.Tensor, loss if divisor == 1 else loss / divisor)

        note_used_gradients(self.model, are_used=False)  # if a step before ended early
        # Where a loss is of the tokens of all ranks, trainers multiply it by their number.
        is_averaged = self.args.average_tokens_across_devices
        self.args.average_tokens_across_devices = False
        try:
            result = self.engine.step(prepared, loss_of, weights=[1.0] * len(prepared))
        finally:
            self.args.average_tokens_across_devices = is_averaged
        note_used_gradients(self.model, are_used=True)
        self._note_step(result)
        self._losses = list(result.losses)
        if self.engine.reduction_groups > 1:
            # All at once, so that a logged sum does not depend on how many ranks there are.
            self._losses = [0.0] * (len(batches) - 1) + [result.loss]

    def compute_loss(self, model: Any, inputs: Any, *more: Any, **kwargs: Any) -> Any:
        """The trainer's loss; where one of TRL's calls the model again, the blocks run once."""
        compute = super().compute_loss
        if not compute.__module__.startswith("trl."):
            return compute(model, inputs, *more, **kwargs)
        with self._one_forward.per_loss():
            return compute(model, inputs, *more, **kwargs)

    def _rehearsal(self) -> contextlib.AbstractContextManager[None]:
        """Around a call of `compute_loss`: one whose result is thrown away leaves no trace."""
        return without_trace(self) if self.engine.is_rehearsing else contextlib.nullcontext()

    # What the model computes with may be laid out differently in a trainer's batch.

    def _for_engine(self, inputs: Any) -> Any:
        """A batch as the engine is given it: its sizes are those the model gets."""
        return inputs

    def _of_trainer(self, batch: Any) -> dict[str, Any]:
        """The batch of the trainer that the engine was given so."""
        return dict(batch)

    def _add_known(self, batches: list[Any]) -> None:
        """Add what a loss needs besides one forward of the model with gradients."""

    def plan_ahead(self, *, may_shrink: bool = False) -> None:
        """Have the engine plan for the largest step of the run, before the first one.

        Args:
            may_shrink: also where it has planned for larger batches than a step has.

        Raises:
            DoesNotFit: it needs more memory than allowed; nothing was trained.
        """
        batches = self.largest_step()
        if batches is not None:
            self.engine.prepare(batches, may_shrink=may_shrink)

    def largest_step(self) -> list[Any] | None:
        """Micro-batches of the longest rows; None where rows cannot be looked at beforehand."""
        longest = longest_rows(
            self.train_dataset, self.args.per_device_train_batch_size, self.token_columns
        )
        if not longest or not may_rehearse(self.data_collator):
            return None
        # As the dataloader does it: columns the model has no use for may be left out.
        rows = list(self._remove_unused_columns(longest, description="training"))
        batch = self._prepare_inputs(collated_without_trace(self.data_collator, rows))
        return [dict(self._for_engine(batch))] * self.args.gradient_accumulation_steps

    def shown_step(self) -> list[Any] | None:
        """Micro-batches of the first rows, where only rows show what a model is called with."""
        rows = self.train_dataset
        is_stream = isinstance(rows, torch.utils.data.IterableDataset) or not has_length(rows)
        if is_known(self.model) or self._given or rows is None or is_stream:
            return self._given
        before = random_state()
        try:
            count = min(self.args.per_device_train_batch_size, len(rows))
            collate = self._get_collator_with_removed_columns(copy.deepcopy(self.data_collator))
            batch = self._prepare_inputs(collate([rows[index] for index in range(count)]))
        finally:
            set_random_state(before)
        return [dict(self._for_engine(batch))] * self.args.gradient_accumulation_steps

    def _is_loss_scaled(self, num_items_in_batch: Any) -> bool:
        """Whether `compute_loss` divides by the items of the whole step, as transformers asks."""
        is_said = getattr(self, "loss_is_scaled_for_ga", None)
        if is_said is not None:
            return bool(is_said)
        is_by_model = self.model_accepts_loss_kwargs and num_items_in_batch is not None
        return bool(is_by_model or self.compute_loss_func is not None)

    def _clip_grad_norm(self, model: Any) -> float | None:
        return self.last_step.grad_norm if self.last_step is not None else None

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> float | None:
        return self.last_step.grad_norm if self.last_step is not None else None

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        """transformers' loop over batches that are predicted in groups."""
        is_loss_only = bool(
            self.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        )
        # As many at once as a training step holds; logits are kept for one batch only.
        num_batches = max(1, self.args.gradient_accumulation_steps) if is_loss_only else 1
        self._evaluating = GroupedBatches(
            dataloader,
            lambda group: self._predict(group, is_loss_only, ignore_keys),
            num_batches=num_batches,
        )
        try:
            return super().evaluation_loop(
                self._evaluating, description, is_loss_only, ignore_keys, metric_key_prefix
            )
        finally:
            self._evaluating = None

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Any, Any, Any]:
        """Loss, logits and labels of a batch, from the group it was predicted with."""
        found = self._evaluating.prediction_of(inputs) if self._evaluating is not None else None
        if found is None:
            found = self._predict([inputs], prediction_loss_only, ignore_keys)[0]
        return found.loss, found.logits, found.labels

    def _predict(
        self, batches: list[Any], is_loss_only: bool, ignore_keys: Any = None
    ) -> list[Prediction]:
        predict_plainly = super().prediction_step
        found: dict[int, tuple[bool, Any, Any]] = {}
        prepared = [dict(self._for_engine(self._prepare_inputs(batch))) for batch in batches]
        self._add_known(prepared)
        places = {id(batch): index for index, batch in enumerate(prepared)}

        def loss_of(model: Any, batch: Any) -> torch.Tensor:
            with self._rehearsal():
                loss, logits, labels = predict_plainly(
                    model, self._of_trainer(batch), is_loss_only, ignore_keys
                )
            found[places.get(id(batch), len(found))] = (loss is not None, logits, labels)
            # Rows without labels have no loss, and are predicted all the same.
            return torch.zeros(()) if loss is None else cast(torch.Tensor, loss)

        if self._engine is None and not is_known(self.model):
            self._given = prepared
        losses = self.engine.evaluate(prepared, loss_of)
        predictions = []
        for index, number in enumerate(losses):
            has_loss, logits, labels = found[index]
            loss = torch.tensor(number, device=self.args.device) if has_loss else None
            predictions.append(Prediction(loss, logits, labels))
        return predictions


def _each_once(
    tensors: list[tuple[str, torch.Tensor]],
) -> Iterator[tuple[str, torch.Tensor]]:
    """Hand tensors out and let go of them, so that no second model stays in RAM."""
    tensors.reverse()
    while tensors:
        yield tensors.pop()


class Trainer(OffloadMixin, transformers.Trainer):
    """transformers' Trainer; takes `offload` besides its own arguments."""


class SFTTrainer(OffloadMixin, trl.SFTTrainer):  # type: ignore[misc]
    """TRL's SFTTrainer; takes `offload` besides its own arguments."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with every_template_marked():
            super().__init__(*args, **kwargs)

    def create_optimizer(self, model: Any = None) -> Any:
        """The engine's; what draws twice in TRL is refused before it starts."""
        for setting, value in (
            ("compute_loss_func", self.compute_loss_func),
            ("label_smoothing_factor", self.args.label_smoothing_factor),
        ):
            if value:
                refuse_second_draws(self.model, setting)
        return super().create_optimizer(model)
