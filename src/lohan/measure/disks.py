"""How fast drives read, write, do both, and write for long: through lohan's own engines.

Owns the timed loops over probe files and the choice of block size, queue depth and mixing by
measurement. Knows one or several directories; what a Machine makes of the figures is not its
business. Called by `machine.py`.
"""

import contextlib
import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import count

from lohan.errors import StorageError
from lohan.measure.bar import Report
from lohan.measure.figure import NUM_ROUNDS, Clock, Figure, rate_of
from lohan.measure.probe_files import OpenProbe, ProbeFiles
from lohan.ssd import DriveSettings, Mixing, Ticket
from lohan.units import GIB, MIB, format_bytes, format_rate


class Traffic(StrEnum):
    """What a drive is given."""

    READ = "read"
    WRITE = "write"
    MIXED = "mixed"
    """As many bytes each way, side by side."""


CLEARLY_BETTER = 1.1
"""Settings other than the default must be this much faster: drives are noisy."""

_DEFAULT = DriveSettings()
# Few large blocks, many small ones, and what lies between: what drives like differs widely.
CANDIDATES: tuple[DriveSettings, ...] = (
    _DEFAULT,
    *(
        DriveSettings(
            block_bytes=block_mib * MIB, max_requests=depth, max_bytes=depth * block_mib * MIB
        )
        for block_mib, depth in ((1, 4), (1, 8), (1, 32), (4, 2), (4, 32), (16, 2), (16, 8))
    ),
)
_TAIL_SHARE = 1 / 3
_MOST_READ_BYTES = GIB
"""Of a sample, per drive. Enough, however fast the drive is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DriveFigures:
    """What was measured of one directory, or of all together."""

    read: Figure
    write: Figure
    mixed: Figure
    """Bytes of both directions together."""

    @property
    def is_duplex(self) -> bool:
        """Whether reads and writes run side by side, rather than share the time."""
        read, write = self.read.per_second, self.write.per_second
        side_by_side = 2 * min(read, write)
        in_turns = 2 / (1 / read + 1 / write)
        # Nearer to one or to the other, as factors.
        return self.mixed.per_second >= math.sqrt(side_by_side * in_turns)


class DiskMeasurement:
    """Takes times on probe files. Runs on: the caller. May block: on the drives."""

    def __init__(
        self, files: ProbeFiles, *, seconds: float, most_sample_bytes: int, clock: Clock
    ) -> None:
        """`most_sample_bytes`: that a sample may write to each drive."""
        self._files, self._clock, self._seconds = files, clock, seconds
        self._most_sample_bytes = most_sample_bytes

    def measure(
        self,
        directories: Sequence[int],
        settings: Sequence[DriveSettings],
        *,
        shares: Sequence[float] | None = None,
    ) -> tuple[DriveFigures, tuple[DriveSettings, ...]]:
        """Measure some directories together; `shares` says how requests are dealt out to them.

        The settings that come back say whether directions are better kept apart.
        """
        shares = [1.0] * len(directories) if shares is None else shares
        read = self._rounds(Traffic.READ, directories, settings, shares)
        write = self._rounds(Traffic.WRITE, directories, settings, shares)
        settings, mixed = self._mixing(directories, settings, shares)
        return DriveFigures(read=read, write=write, mixed=mixed), tuple(settings)

    def sustained_write(self, directory: int, settings: DriveSettings, seconds: float) -> Figure:
        """Write for long without a pause; what counts is the last third of the time."""
        with self._files.open([settings], [directory]) as probe:
            ends = self._ends(probe, Traffic.WRITE, [1.0], seconds)
        tail_start = ends[-1] * (1 - _TAIL_SHARE)
        window_seconds = ends[-1] * _TAIL_SHARE / NUM_ROUNDS
        num_bytes = [0] * NUM_ROUNDS
        for end in ends:
            if end >= tail_start:
                window = int((end - tail_start) / window_seconds) if window_seconds else 0
                num_bytes[min(window, NUM_ROUNDS - 1)] += self._files.request_bytes
        # A window in which nothing ended belongs to the long request after it.
        samples = tuple(rate_of(nbytes, window_seconds) for nbytes in num_bytes if nbytes)
        return Figure(samples=samples)

    def choose_settings(self, directory: int, report: Report) -> DriveSettings:
        """Find block size and queue depth: a quick look at all, then the best against the default.

        The quick look only reads, which wears nothing. What then counts is the time of reading and
        writing as many bytes, in six samples with writes.
        """
        looked_at = {candidate: self._reads(directory, candidate) for candidate in CANDIDATES}
        best = max(looked_at, key=lambda candidate: looked_at[candidate])
        if best == _DEFAULT:
            return _DEFAULT
        # In turns, and every other time backwards: drives that allow bursts favour who comes first.
        rates: dict[DriveSettings, list[float]] = {_DEFAULT: [], best: []}
        for number in range(NUM_ROUNDS):
            for candidate in list(rates)[:: -1 if number % 2 else 1]:
                rates[candidate].append(self._round_trip(directory, candidate, self._seconds))
        ours, theirs = (Figure(samples=tuple(rates[one])).per_second for one in (best, _DEFAULT))
        is_better = ours >= CLEARLY_BETTER * theirs
        report(
            f"best settings {describe(best)}: {format_rate(ours)} there and back, the default "
            f"{describe(_DEFAULT)} {format_rate(theirs)}; "
            + ("taken" if is_better else "not clearly better, the default stays")
        )
        return best if is_better else _DEFAULT

    def _reads(self, directory: int, settings: DriveSettings) -> float:
        with self._files.open([settings], [directory]) as probe:
            return self._run(probe, Traffic.READ, [1.0], self._seconds / 2)

    def _round_trip(self, directory: int, settings: DriveSettings, seconds: float) -> float:
        """Bytes per second of writing and reading back, one after the other."""
        with self._files.open([settings], [directory]) as probe:
            read = self._run(probe, Traffic.READ, [1.0], seconds)
            write = self._run(probe, Traffic.WRITE, [1.0], seconds)
        return 1 / (1 / read + 1 / write)

    def _rounds(
        self,
        traffic: Traffic,
        directories: Sequence[int],
        settings: Sequence[DriveSettings],
        shares: Sequence[float],
    ) -> Figure:
        with self._files.open(settings, directories) as probe:
            samples = [self._run(probe, traffic, shares, self._seconds) for _ in range(NUM_ROUNDS)]
        return Figure(samples=tuple(samples))

    def _mixing(
        self,
        directories: Sequence[int],
        settings: Sequence[DriveSettings],
        shares: Sequence[float],
    ) -> tuple[list[DriveSettings], Figure]:
        """Both directions at once, and in runs of one direction: the better way and its figure."""
        together = [replace(one, mixing=Mixing.DUPLEX) for one in settings]
        in_runs = [replace(one, mixing=Mixing.SIMPLEX) for one in settings]
        duplex = self._rounds(Traffic.MIXED, directories, together, shares)
        simplex = self._rounds(Traffic.MIXED, directories, in_runs, shares)
        if simplex.per_second >= CLEARLY_BETTER * duplex.per_second:
            return in_runs, simplex
        return together, duplex

    def _run(
        self, probe: OpenProbe, traffic: Traffic, shares: Sequence[float], seconds: float
    ) -> float:
        """Keep the queues full for `seconds`; returns bytes per second, the emptying included."""
        most_bytes = _MOST_READ_BYTES if traffic is Traffic.READ else self._most_sample_bytes
        most_requests = len(probe.files) * max(1, most_bytes // self._files.request_bytes)
        ends = self._ends(probe, traffic, shares, seconds, most_requests)
        return rate_of(len(ends) * self._files.request_bytes, ends[-1])

    def _ends(
        self,
        probe: OpenProbe,
        traffic: Traffic,
        shares: Sequence[float],
        seconds: float,
        most_requests: int | None = None,
    ) -> list[float]:
        """Keep the queues full for `seconds`; returns when each request had ended."""
        files, clock = self._files, self._clock
        num_places = max(1, files.num_places // (2 if traffic is Traffic.MIXED else 1))
        most_ahead = sum(
            _requests_ahead(one, files.request_bytes, num_places) for one in probe.settings
        )
        turns, numbers = _Deal(shares), [count() for _ in probe.files]
        in_flight: deque[Ticket] = deque()
        ends: list[float] = []
        started = clock()
        try:
            while clock() - started < seconds or not (ends or in_flight):
                if len(ends) + len(in_flight) == most_requests:
                    break
                if len(in_flight) >= most_ahead:
                    probe.engine.wait(in_flight.popleft())
                    ends.append(clock() - started)
                which = next(turns)
                place, is_read = next(numbers[which]), traffic is Traffic.READ
                if traffic is Traffic.MIXED:
                    # Reads in the first half of the file, writes in the second.
                    place, is_read = place // 2, place % 2 == 0
                place = place % num_places
                if traffic is Traffic.MIXED and not is_read:
                    place += num_places
                in_flight.append(files.start(probe, place, which, is_read=is_read))
            while in_flight:
                probe.engine.wait(in_flight.popleft())
                ends.append(clock() - started)
        finally:
            # Waited for even after a failure: the buffers are not ours before.
            for ticket in in_flight:
                with contextlib.suppress(StorageError):
                    probe.engine.wait(ticket)
        return ends


def describe(settings: DriveSettings) -> str:
    """Settings in words."""
    return f"{format_bytes(settings.block_bytes)} x {settings.max_requests}"


def _requests_ahead(settings: DriveSettings, request_bytes: int, num_places: int) -> int:
    """Requests that keep a queue full: twice what may be in flight, no place used twice."""
    in_flight_bytes = min(settings.max_bytes, settings.max_requests * settings.block_bytes)
    return min(max(2, math.ceil(2 * in_flight_bytes / request_bytes)), num_places)


class _Deal:
    """Turns in proportion to shares, spread out as evenly as can be."""

    def __init__(self, shares: Sequence[float]) -> None:
        self._steps = [1 / share for share in shares]
        self._due = [(step, number) for number, step in enumerate(self._steps)]
        heapq.heapify(self._due)

    def __next__(self) -> int:
        at, number = self._due[0]
        heapq.heapreplace(self._due, (at + self._steps[number], number))
        return number
