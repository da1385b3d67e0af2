"""Answers: the sample prompts, as they were answered before and after training.

Owns how they are set side by side. A run without sample prompts has no such section.
"""

from lohan.report.html.markup import Table
from lohan.report.run_files import RunFiles
from lohan.report.sections import facts

_MOST_LATER = 3
"""A run that was made longer several times has been asked after each."""
_MOST_PROMPTS = 50


def answers(run: RunFiles) -> Table | None:
    """A table with a row per prompt and a column per step it was answered at; or nothing."""
    log = facts.log_of(run)
    columns: dict[int, dict[str, str]] = {}
    for step, row in zip(log.steps, log.rows, strict=True):
        found = row.get("samples")
        for one in found if isinstance(found, list) else ():
            if isinstance(one, dict) and isinstance(one.get("prompt"), str):
                columns.setdefault(step, {})[one["prompt"]] = str(one.get("answer", ""))
    if not columns:
        return None
    first, *later = columns.items()
    columns = dict([first, *later[-_MOST_LATER:]])
    prompts = list(dict.fromkeys(one for answers in columns.values() for one in answers))
    heads = ["before training" if step == 0 else f"after step {step:,}" for step in columns]
    rows = [
        [prompt, *(one.get(prompt, "") for one in columns.values())]
        for prompt in prompts[:_MOST_PROMPTS]
    ]
    return Table(
        caption="The most likely tokens, one after the other, until the answer ends or is cut off.",
        columns=["prompt", *heads],
        rows=rows,
        num_text_columns=1 + len(heads),
    )
