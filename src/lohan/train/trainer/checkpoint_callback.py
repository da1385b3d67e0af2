"""The callback that decides when a run on the engine seals or stops.

Owns the moments: the first seal before step 1, archives, a stop by signal, the write budget. What
is done then is in `saving`. transformers calls it.
"""

from typing import Any

from transformers import TrainerCallback

from lohan.drive.weights.offloaded import note_used_gradients
from lohan.train.run.randomness_state import random_state
from lohan.train.run.writes import why_to_stop
from lohan.train.trainer.continuing import is_epoch_over, is_evaluated_only_as_it_ends


class SealingFlow(TrainerCallback):
    """Sets transformers' flow flags; runs on the main thread."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._is_save_due = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Hold the room for everything that will be written, and plan the largest step."""
        if state.global_step > 0:
            # Those of the process before came with its state; these may be others.
            state.compute_steps(args, state.max_steps)
        self._trainer.steps_before = self._trainer.engine.num_steps - state.global_step
        self._trainer.hold_space()
        self._trainer.plan_ahead()

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Seal step 0, so that a run killed in its first steps need not read its model again.

        Here and not earlier: an evaluation before the first step draws random numbers.
        """
        trainer = self._trainer
        if state.global_step == 0 and trainer.engine.num_steps == trainer.steps_before:
            trainer._save_checkpoint(trainer.model, None)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """From here on there are no gradients in memory either."""
        note_used_gradients(self._trainer.model, are_used=False)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save at archive steps; save and stop when asked to, or when the budget is spent."""
        trainer = self._trainer
        step = state.global_step
        if trainer._is_archived(step) or trainer._is_model_kept(step):
            control.should_save = True
        trainer.agree_to_stop()
        if trainer.stop_request.is_set:
            control.should_save = control.should_training_stop = True
        reason = why_to_stop(trainer)
        if reason is not None and state.global_step < state.max_steps:
            control.should_save = control.should_training_stop = True
            trainer.stopped_because = reason
        if is_evaluated_only_as_it_ends(args, state):
            trainer.random_if_longer = (state.global_step, random_state())
        # A seal comes after an evaluation of the same step: it draws random numbers.
        self._is_save_due = (
            control.should_save and args.eval_strategy == "epoch" and is_epoch_over(state)
        )
        if self._is_save_due:
            control.should_save = False

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Seal what was put off; a run that stops within an epoch is sealed, and not evaluated."""
        trainer = self._trainer
        is_stopped = trainer.stop_request.is_set or trainer.stopped_because is not None
        if is_stopped and not is_epoch_over(state):
            control.should_evaluate = control.should_save = False
        control.should_save = control.should_save or self._is_save_due
        self._is_save_due = False
