"""A schedule as text: one line per task, lane by lane, stable enough to be kept as a golden.

For reading and for comparing two versions of the builder; nothing parses it.
"""

from lohan.schedule.task import Move, Schedule, Task
from lohan.units import format_bytes, format_count
from lohan.vocabulary import Lane


def _amount(task: Task) -> str:
    action = task.action
    if isinstance(action, Move):
        return format_bytes(action.nbytes)
    if action.flops:
        return f"{action.flops / 1e12:.3f} TFLOP"
    if action.num_parameters:
        return f"{format_count(action.num_parameters)} parameters"
    return format_bytes(action.touched_bytes) if action.touched_bytes else "-"


def dump_schedule(schedule: Schedule, *, step: int | None = None) -> str:
    """Every task of a step (or of all), in the order of its lane."""
    lines = [
        f"{schedule.num_steps} steps, {schedule.num_blocks} blocks, {len(schedule.tasks)} tasks, "
        + ("settled" if schedule.is_settled else "open order")
    ]
    lines += [
        f"pool {pool.name}: {format_bytes(pool.capacity_bytes)} of {pool.tier}"
        for pool in schedule.pools.values()
        if pool.capacity_bytes
    ]
    for lane in Lane:
        tasks = [schedule.task(task) for task in schedule.lanes.get(lane, ())]
        shown = [task for task in tasks if step is None or task.step == step]
        if not shown:
            continue
        lines.append(f"lane {lane}")
        for task in shown:
            after = " ".join(str(before) for before in sorted(task.after))
            lines.append(
                f"  {task.id:>5} s{task.step} {task.name:<28} {_amount(task):>18}"
                + (f"  after {after}" if after else "")
            )
    return "\n".join(lines) + "\n"
