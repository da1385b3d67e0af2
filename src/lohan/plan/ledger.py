"""The ledger: bytes asked for in each tier, line by line, against the budget of that tier.

Each line is the most its owner can ever hold at one moment, so the sum is never exceeded at any
moment of a step. Owns the arithmetic and the refusal; policies fill it in.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypedDict

from lohan.errors import DoesNotFit
from lohan.units import format_bytes
from lohan.vocabulary import Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerLine:
    """Bytes that one purpose holds in one tier."""

    tier: Tier
    purpose: str
    nbytes: int
    remedy: str
    """What the user can do to make this line smaller."""
    is_constant: bool = False
    """Held all through a step, outside the pools that the schedule leases from."""


def ledger_line(
    tier: Tier, purpose: str, nbytes: float, remedy: str, *, is_constant: bool = False
) -> LedgerLine:
    """A line of whole bytes."""
    return LedgerLine(
        tier=tier, purpose=purpose, nbytes=int(nbytes), remedy=remedy, is_constant=is_constant
    )


class LedgerRow(TypedDict):
    """A line, or the budget of a tier, in plain values."""

    tier: str
    purpose: str
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """Lines and budgets of a plan."""

    lines: tuple[LedgerLine, ...]
    budgets: Mapping[Tier, int] = field(default_factory=dict)

    def lines_of(self, tier: Tier) -> tuple[LedgerLine, ...]:
        """Lines of one tier, largest first."""
        chosen = [line for line in self.lines if line.tier is tier and line.nbytes > 0]
        return tuple(sorted(chosen, key=lambda line: -line.nbytes))

    def total(self, tier: Tier) -> int:
        """Bytes asked for in one tier."""
        return sum(line.nbytes for line in self.lines if line.tier is tier)

    def constant(self, tier: Tier) -> int:
        """Bytes of one tier held all through a step, outside the schedule's pools."""
        return sum(line.nbytes for line in self.lines if line.tier is tier and line.is_constant)

    def spare(self, tier: Tier) -> int:
        """Bytes of the budget that nothing asks for; negative when it is exceeded."""
        return self.budgets[tier] - self.total(tier)

    def shortages(self) -> dict[Tier, int]:
        """Bytes missing per tier; empty when the plan fits."""
        return {tier: -self.spare(tier) for tier in self.budgets if self.spare(tier) < 0}

    @property
    def fits(self) -> bool:
        """Whether no budget is exceeded."""
        return not self.shortages()

    def require_fit(self, subject: str) -> None:
        """Refuse a plan that exceeds a budget.

        Raises:
            DoesNotFit: naming the tier that is shortest, its largest part, and the remedy.
        """
        shortages = self.shortages()
        if not shortages:
            return
        tier = max(shortages, key=lambda short: shortages[short] / max(self.budgets[short], 1))
        largest = self.lines_of(tier)[0]
        others = "".join(
            f"; {other} is short by {format_bytes(missing)} too"
            for other, missing in shortages.items()
            if other is not tier
        )
        raise DoesNotFit(
            f"{subject} needs {format_bytes(self.total(tier))} of {tier}, "
            f"{format_bytes(self.budgets[tier])} allowed, short by {format_bytes(shortages[tier])}",
            why=f"the largest part is {format_bytes(largest.nbytes)} of {largest.purpose}{others}",
            remedy=largest.remedy,
        )

    def to_rows(self) -> list[LedgerRow]:
        """Lines and budgets as plain values."""
        rows: list[LedgerRow] = [
            {"tier": line.tier.value, "purpose": line.purpose, "bytes": line.nbytes}
            for tier in Tier
            for line in self.lines_of(tier)
        ]
        rows += [
            {"tier": tier.value, "purpose": "budget", "bytes": budget}
            for tier, budget in self.budgets.items()
        ]
        return rows
