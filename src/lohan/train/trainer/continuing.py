"""Giving a run another length when it is resumed: where that changes nothing of what is done.

Owns the question whether the steps already taken are those of a run that had the new length from
the start: their rates, and the evaluations among them, which draw random numbers. Asked by
`resuming` before anything is written.
"""

import math
import pathlib
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from lohan.errors import ConfigError
from lohan.train.run.writes import planned_steps

RANDOM_IF_LONGER = "random_if_longer"
"""In a resume file: the generators before an evaluation that was made because the run ended."""
IS_OTHER_LENGTH = "is_other_length"
"""Added to what was read of a resume file where the run goes on with another length."""
FOLLOWING_EVALUATIONS = ("reduce_lr_on_plateau", "greedy")
"""Schedules."""
_REMEDY = (
    "put the length back, or start a new run in another folder (from what this one has learned: "
    "`lohan export` writes its model, for --model); "
)
_ANY_LENGTH = (
    "runs with lr_scheduler_type constant, inverse_sqrt or constant_with_warmup, with warmup_steps "
    "of 1 or more, can be made longer at any time"
)


def check_length(trainer: Any, checkpoint: pathlib.Path, sealed: dict[str, Any]) -> dict[str, Any]:
    """What the run goes on from: `sealed` itself, or as a run of another length would have it.

    Raises:
        ConfigError: with the new length, steps already taken would have been others.
    """
    then = {name: sealed["arguments"].get(name) for name in ("max_steps", "num_train_epochs")}
    now = {name: getattr(trainer.args, name) for name in then}
    before, after = planned_steps(trainer, **then), planned_steps(trainer)
    if then == now or before is None or after is None or before == after:
        return sealed
    step = int(sealed["step"])
    changed = "; ".join(f"{k}: {v} -> {now[k]}" for k, v in then.items() if v != now[k])
    if after < step:
        raise ConfigError(
            f"{changed}: the run would end after step {after}, and {checkpoint} is of step {step}",
            why="steps that were taken are not taken back",
            remedy=f"ask for {step} steps or more",
        )
    _refuse_other_rates(trainer, sealed, changed, before, after)
    _refuse_other_evaluations(trainer, sealed, changed, before, after)
    random = sealed.get(RANDOM_IF_LONGER) or sealed["random"]
    return {**sealed, "random": random, IS_OTHER_LENGTH: True}


def _refuse_other_rates(
    trainer: Any, sealed: dict[str, Any], changed: str, before: int, after: int
) -> None:
    old, new = (_schedule_of(trainer, total) for total in (before, after))
    name = getattr(trainer.args.lr_scheduler_type, "value", trainer.args.lr_scheduler_type)
    if not isinstance(old, LambdaLR) or not isinstance(new, LambdaLR):
        if name in FOLLOWING_EVALUATIONS:
            return  # whatever the length
        raise ConfigError(
            f"{changed}: whether {type(old).__name__} gave the steps already taken the rates of a "
            "longer run is not known",
            why="the run would not go on as one that had this length from the start",
            remedy=_REMEDY + _ANY_LENGTH,
        )
    num_taken = int(sealed["scheduler"].get("last_epoch", sealed["step"]))
    rate = trainer.args.learning_rate
    for step in range(num_taken):
        if _factors(old, step) != _factors(new, step):
            last = num_taken - 1
            was, would = (rate * _factors(one, last)[0] for one in (old, new))
            raise ConfigError(
                f"{changed}: with lr_scheduler_type {name} the steps already taken would have had "
                f"other rates, from step {step + 1} on; step {num_taken} was taken with "
                f"{was:.4g} ({before} steps in all) and would have had {would:.4g} ({after})",
                why="the run would not go on as one that had this length from the start",
                remedy=_REMEDY + _ANY_LENGTH,
            )


def _refuse_other_evaluations(
    trainer: Any, sealed: dict[str, Any], changed: str, before: int, after: int
) -> None:
    args, step = trainer.args, int(sealed["step"])
    every = args.eval_steps
    if str(getattr(args.eval_strategy, "value", args.eval_strategy)) == "steps" and 0 < every < 1:
        old, new = (math.ceil(total * every) for total in (before, after))
        if old != new and step >= min(old, new):
            raise ConfigError(
                f"{changed}: with eval_steps={every} there was an evaluation every {old} step(s), "
                f"and there would have been one every {new}; {step} steps are taken",
                why="an evaluation draws random numbers, so what follows would be another run",
                remedy=_REMEDY + "eval_steps of 1 or more is the same for every length",
            )
    if RANDOM_IF_LONGER in sealed and args.metric_for_best_model is not None:
        raise ConfigError(
            f"{changed}: step {step} was evaluated because the run ended there, and "
            f"metric_for_best_model ({args.metric_for_best_model}) has made use of it",
            why="a longer run would not have been evaluated there, and may have another best step",
            remedy=_REMEDY + "runs that end where they are evaluated anyway can be made longer",
        )


def rates_for_length(scheduler: Any, optimizer: Any) -> None:
    """Put the rates of the next step as this schedule has them, not the one that was saved."""
    if isinstance(scheduler, LambdaLR):
        factors = _factors(scheduler, scheduler.last_epoch)
        rates = [base * one for base, one in zip(scheduler.base_lrs, factors, strict=True)]
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        scheduler._last_lr = rates


def is_evaluated_only_as_it_ends(args: Any, state: Any) -> bool:
    """Whether this last step is evaluated, and would not be in a longer run."""
    strategy = str(getattr(args.eval_strategy, "value", args.eval_strategy))
    if state.global_step < state.max_steps or strategy == "no":
        return False
    if strategy == "epoch":
        return not is_epoch_over(state)
    return bool(state.global_step % state.eval_steps != 0)


def is_epoch_over(state: Any) -> bool:
    """Whether the last step was the last one of its epoch."""
    return state.epoch is not None and float(state.epoch).is_integer()


def _schedule_of(trainer: Any, num_steps: int) -> LRScheduler | None:
    """The schedule the trainer makes for so many steps, on an optimizer nobody uses."""
    kept = trainer.lr_scheduler, trainer._created_lr_scheduler
    rate = trainer.args.learning_rate
    trainer.lr_scheduler = None
    try:
        made: LRScheduler | None = trainer.create_scheduler(
            num_training_steps=num_steps, optimizer=torch.optim.SGD([torch.zeros(1)], lr=rate)
        )
        return made
    finally:
        trainer.lr_scheduler, trainer._created_lr_scheduler = kept


def _factors(scheduler: LambdaLR, step: int) -> list[float]:
    return [float(factor(step)) for factor in scheduler.lr_lambdas]
