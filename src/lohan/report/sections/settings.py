"""The plan in words, the configuration, the machine and the versions of a run.

Owns what is never shown: a report is passed on, so values whose name says that they are secret stay
out of it.
"""

import re
from collections.abc import Mapping

from lohan.hardware.machine import Machine
from lohan.report.html.markup import Table, shortened
from lohan.report.run_files import RunFiles
from lohan.units import format_bytes, format_count, format_rate

_LONGEST_TEXT = 40_000
_SECRET = re.compile(
    r"(?:^|[._-])(?:token|password|passwd|secret|api_?key|access_?key|credentials?)$", re.IGNORECASE
)


def plan_words(run: RunFiles) -> str:
    """The plan in words, as it was printed before the first step."""
    return shortened((run.plan_words or "").strip(), _LONGEST_TEXT)


def configuration(run: RunFiles) -> str:
    """The configuration as the run kept it."""
    lines = (run.config or "").strip().splitlines()
    return shortened("\n".join(map(_without_secret, lines)), _LONGEST_TEXT)


def _without_secret(line: str) -> str:
    name, colon, value = line.partition(":")
    is_secret = _SECRET.search(name.strip().strip("\"'- ")) and value.strip() not in ("", "null")
    return f"{name}{colon} (not shown)" if is_secret else line


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
    listed = (run.summary or {}).get("versions")
    if not isinstance(listed, Mapping) or not listed:
        return None
    rows = [[str(name), str(version)] for name, version in list(listed.items())[:100]]
    return Table(caption="As recorded", columns=["what", "version"], rows=rows, num_text_columns=2)
