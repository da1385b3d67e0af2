"""Memory per tier and wear: what the plan set aside, what was measured, what the drives took.

Owns the reading of a saved plan's ledger, and the bars (in shares of their width, so they follow
the page) and tables made from it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lohan.report.html.markup import Table, filled, shortened
from lohan.report.run_files import RunFiles
from lohan.report.sections import facts
from lohan.report.sections.headline import format_share
from lohan.report.svg import number_of
from lohan.units import format_bytes, format_bytes_decimal
from lohan.vocabulary import Tier

_BUDGET = "budget"
_MOST_LINES = 40
_NUM_COLOURS = 8
_BESIDE = (
    (
        Tier.RAM,
        "process_peak_bytes",
        "the process {} with Python, its libraries and what they keep",
    ),
    (Tier.GPU, "gpu_reserved_bytes", "torch's allocator held {} for it"),
)
"""What the summary says beside a tier's peak."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BarPiece:
    """One part of a bar."""

    nbytes: int
    colour: int
    """Which colour of the page, from 1."""
    hint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A line across the bar."""

    look: str
    """Class name: `budget` or `peak`."""
    nbytes: int
    hint: str


def memory(run: RunFiles) -> list[dict[str, object]]:
    """One bar per tier; where the processor computes, main memory is both RAM and GPU tier."""
    by_tier = _ledger(run.plan)
    is_one = run.machine is not None and run.machine.gpu.is_processor
    if is_one and Tier.GPU in by_tier and Tier.RAM in by_tier:
        # What is measured is the sum, so that is what it is compared with.
        both = [line for tier in (Tier.RAM, Tier.GPU) for line in by_tier.pop(tier)]
        budget = sum(nbytes for purpose, nbytes in both if purpose == _BUDGET)
        lines = [line for line in both if line[0] != _BUDGET] + [(_BUDGET, budget)]
        by_tier = {Tier.RAM: lines, **by_tier}
    names = {Tier.RAM: "RAM, with what would lie on a GPU"} if is_one else {}
    bars = {
        tier: _tier(tier, lines, facts.peak_bytes(run, tier), name=names.get(tier, tier.value))
        for tier, lines in by_tier.items()
    }
    for tier, key, words in _BESIDE:
        nbytes = facts.number_in(run.summary, key)
        if nbytes is not None and tier in bars:
            said = words.format(format_bytes(round(nbytes)))
            bars[tier]["verdict"] = f"{bars[tier]['verdict']}; {said}"
    return list(bars.values())


def _ledger(plan: Mapping[str, object] | None) -> dict[Tier, list[tuple[str, int]]]:
    rows = (plan or {}).get("ledger")
    found: dict[Tier, list[tuple[str, int]]] = {tier: [] for tier in Tier}
    for row in rows if isinstance(rows, list) else []:
        if not isinstance(row, dict):
            continue
        tier, purpose = row.get("tier"), row.get("purpose")
        nbytes = facts.number_in(row, "bytes")
        if tier in list(Tier) and isinstance(purpose, str) and nbytes is not None and nbytes >= 0:
            found[Tier(tier)].append((shortened(purpose, 80), round(nbytes)))
    return {tier: lines for tier, lines in found.items() if lines}


def _tier(
    tier: Tier, lines: list[tuple[str, int]], peak: int | None, *, name: str
) -> dict[str, object]:
    budget = next((nbytes for purpose, nbytes in lines if purpose == _BUDGET), None)
    uses = sorted(
        ((purpose, nbytes) for purpose, nbytes in lines if purpose != _BUDGET),
        key=lambda line: -line[1],
    )
    rest = sum(nbytes for _, nbytes in uses[_MOST_LINES:])
    uses = uses[:_MOST_LINES] + ([("everything else", rest)] if rest else [])
    total = sum(nbytes for _, nbytes in uses)
    pieces = [
        BarPiece(
            nbytes=nbytes,
            colour=number % _NUM_COLOURS + 1,
            hint=f"{purpose}: {format_bytes(nbytes)}",
        )
        for number, (purpose, nbytes) in enumerate(uses)
    ]
    marks, verdict = [], [f"{format_bytes(total)} set aside"]
    if budget is not None:
        marks.append(Mark(look="budget", nbytes=budget, hint=f"allowed: {format_bytes(budget)}"))
        verdict.append(f"{format_bytes(budget)} allowed")
    if peak is not None:
        marks.append(Mark(look="peak", nbytes=peak, hint=f"measured: {format_bytes(peak)}"))
    verdict.append("peak not recorded" if peak is None else f"peak {format_bytes(peak)} measured")
    anchor = f"memory-{tier.value.lower()}"
    return {
        "anchor": anchor,
        "name": name,
        "verdict": ", ".join(verdict),
        "bar": stacked_bar(anchor, pieces, marks),
        "pieces": pieces,
    }


def stacked_bar(anchor: str, pieces: Sequence[BarPiece], marks: Sequence[Mark]) -> str:
    """Return a bar of pieces from left to right, with marks across.

    The element `<anchor>-title` elsewhere on the page is its name.
    """
    total_bytes = sum(piece.nbytes for piece in pieces)
    # A little room on the right: a mark at the very end would be cut in half.
    scale = 99.0 / max(total_bytes, *(mark.nbytes for mark in marks), 1)
    placed = []
    left = 0.0
    for piece in pieces:
        width = piece.nbytes * scale
        placed.append((piece, number_of(left), number_of(width)))
        left += width
    hints = [piece.hint for piece in pieces] + [mark.hint for mark in marks]
    return filled(
        "stacked_bar.html",
        anchor=anchor,
        described=" ".join(f"{hint}." for hint in hints),
        pieces=placed,
        marks=[(mark, number_of(mark.nbytes * scale)) for mark in marks],
    )


def wear(run: RunFiles) -> dict[str, object]:
    """Bytes of the whole run and what they mean for the drives."""
    rows: list[list[str]] = []
    is_estimate = False
    for name, key in (("read from SSD", "read_bytes"), ("written to SSD", "written_bytes")):
        moved = facts.traffic(run, key)
        per_step = facts.usual(run, key)
        if moved is None:
            continue
        is_estimate |= moved.is_estimate
        usual = "-" if per_step is None else format_bytes_decimal(per_step)
        rows.append([name, format_bytes_decimal(moved.nbytes), usual])
    said = []
    if is_estimate:
        said.append("Totals are worked out from the logged steps, each for those up to it.")
    share = facts.endurance_share(run)
    if share is None:
        said.append("What the drives endure is not recorded (no usable machine.json).")
    elif run.machine is not None:
        said.append(
            f"The run wrote {format_share(share)} of the "
            f"{format_bytes_decimal(run.machine.ssd_endurance_bytes)} that are "
            f"{run.machine.drives_life}."
        )
    columns = ["what", "whole run", "per step, median"]
    return {
        "table": Table(caption="SSD traffic", columns=columns, rows=rows),
        "said": " ".join(said),
    }
