"""The report: one HTML page about one run, made from the files in its folder.

Owns the order of the sections and the frame around them. The page needs nothing from outside: no
network, no fonts, no other files; a policy in its head forbids them, and any script but its own.
Called by the trainer when a run ends and by `lohan report`.
"""

import base64
import hashlib
import os
import pathlib

import lohan
from lohan.durable_files import replace_text
from lohan.report import svg
from lohan.report.html.markup import as_markup, filled, shortened, template_text
from lohan.report.run_files import RunFiles, read_run
from lohan.report.sections import facts, settings
from lohan.report.sections.headline import headline
from lohan.report.sections.lanes import lanes
from lohan.report.sections.memory import memory, wear
from lohan.report.sections.training import answers, speed, training
from lohan.working_folder import working_folder

REPORT_NAME = "report.html"
_LONGEST_NAME = 100


def write_report(run: str | os.PathLike[str], *, out: pathlib.Path | None = None) -> pathlib.Path:
    """Write the report of a run folder, by default beside its log; returns where it is.

    May be called while the run goes on: it shows what is there so far. The file is replaced whole.

    Raises:
        ConfigError: it is no run folder, or the file cannot be written.
    """
    folder = pathlib.Path(run)
    page = report_html(read_run(folder))
    path = working_folder(folder) / REPORT_NAME if out is None else out
    replace_text(path, page, is_private=out is None)
    return path


def report_html(run: RunFiles) -> str:
    """Return the page of a run."""
    name = facts.model_name(run) or run.folder.resolve().name or "run"
    name = name if len(name) <= _LONGEST_NAME else f"{name[:_LONGEST_NAME]}..."
    script = template_text("script.js")
    page = filled(
        "page.html",
        name=name,
        subtitle=_subtitle(run),
        headline=headline(run),
        training=training(run),
        answers=answers(run),
        lanes=lanes(run),
        speed=speed(run),
        memory=memory(run),
        wear=wear(run),
        plan=settings.plan_words(run),
        machine=run.machine and settings.machine_table(run.machine),
        versions=settings.versions(run),
        configuration=settings.configuration(run),
        version=lohan.__version__,
        # The name only: where a run lies on somebody's disk is not for whoever gets the report.
        folder=shortened(run.folder.resolve().name or "/", 120),
        svg=svg,
        script=as_markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )
    return svg.plain_ascii(page) + "\n"


def _subtitle(run: RunFiles) -> str:
    said = ["Run report"]
    plan = run.plan or {}
    if isinstance(plan.get("policy"), str):
        said.append(f"policy {plan['policy']}")
    batch, sequence = (facts.number_in(plan, key) for key in ("batch", "sequence"))
    if batch is not None and sequence is not None:
        said.append(f"batch {batch:,.0f} x {sequence:,.0f} tokens")
    if run.machine is not None:
        said.append(run.machine.name)
    data = facts.data_names(run)
    if data:
        said.append(f"rows of {', '.join(data)}")
    ended = (run.summary or {}).get("ended")
    if isinstance(ended, str):
        said.append(ended.partition("T")[0])
    return ", ".join(shortened(words, 120) for words in said)
