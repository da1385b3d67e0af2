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
from lohan.report.html.markup import shortened
from lohan.report.html.script import SCRIPT
from lohan.report.html.style import STYLE
from lohan.report.run_files import RunFiles, read_run
from lohan.report.sections import facts
from lohan.report.sections.answers import answers_section
from lohan.report.sections.headline import headline
from lohan.report.sections.lanes import lanes_section
from lohan.report.sections.memory import memory_section, wear_section
from lohan.report.sections.settings import plan_section, settings_section
from lohan.report.sections.training import speed_section, training_section
from lohan.report.sections.words import words_section
from lohan.report.svg import text_of
from lohan.whole_file import write_text
from lohan.working_folder import working_folder

REPORT_NAME = "report.html"
_LONGEST_NAME = 100
_LINKS = {
    "training": "Training",
    "answers": "Answers",
    "lanes": "Lanes",
    "speed": "Speed",
    "memory": "Memory",
    "wear": "Endurance",
    "plan": "Plan",
    "configuration": "Configuration",
    "words": "Words",
}


def write_report(run: str | os.PathLike[str], *, out: pathlib.Path | None = None) -> pathlib.Path:
    """Write the report of a run folder, by default beside its log; returns where it is.

    May be called while the run goes on: it shows what is there so far. The file is replaced whole.

    Raises:
        ConfigError: it is no run folder, or the file cannot be written.
    """
    folder = pathlib.Path(run)
    page = report_html(read_run(folder))
    path = working_folder(folder) / REPORT_NAME if out is None else out
    write_text(path, page, is_private=out is None)
    return path


def report_html(run: RunFiles) -> str:
    """Return the page of a run."""
    name = facts.model_name(run) or run.folder.resolve().name or "run"
    name = name if len(name) <= _LONGEST_NAME else f"{name[:_LONGEST_NAME]}..."
    sections = (
        training_section(run),
        answers_section(run),
        lanes_section(run),
        speed_section(run),
        memory_section(run),
        wear_section(run),
        plan_section(run),
        settings_section(run),
        words_section(),
    )
    links = "".join(
        f'<li><a href="#{anchor}">{words}</a></li>'
        for anchor, words in _LINKS.items()
        if any(f'<section id="{anchor}"' in one for one in sections)
    )
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_policy()}">',
            '<meta name="viewport" content="width=device-width,initial-scale=1">',
            '<meta name="referrer" content="no-referrer"><link rel="icon" href="data:,">',
            f"<title>{text_of(name)} - run report</title>",
            f"<style>{STYLE}</style></head><body>",
            f"<header><h1>{text_of(name)}</h1><p>{text_of(_subtitle(run))}</p></header>",
            f'<nav aria-label="Sections"><ul>{links}</ul></nav>',
            f'<main><section id="overview" aria-label="Overview">{headline(run)}</section>',
            *sections,
            "</main>",
            f"<footer>Made by lohan {text_of(lohan.__version__)} from {text_of(_folder(run))}. "
            "Predictions are simulated; everything else is measured.</footer>",
            f"<script>{SCRIPT}</script></body></html>",
            "",
        ]
    )


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
    for key in ("status", "ended"):
        words = (run.summary or {}).get(key)
        if isinstance(words, str):
            said.append(words.partition("T")[0] if key == "ended" else words)
    return ", ".join(shortened(words, 120) for words in said)


def _folder(run: RunFiles) -> str:
    # The name only: where a run lies on somebody's disk is not for whoever gets the report.
    return shortened(run.folder.resolve().name or "/", 120)


def _policy() -> str:
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    return (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
