"""Training arguments that are not valid: numbers out of range, and schedules that cannot be made.

Owns these checks. transformers finds such values late, in the middle of its loop, or takes them;
here they are named before anything is written. Called by the trainers and by the commands.
"""

from typing import Any

from lohan.errors import ConfigError

# By argument: the least value, and whether that value itself is allowed.
_LEAST: dict[str, tuple[int, bool]] = {
    "per_device_train_batch_size": (1, True),
    "per_device_eval_batch_size": (1, True),
    "gradient_accumulation_steps": (1, True),
    "max_length": (1, True),
    "learning_rate": (0, True),
    "weight_decay": (0, True),
    "max_grad_norm": (0, True),
    "adam_epsilon": (0, True),
    "save_steps": (0, False),
    "eval_steps": (0, False),
    "logging_steps": (0, False),
    "eval_accumulation_steps": (1, True),
    "neftune_noise_alpha": (0, True),
    "dataloader_num_workers": (0, True),
}
_STEPS_OF_A_TRIAL = 1000


def refuse_impossible(args: Any) -> None:
    """Refuse numbers that are not valid, each with the range it must be in.

    Raises:
        ConfigError: one of them is out of its range, or nothing would be trained.
    """
    for name, (least, is_allowed) in _LEAST.items():
        value: Any = getattr(args, name, None)
        if value is None or value > least or (is_allowed and value == least):
            continue
        bound = f"{least} or more" if is_allowed else f"above {least}"
        raise ConfigError(
            f"{name} is {value}", why=f"it must be {bound}", remedy=f"set {name} to {bound}"
        )
    for name in ("adam_beta1", "adam_beta2", "label_smoothing_factor"):
        share: Any = getattr(args, name, 0.0)
        if not 0 <= share < 1:
            raise ConfigError(
                f"{name} is {share}",
                why="it must be 0 or more and below 1",
                remedy=f"set {name} to 0 or more and below 1",
            )
    if args.max_steps == 0 or (args.max_steps < 0 and args.num_train_epochs <= 0):
        raise ConfigError(
            f"num_train_epochs is {args.num_train_epochs} and max_steps is {args.max_steps}",
            why="nothing would be trained",
            remedy="set max_steps to a number above 0, or leave it out and set num_train_epochs",
        )
    _refuse_schedule(args)


def _refuse_schedule(args: Any) -> None:
    """Make the schedule once for an optimizer nobody uses."""
    import torch
    from transformers import get_scheduler

    num_steps = args.max_steps if args.max_steps > 0 else _STEPS_OF_A_TRIAL
    try:
        get_scheduler(
            args.lr_scheduler_type,
            optimizer=torch.optim.SGD([torch.zeros(1)], lr=max(args.learning_rate, 1e-9)),
            num_warmup_steps=args.get_warmup_steps(num_steps),
            num_training_steps=num_steps,
            scheduler_specific_kwargs=args.lr_scheduler_kwargs,
        )
    except (TypeError, ValueError) as error:
        name = getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)
        raise ConfigError(
            f"the schedule {name} cannot be made with lr_scheduler_kwargs="
            f"{args.lr_scheduler_kwargs}",
            why=" ".join(str(error).split()).rstrip("."),
            remedy="correct lr_scheduler_type or lr_scheduler_kwargs",
        ) from error
