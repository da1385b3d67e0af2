"""What is known of the machine and its drives when a run starts, and when more must be.

Owns the moment: drives are measured, which wears them, only if a step moves something to them. How
they are measured is the caller's.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self

from lohan.engine.planning.budgets import Budgets
from lohan.engine.planning.plan_run import PlannedRun
from lohan.hardware.machine import Machine
from lohan.ssd import DriveSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownDrives:
    """A machine, how its drives are driven, and what finding that out has cost."""

    machine: Machine
    settings: Sequence[DriveSettings] | None = None
    weights: Sequence[float] | None = None
    """Shares of the drives in a striped file; equal ones if not given."""
    written_bytes: int = 0
    """Written to measure them."""
    note: str = ""
    """What to know about their rates as long as no step has shown them."""
    measure: Callable[[], Self] | None = None
    """Finds out more, if there is more to find out."""
    most_measuring_bytes: int = 0
    """That `measure` may write."""
    remember: Callable[[Machine], None] | None = None
    """Keeps what steps have shown of the drives, if what was measured of them is not kept."""

    def note_learned(self, machine: Machine) -> None:
        """Steps have shown the machine to be this one. May block: on a small file."""
        before = self.machine
        has_read = machine.ssd_read_bytes_per_second != before.ssd_read_bytes_per_second
        has_written = machine.ssd_write_bytes_per_second != before.ssd_write_bytes_per_second
        if self.remember is not None and has_read and has_written:
            self.remember(machine)

    def with_rated_lives(self, lives_bytes: Sequence[int]) -> Self:
        """The same with what the drives are rated for; see `Machine.with_rated_lives`."""
        measure = self.measure
        return replace(
            self,
            machine=self.machine.with_rated_lives(lives_bytes),
            measure=None if measure is None else lambda: measure().with_rated_lives(lives_bytes),
        )


def measured_if_used(
    known: KnownDrives,
    budgets: Budgets,
    plan: Callable[[Machine, Budgets], PlannedRun | None],
) -> tuple[KnownDrives, Budgets, PlannedRun | None]:
    """What is known of drives, measured if a step of the plan moves anything to or from them; the
    budgets less what that wrote; and the plan that told. Raises what `plan` does, before anything
    is written.

    A plan for usual drives that moves nothing to them moves nothing to any.
    """
    spent = known.most_measuring_bytes if known.measure is not None else known.written_bytes
    planned = plan(known.machine, budgets.with_spent(spent))
    if known.measure is not None and planned is not None and planned.ssd_bytes:
        known = known.measure()
    return known, budgets.with_spent(known.written_bytes), planned
