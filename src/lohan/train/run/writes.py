"""What a run writes to its SSDs against `offload.write_budget`.

Owns the length of a run before it begins (steps, seals), the limit the planner keeps to, and the
moment to stop where more is written than was predicted. Called by `saving`, `checkpoint_callback`
and `progress`.
"""

import math
from collections.abc import Sequence
from typing import Any

from lohan.engine.planning.write_limit import WriteLimit, deferred_share, written_by_seal
from lohan.units import format_bytes_decimal


def planned_steps(
    trainer: Any, *, max_steps: int | None = None, num_train_epochs: float | None = None
) -> int | None:
    """Optimizer steps of the run, as transformers counts them; None if rows have no length.

    Args:
        max_steps: in place of the run's own, as `num_train_epochs`.
    """
    args = trainer.args
    max_steps = args.max_steps if max_steps is None else max_steps
    if max_steps > 0:
        return int(max_steps)
    try:
        num_rows = len(trainer.train_dataset)
    except TypeError:
        return None
    exact = num_rows / args.per_device_train_batch_size
    whole = math.floor if args.dataloader_drop_last else math.ceil
    num_batches = whole(whole(exact) / args.world_size)  # of each rank
    per_epoch: int = max(1, math.ceil(num_batches / args.gradient_accumulation_steps))
    num_epochs: float = args.num_train_epochs if num_train_epochs is None else num_train_epochs
    return math.ceil(num_epochs * per_epoch)


def planned_seals(trainer: Any, num_steps: int) -> int:
    """Seals in so many steps, the last one included."""
    args = trainer.args
    strategy = str(getattr(args.save_strategy, "value", args.save_strategy))
    return seals_in(
        num_steps,
        save_strategy=strategy,
        save_steps=args.save_steps,
        num_train_epochs=args.num_train_epochs,
        others=(trainer.offload.archive_steps, trainer.offload.save_model_steps),
    )


def seals_in(
    num_steps: int,
    *,
    save_strategy: str,
    save_steps: float,
    num_train_epochs: float,
    others: Sequence[int | None],
) -> int:
    """Seals of a run of these settings, the last one included; `others` come every so many steps,
    archives say."""
    num_seals = 1
    if save_strategy == "steps":
        share = save_steps < 1
        every_steps = max(1, math.ceil(num_steps * save_steps) if share else int(save_steps))
        num_seals += max(0, num_steps - 1) // every_steps  # the last step is sealed once
    elif save_strategy == "epoch":
        num_seals = max(1, math.ceil(num_train_epochs))
    return num_seals + sum(num_steps // every for every in others if every is not None)


def write_limit_of(trainer: Any) -> WriteLimit | None:
    """The limit for the planner; None without a budget, or where the length is not known."""
    budget_bytes, num_steps = trainer.offload.write_budget, planned_steps(trainer)
    if budget_bytes is None or num_steps is None:
        return None
    engine = getattr(trainer, "_engine", None)  # asking for `engine` would make one
    return WriteLimit(
        spent_bytes=0 if engine is None else engine.measuring_bytes,
        budget_bytes=budget_bytes,
        num_steps=num_steps,
        num_seals=planned_seals(trainer, num_steps),
    )


def why_to_stop(trainer: Any) -> str | None:
    """Why no further step may be taken, if one and its seal would pass the budget."""
    budget_bytes, result = trainer.offload.write_budget, trainer.last_step
    if budget_bytes is None or result is None:
        return None
    plan, prediction = trainer.engine.plan, trainer.engine.prediction
    step_bytes = max(result.written_bytes, prediction.written_bytes if prediction else 0)
    more_bytes = step_bytes
    if plan is not None:
        # Updates of this step that are still due, and what the seal after the next one writes.
        more_bytes += int(deferred_share(plan) * step_bytes) + written_by_seal(plan)
    if trainer.written_bytes + more_bytes <= budget_bytes:
        return None
    return (
        f"the write budget of {format_bytes_decimal(budget_bytes)} is spent: "
        f"{format_bytes_decimal(trainer.written_bytes)} written, one more step would pass it"
    )
