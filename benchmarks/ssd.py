"""How fast are striped files on these directories, next to fio and to plain synchronous reads?

    python benchmarks/ssd.py --dir D [--dir D2 --dir D3] [--seconds S] [--size-gb G] [--full]

Reads, writes and a half-and-half mix, over block sizes and queue depths. Files are reserved and
written once before anything is timed: every timed write overwrites (the first write of new space is
slower and printed apart). Ours and fio take turns on the same files for every setting, because
drives are noisy; the best of the rounds counts for both. The last line is one JSON object.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

from ssd_files import NUM_REQUESTS, Figure, Stripes

from lohan.ssd import DriveSettings, check_directories
from lohan.units import GB, MIB, format_rate

OPERATIONS = ("read", "write", "mixed")
QUICK_BLOCKS_MIB, QUICK_DEPTHS = (1, 4, 16), (1, 8, 32)
FULL_BLOCKS_MIB, FULL_DEPTHS = (1, 2, 4, 8, 16, 32), (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One setting, measured with ours and with fio."""

    operation: str
    num_directories: int
    block_mib: int
    depth: int
    ours: Figure
    fio: Figure | None


def settings_of(block_mib: int, depth: int) -> DriveSettings:
    return DriveSettings(
        max_requests=depth, max_bytes=depth * block_mib * MIB, block_bytes=block_mib * MIB
    )


def best_of(num_rounds: int, *measures: Callable[[], Figure | None]) -> list[Figure | None]:
    """Take turns between the measures, every other round backwards; the best of each counts.

    Backwards, because drives that allow short bursts favour whoever comes first.
    """
    best: list[Figure | None] = [None] * len(measures)
    for number in range(num_rounds):
        for place in range(len(measures))[:: -1 if number % 2 else 1]:
            figure, known = measures[place](), best[place]
            if figure and (known is None or figure.bytes_per_second > known.bytes_per_second):
                best[place] = figure
    return best


def sweep(
    stripes: Stripes,
    blocks_mib: Sequence[int],
    depths: Sequence[int],
    seconds: float,
    num_rounds: int,
) -> list[Cell]:
    cells = []
    for operation in OPERATIONS:
        for block_mib in blocks_mib:
            for depth in depths:
                ours, fio = best_of(
                    num_rounds,
                    lambda o=operation, b=block_mib, d=depth: stripes.measure(
                        o, settings_of(b, d), seconds
                    ),
                    lambda o=operation, b=block_mib, d=depth: stripes.fio(o, b * MIB, d, seconds),
                )
                assert ours is not None
                cell = Cell(
                    operation=operation,
                    num_directories=len(stripes.directories),
                    block_mib=block_mib,
                    depth=depth,
                    ours=ours,
                    fio=fio,
                )
                cells.append(cell)
                print(describe(cell), flush=True)
    return cells


def describe(cell: Cell) -> str:
    text = (
        f"{cell.operation:5} {cell.num_directories} dir  {cell.block_mib:2} MiB x{cell.depth:<2}  "
        f"ours {format_rate(cell.ours.bytes_per_second):>10}  "
        f"{cell.ours.cpu_seconds_per_gb:.3f} CPU s/GB"
    )
    if cell.fio is None:
        return text
    return (
        f"{text}   fio {format_rate(cell.fio.bytes_per_second):>10}  "
        f"{cell.fio.cpu_seconds_per_gb:.3f} CPU s/GB   "
        f"ratio {cell.ours.bytes_per_second / cell.fio.bytes_per_second:.2f}"
    )


@contextlib.contextmanager
def busy_python_thread() -> Iterator[None]:
    is_over = threading.Event()

    def compute() -> None:
        while not is_over.is_set():
            sum(range(1000))

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


