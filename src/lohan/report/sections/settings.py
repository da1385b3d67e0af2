"""The plan in words, the resolved configuration, the machine and the versions of a run.

Owns how nested settings become a table, and what is never shown: a report is passed on, so values
whose name says that they are secret stay out of it.
"""

import json
import re
from collections.abc import Iterator, Mapping

from lohan.hardware.machine import Machine
from lohan.report.html.markup import Table, shortened
from lohan.report.run_files import RunFiles
from lohan.units import format_bytes, format_count, format_rate

_MOST_ROWS = 600
_MOST_LETTERS = 40_000
_LONGEST_TEXT = 40_000
_DEEPEST = 8
_SECRET = re.compile(
    r"(?:^|[._-])(?:token|password|passwd|secret|api_?key|access_?key|credentials?)$", re.IGNORECASE
)


def plan_words(run: RunFiles) -> str:
    """The plan in words, as it was printed before the first step."""
    return shortened((run.plan_words or "").strip(), _LONGEST_TEXT)


def configuration(run: RunFiles) -> dict[str, object]:
    """The resolved configuration as a table, or else as text."""
    if run.config is None:
        lines = (run.config_words or "").strip().splitlines()
        words = "\n".join(map(_without_secret, lines))
        return {"table": None, "words": shortened(words, _LONGEST_TEXT)}
    settings = {key: value for key, value in run.config.items() if key != "versions"}
    rows = list(_flattened(settings))
    kept = _first_letters([[shortened(cell) for cell in row] for row in rows[:_MOST_ROWS]])
    num_left = len(rows) - len(kept)
    return {
        "num_settings": f"{len(rows):,}",
        "table": _texts("Settings of the run", ["setting", "value"], kept),
        "said": f"{num_left:,} more settings are in resolved_config.json." if num_left else "",
    }


def _texts(caption: str, columns: list[str], rows: list[list[str]]) -> Table:
    return Table(caption=caption, columns=columns, rows=rows, num_text_columns=2)


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


def machine_table(machine: Machine) -> dict[str, object]:
    """What is in the box, and the figures that were planned with."""
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
    return {
        "said": f"{machine.name}: {machine.description}",
        "table": Table(caption="As planned with", columns=["what", "figure"], rows=rows),
    }


def versions(run: RunFiles) -> Table | None:
    """Versions as the run recorded them."""
    for found in (run.summary, run.config):
        listed = (found or {}).get("versions")
        if isinstance(listed, Mapping) and listed:
            rows = [[str(name), _plain(version)] for name, version in list(listed.items())[:100]]
            return _texts("As recorded", ["what", "version"], rows)
    return None
