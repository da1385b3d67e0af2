"""`lohan.ORPOTrainer` and `lohan.CPOTrainer`: TRL's experimental trainers of pairs, on the engine.

Owns giving the engine both halves of a pair as the one batch that the model gets.
"""

from typing import Any

from lohan.errors import ConfigError
from lohan.train.settings.tasks import trl_module
from lohan.train.tasks.preferences import PairsMixin

_CPO: Any = trl_module("experimental.cpo").CPOTrainer
_ORPO: Any = trl_module("experimental.orpo").ORPOTrainer
_ROWS = "lohan_rows"


class _ConcatenatedMixin(PairsMixin):
    """Chosen and rejected are put together within the loss."""

    token_columns = (("chosen_input_ids",), ("rejected_input_ids",))

    def _look_at(self, given: dict[str, Any]) -> None:
        if getattr(given.get("args"), "generate_during_eval", False):
            raise ConfigError(
                "generate_during_eval is not supported",
                why="each token it writes is a pass through weights that are on SSD",
                remedy="leave it out; sample_prompts answers a few prompts before and after",
            )

    def _for_engine(self, inputs: Any) -> Any:
        whole = self.concatenated_inputs(
            inputs,
            is_encoder_decoder=self.is_encoder_decoder,
            padding_value=getattr(self, "padding_value", self.processing_class.pad_token_id),
            device=self.args.device,
        )
        names = ("input_ids", "attention_mask")
        given = {name: whole[f"concatenated_{name}"] for name in names}
        return {**given, _ROWS: _Rows(inputs)}

    def _of_trainer(self, batch: Any) -> dict[str, Any]:
        return dict(batch[_ROWS].inputs)


class _Rows:
    """A trainer's batch, carried beside what the model gets of it."""

    def __init__(self, inputs: Any) -> None:
        self.inputs = inputs


class ORPOTrainer(_ConcatenatedMixin, _ORPO):  # type: ignore[misc]
    """TRL's ORPOTrainer; takes `offload` besides its own arguments."""


class CPOTrainer(_ConcatenatedMixin, _CPO):  # type: ignore[misc]
    """TRL's CPOTrainer (and SimPO by its loss); takes `offload` besides its own arguments."""