@contextlib.contextmanager
def busy_process() -> Iterator[None]:
    """Takes the same CPU time as a busy thread, but not the interpreter's lock."""
    process = subprocess.Popen([sys.executable, "-c", "while True: sum(range(1000))"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def best_cell(cells: Sequence[Cell], operation: str, num_directories: int) -> dict[str, object]:
    """Best of ours against best of fio, whichever settings gave them."""
    chosen = [c for c in cells if c.operation == operation and c.num_directories == num_directories]
    ours = max(chosen, key=lambda cell: cell.ours.bytes_per_second)
    fios = [cell.fio.bytes_per_second for cell in chosen if cell.fio is not None]
    return {
        "operation": operation,
        "num_directories": num_directories,
        "ours_bytes_per_second": ours.ours.bytes_per_second,
        "block_mib": ours.block_mib,
        "depth": ours.depth,
        "cpu_seconds_per_gb": ours.ours.cpu_seconds_per_gb,
        "fio_bytes_per_second": max(fios, default=None),
        "ratio_to_best_fio": ours.ours.bytes_per_second / max(fios) if fios else None,
    }


def run(
    directories: Sequence[str],
    *,
    seconds: float,
    size_bytes: int,
    blocks_mib: Sequence[int],
    depths: Sequence[int],
    num_rounds: int,
) -> dict[str, object]:
    """Measure everything; returns what is printed as JSON."""
    reports = check_directories(directories)
    for report in reports:
        print(f"{report.path}: {report.filesystem}, {report.access}, {report.warnings or 'fine'}")
    places = [list(directories)]
    subdirectories: list[str] = []
    if len(directories) == 1:
        # Three directories on one drive show what striping costs, not what three drives give.
        for number in range(3):
            path = os.path.join(directories[0], f"bench-{os.getpid()}-{number}")
            os.mkdir(path, 0o700)
            subdirectories.append(path)
        places.append(subdirectories)
    else:
        places.insert(0, list(directories[:1]))
    cells: list[Cell] = []
    extra: dict[str, object] = {}
    try:
        for number, place in enumerate(places):
            stripes = Stripes(place, size_bytes)
            try:
                first_write = stripes.write_once()
                print(f"\n{len(place)} dir, {stripes.reason}, {', '.join(stripes.accesses)}")
                print(
                    f"first write of new space (apart from all below): {format_rate(first_write)}"
                )
                cells += sweep(stripes, blocks_mib, depths, seconds, num_rounds)
                if number == 0:
                    extra = compare(stripes, cells, seconds, num_rounds)
                    extra["first_write_bytes_per_second"] = first_write
            finally:
                stripes.close()
    finally:
        for path in subdirectories:
            os.rmdir(path)
    best = [
        best_cell(cells, operation, count)
        for count in sorted({cell.num_directories for cell in cells})
        for operation in OPERATIONS
    ]
    print("\nbest of ours against best of fio, any setting:")
    for entry in best:
        ratio = entry["ratio_to_best_fio"]
        shown = "(no fio)" if ratio is None else f"{ratio:.2f}"
        print(
            f"  {entry['operation']:5} {entry['num_directories']} dir  "
            f"{format_rate(entry['ours_bytes_per_second']):>10} "  # type: ignore[arg-type]
            f"({entry['block_mib']} MiB x{entry['depth']})  ratio {shown}"
        )
    return {"best": best, **extra, "cells": [asdict(cell) for cell in cells]}


def compare(
    stripes: Stripes, cells: Sequence[Cell], seconds: float, num_rounds: int
) -> dict[str, object]:
    """What else there is to know at the best reading setting."""
    best = best_cell(cells, "read", len(stripes.directories))
    block_mib, depth = int(str(best["block_mib"])), int(str(best["depth"]))
    settings = settings_of(block_mib, depth)

    def read_during(load: contextlib.AbstractContextManager[None], num_ahead: int) -> Figure:
        with load:
            return stripes.measure("read", settings, seconds, num_ahead=num_ahead)

    # A whole pass ahead, as a schedule starts requests: what is left is the engine itself.
    far_ahead = max(NUM_REQUESTS, stripes.num_places)
    quiet, busy_thread, other_process, close_busy_thread, threads = best_of(
        num_rounds + 1,
        lambda: read_during(contextlib.nullcontext(), far_ahead),
        lambda: read_during(busy_python_thread(), far_ahead),
        lambda: read_during(busy_process(), far_ahead),
        lambda: read_during(busy_python_thread(), NUM_REQUESTS),
        lambda: stripes.measure("read", settings, seconds, is_uring=False),
    )
    plain_write, checked_write = best_of(
        num_rounds + 1,
        lambda: stripes.measure("write", settings, seconds),
        lambda: stripes.measure("write", settings, seconds, should_checksum=True),
    )
    plain = max(stripes.plain_reads(block_mib * MIB, seconds) for _ in range(num_rounds + 1))
    figures = {
        "read_started_far_ahead": quiet,
        "read_started_far_ahead_beside_busy_python_thread": busy_thread,
        "read_started_far_ahead_beside_busy_process": other_process,
        "read_beside_busy_python_thread": close_busy_thread,
        "read_threads_engine": threads,
        "write": plain_write,
        "write_with_checksums": checked_write,
    }
    print(f"\nat {block_mib} MiB x{depth} (CPU time of the busy thread counts as ours):")
    for name, figure in figures.items():
        assert figure is not None
        rate = format_rate(figure.bytes_per_second)
        print(f"  {name:50} {rate:>10}  {figure.cpu_seconds_per_gb:.3f} CPU s/GB")
    print(f"  {'plain synchronous reads':50} {format_rate(plain):>10}")
    named = {name: asdict(figure) for name, figure in figures.items() if figure is not None}
    return {**named, "plain_synchronous_read_bytes_per_second": plain}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Striped files against fio and plain reads.")
    parser.add_argument("--dir", action="append", required=True, help="an SSD directory; repeat")
    parser.add_argument("--seconds", type=float, default=0.5, help="per measurement")
    parser.add_argument("--size-gb", type=float, default=1.0, help="bytes of the files together")
    parser.add_argument("--full", action="store_true", help="all block sizes and depths")
    parser.add_argument("--rounds", type=int, default=2, help="turns of ours and fio")
    parser.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    blocks_mib, depths = (
        (FULL_BLOCKS_MIB, FULL_DEPTHS) if options.full else (QUICK_BLOCKS_MIB, QUICK_DEPTHS)
    )
    if options.tiny:
        blocks_mib, depths = (4,), (2,)
    result = run(
        options.dir,
        seconds=options.seconds,
        size_bytes=int(options.size_gb * GB),
        blocks_mib=blocks_mib,
        depths=depths,
        num_rounds=options.rounds,
    )
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
