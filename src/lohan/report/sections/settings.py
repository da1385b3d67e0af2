"""The plan in words, the resolved configuration, the machine and the versions of a run.

Owns how nested settings become a table, and what is never shown: a report is passed on, so values
whose name says that they are secret stay out of it.
"""

import json
import re
from collections.abc import Iterator, Mapping

from lohan.report.html.markup import folded, not_recorded, note, section, shortened, table
from lohan.report.run_files import RunFiles
from lohan.report.svg import text_of
from lohan.units import format_bytes, format_count, format_rate

_MOST_ROWS = 600
_MOST_LETTERS = 40_000
_LONGEST_TEXT = 40_000
_DEEPEST = 8
_SECRET = re.compile(
    r"(?:^|[._-])(?:token|password|passwd|secret|api_?key|access_?key|credentials?)$", re.IGNORECASE
)


def plan_section(run: RunFiles) -> str:
    """The plan in words, as it was printed before the first step."""
    words = (run.plan_words or "").strip()
    if not words:
        return section("plan", "The plan in words", not_recorded("The plan", "plan.txt"))
    text = text_of(shortened(words, _LONGEST_TEXT))
    return section("plan", "The plan in words", f"<pre>{text}</pre>")


def settings_section(run: RunFiles) -> str:
    """Configuration, machine and versions."""
    return section(
        "configuration", "Configuration", _machine(run), _versions(run), _configuration(run)
    )


def _configuration(run: RunFiles) -> str:
    if run.config is None and run.config_words:
        words = "\n".join(map(_without_secret, run.config_words.strip().splitlines()))
        return folded(
            "Resolved configuration", f"<pre>{text_of(shortened(words, _LONGEST_TEXT))}</pre>"
        )
    if run.config is None:
        return not_recorded("The resolved configuration", "resolved_config.json")
    settings = {key: value for key, value in run.config.items() if key != "versions"}
    rows = list(_flattened(settings))
    kept = _first_letters([[shortened(cell) for cell in row] for row in rows[:_MOST_ROWS]])
    said = ""
    if len(kept) < len(rows):
        said = note(f"{len(rows) - len(kept):,} more settings are in resolved_config.json.")
    shown = table("Settings of the run", ["setting", "value"], kept, num_text_columns=2)
    return folded(f"Resolved configuration ({len(rows):,} settings)", shown + said)


def _first_letters(rows: list[list[str]]) -> list[list[str]]:
    """As many rows as the page has room for."""
    num_letters = 0
    for number, row in enumerate(rows):
        num_letters += sum(map(len, row))
        if num_letters > _MOST_LETTERS:
            return rows[:number]
    return rows


def _without_secret(line: str) -> str:
    name, colon, value = line.partition(":")
    is_secret = _SECRET.search(name.strip().strip("\"'- ")) and value.strip() not in ("", "null")
    return f"{name}{colon} (not shown)" if is_secret else line


def _flattened(found: object, path: str = "", depth: int = 0) -> Iterator[list[str]]:
    if isinstance(found, dict) and found and depth < _DEEPEST:
        for key, value in found.items():
            yield from _flattened(value, f"{path}.{key}" if path else str(key), depth + 1)
        return
    if _SECRET.search(path) and found not in (None, ""):
        yield [path, "(not shown)"]
        return
    yield [path, _plain(found)]


def _plain(value: object) -> str:
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False)
    except (ValueError, RecursionError):  # a whole number of thousands of digits
        return "(cannot be shown)"


def _machine(run: RunFiles) -> str:
    machine = run.machine
    if machine is None:
        return not_recorded("The machine", "machine.json")
    rows = [
        ["GPU memory", format_bytes(machine.gpu.memory_bytes)],
        ["RAM", format_bytes(machine.ram_bytes)],
        ["SSD read, all drives", format_rate(machine.ssd_read_bytes_per_second)],
        ["SSD write, all drives", format_rate(machine.ssd_write_bytes_per_second)],
        ["RAM to GPU", format_rate(machine.ram_to_gpu_bytes_per_second)],
        ["GPU to RAM", format_rate(machine.gpu_to_ram_bytes_per_second)],
        [
            "updates on the CPU",
            f"{format_count(machine.cpu_update_parameters_per_second)} parameters/s",
        ],
    ]
    described = note(f"{machine.name}: {machine.description}")
    return f"<h3>Machine</h3>{described}" + table("As planned with", ["what", "figure"], rows)


def _versions(run: RunFiles) -> str:
    for found in (run.summary, run.config):
        versions = (found or {}).get("versions")
        if isinstance(versions, Mapping) and versions:
            rows = [[str(name), _plain(version)] for name, version in list(versions.items())[:100]]
            shown = table("As recorded", ["what", "version"], rows, num_text_columns=2)
            return f"<h3>Versions</h3>{shown}"
    return not_recorded("Versions", "summary.json")
