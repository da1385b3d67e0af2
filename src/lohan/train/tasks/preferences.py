"""`lohan.DPOTrainer`, `lohan.KTOTrainer` and `lohan.RewardTrainer`.

Owns how TRL's batches of pairs become what the model gets, and the second forward of KTO. The
losses are TRL's own. What the first weights gave is in `references`.
"""

import inspect
import threading
from collections.abc import Sequence
from typing import Any

import torch
import trl

from lohan.train.adapters.kinds import is_adapted
from lohan.train.tasks.references import ReferenceMixin
from lohan.train.trainer.shared_forward import refuse_second_draws
from lohan.train.trainer.trainer import OffloadMixin

_KL = "lohan_kl"
_PAIRS = (("prompt_ids", "chosen_ids"), ("prompt_ids", "rejected_ids"))


def _call_with_inputs(model: Any, batch: Any) -> Any:
    """The model on what of a batch is an input of it: to plan with, and for nothing else."""
    plain = model.get_base_model() if is_adapted(model) else model
    known = inspect.signature(type(plain).forward).parameters
    return model(**{name: value for name, value in batch.items() if name in known})


class PairsMixin(OffloadMixin):
    """Batches have more in them than a model takes."""

    is_loss_of_tokens = False

    def _planning_call(self) -> Any:
        return _call_with_inputs


class RewardTrainer(PairsMixin, trl.RewardTrainer):  # type: ignore[misc]
    """TRL's RewardTrainer; takes `offload` besides its own arguments."""

    token_columns = (("chosen_ids",), ("rejected_ids",))
    _head = "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING"


class DPOTrainer(ReferenceMixin, PairsMixin, trl.DPOTrainer):  # type: ignore[misc]
    """TRL's DPOTrainer; takes `offload` besides its own arguments, and no `ref_model`."""

    token_columns = _PAIRS
    reference_columns = ("ref_chosen_logps", "ref_rejected_logps")
    arguments = trl.DPOConfig


class KTOTrainer(ReferenceMixin, PairsMixin, trl.KTOTrainer):  # type: ignore[misc]
    """TRL's KTOTrainer; takes `offload` besides its own arguments, and no `ref_model`.

    Its loss needs a forward without gradients of other pairs; all of a step's run before it.
    """

    token_columns = (("prompt_ids", "completion_ids"), ("prompt_ids", "KL_completion_ids"))
    arguments = trl.KTOConfig
    calculate_KL: bool

    def __init__(self, *given: Any, **kwargs: Any) -> None:
        self._kl = threading.local()  # each micro-batch has a thread
        super().__init__(*given, **kwargs)

    @property
    def reference_columns(self) -> tuple[str, ...]:  # type: ignore[override]
        """Of both forwards, where there are two."""
        return ("ref_logps", "ref_KL_logps") if self.calculate_KL else ("ref_logps",)

    @property
    def num_reference_forwards(self) -> int:  # type: ignore[override]
        """Passes for each batch."""
        return len(self.reference_columns)

    def create_optimizer(self, model: Any = None) -> Any:
        """The engine's; two forwards that draw are refused before it starts."""
        if self.calculate_KL:
            refuse_second_draws(self.model, f"loss_type={self.loss_type}")
        return super().create_optimizer(model)

    def _forwards(self, batches: list[Any]) -> list[Sequence[torch.Tensor]]:
        prepared = [dict(self._prepare_inputs(batch)) for batch in batches]
        wants_kl, self.calculate_KL = self.calculate_KL, False
        try:
            found = self.without_gradients(
                prepared, lambda model, batch: self.compute_ref_log_probs(model, batch)[:1]
            )
        finally:
            self.calculate_KL = wants_kl
        if not wants_kl:
            return found
        pairs = zip(found, self._kl_of(prepared), strict=True)
        return [[*first, *second] for first, second in pairs]

    def _for_engine(self, inputs: Any) -> Any:
        return dict(inputs)

    def _kl_of(self, batches: list[Any]) -> list[Sequence[torch.Tensor]]:
        plainly = super()._compute_kl_logps
        return self.without_gradients(batches, lambda model, batch: [plainly(model, batch)])

    def _add_known(self, batches: list[Any]) -> None:
        if self.calculate_KL:
            for batch, (found,) in zip(batches, self._kl_of(batches), strict=True):
                batch[_KL] = found.to(self.args.device)

    def _compute_loss(self, model: Any, inputs: Any, return_outputs: bool) -> Any:
        inputs = dict(inputs)
        self._kl.logps = inputs.pop(_KL, None)
        return super()._compute_loss(model, inputs, return_outputs)

    def _compute_kl_logps(self, model: Any, batch: Any) -> Any:
        """Of the model as it is: computed before the step that this loss is of."""
        return self._kl.logps
