"""What a run costs in money, and what should be known before it starts.

Owns the assumed prices, each said where it is used, and when something is worth a warning.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from lohan.hardware.machine import Machine
from lohan.plan.ledger import Ledger
from lohan.plan.run_room import DriveRoom
from lohan.units import format_bytes, format_bytes_decimal
from lohan.vocabulary import Tier

DOLLARS_PER_KWH = 0.15
DOLLARS_PER_TB_WRITTEN = 0.125
"""Of a usual consumer drive (150 dollars, 1200 TB), for drives without a price."""
_HOST_WATTS, _GPU_WATTS = 200, 450
_MUCH_OF_A_DRIVE = 0.9
_MUCH_OF_A_LIFE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCost:
    """Dollars of one run."""

    drives_dollars: float
    """The share of the drives' price that their wear is worth."""
    power_dollars: float
    watts: int
    """What the machine is assumed to draw."""

    @property
    def dollars(self) -> float:
        """All of it."""
        return self.drives_dollars + self.power_dollars

    def in_words(self) -> str:
        """The sum, its parts and what they rest on."""
        return (
            f"about ${self.dollars:,.2f}: ${self.drives_dollars:,.2f} of the drives' price, "
            f"${self.power_dollars:,.2f} of power (assumed: {self.watts} W, "
            f"${DOLLARS_PER_KWH:.2f} per kWh)"
        )


def run_cost(machine: Machine, *, seconds: float, written_bytes: float) -> RunCost:
    """What so many seconds and bytes cost on a machine."""
    price = sum(ssd.price_dollars for ssd in machine.ssds)
    per_byte = price / machine.ssd_endurance_bytes if price else DOLLARS_PER_TB_WRITTEN / 1e12
    watts = _HOST_WATTS + (0 if machine.gpu.is_processor else machine.num_gpus * _GPU_WATTS)
    return RunCost(
        drives_dollars=written_bytes * per_byte,
        power_dollars=watts / 1000 * seconds / 3600 * DOLLARS_PER_KWH,
        watts=watts,
    )


def run_warnings(
    machine: Machine, ledger: Ledger, *, written_bytes: float, rooms: Sequence[DriveRoom] = ()
) -> list[str]:
    """Sentences about what a run would do to the drives, if it is much.

    Args:
        rooms: what it takes of the filesystems it really touches, where they are known; else the
            ledger's room counts.
    """
    found = []
    share = written_bytes / machine.ssd_endurance_bytes
    left = 1.0 - (machine.drives_used_share or 0.0)
    if share > min(_MUCH_OF_A_LIFE, left):
        found.append(
            f"the run writes {format_bytes_decimal(written_bytes)}, {share:.0%} of "
            f"{machine.drives_life}: take a larger batch, more RAM or fewer tokens, or set "
            "offload.write_budget"
        )
    for room in rooms:
        if room.asked_bytes > room.free_bytes:
            found.append(f"the run does not fit on a drive: {room.in_words()}")
        elif room.share > _MUCH_OF_A_DRIVE:
            found.append(
                f"the run takes {room.share:.0%} of what is free on a drive, nothing else will fit "
                f"there: {room.in_words()}"
            )
    budget, needed = ledger.budgets.get(Tier.SSD, 0), ledger.total(Tier.SSD)
    if not rooms and budget and needed > _MUCH_OF_A_DRIVE * budget:
        found.append(
            f"states take {needed / budget:.0%} of what is free on the drives "
            f"({format_bytes(needed)} of {format_bytes(budget)}): nothing else will fit there"
        )
    return found
