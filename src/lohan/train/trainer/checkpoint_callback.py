"""The callback that decides when a run on the engine seals or stops.

Owns the moments: the first seal before step 1, archives, a stop by signal, the write budget. What
is done then is in `saving`. transformers calls it.
"""

from typing import Any

from transformers import TrainerCallback

from lohan.drive.weights.offloaded import note_used_gradients
from lohan.train.run.writes import why_to_stop


class SealingFlow(TrainerCallback):
    """Sets transformers' flow flags; runs on the main thread."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Hold the room for everything that will be written, and plan the largest step."""
        self._trainer.hold_space()
        self._trainer.plan_ahead()

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Seal step 0, so that a run killed in its first steps need not read its model again.

        Here and not earlier: an evaluation before the first step draws random numbers.
        """
        if state.global_step == 0 and self._trainer.engine.num_steps == 0:
            self._trainer._save_checkpoint(self._trainer.model, None)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """From here on there are no gradients in memory either."""
        note_used_gradients(self._trainer.model, are_used=False)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save at archive steps; save and stop when asked to, or when the budget is spent."""
        trainer = self._trainer
        if trainer._is_archived(state.global_step):
            control.should_save = True
        if trainer.stop_request.is_set:
            control.should_save = control.should_training_stop = True
        reason = why_to_stop(trainer)
        if reason is not None and state.global_step < state.max_steps:
            control.should_save = control.should_training_stop = True
            trainer.stopped_because = reason
