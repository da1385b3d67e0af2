"""What recording a span costs, in CPU nanoseconds: off, on, and from several threads at once.

Run: `python benchmarks/trace.py [--spans 100000] [--repeats 5] [--json]`. The cost of an empty loop
is measured in the same run and taken off. The median and the spread of the repeats are printed. CPU
time, because it hardly depends on what else the machine does.
"""

import argparse
import json
import platform
import statistics
import threading
import time
from collections.abc import Callable

from lohan.trace import Recorder
from lohan.vocabulary import BlockId, Lane, TaskId, Tier

TASK, BLOCK = TaskId(1), BlockId(2)


def empty(recorder: Recorder, num_spans: int) -> None:
    for _ in range(num_spans):
        pass


def records(recorder: Recorder, num_spans: int) -> None:
    now = recorder.now
    for _ in range(num_spans):
        start_seconds = now()
        recorder.record(Lane.GPU, "forward", start_seconds, now(), "forward", TASK, BLOCK, 4096)


def samples(recorder: Recorder, num_spans: int) -> None:
    for _ in range(num_spans):
        recorder.sample(Tier.RAM, 4096)


def in_threads(num_threads: int) -> Callable[[Recorder, int], None]:
    def run(recorder: Recorder, num_spans: int) -> None:
        share = num_spans // num_threads
        threads = [
            threading.Thread(target=records, args=(recorder, share)) for _ in range(num_threads)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return run


CASES: list[tuple[str, bool, Callable[[Recorder, int], None]]] = [
    ("record, off (clock read twice)", False, records),
    ("sample, off", False, samples),
    ("record, on (clock read twice)", True, records),
    ("sample, on", True, samples),
    ("record, on, 4 threads", True, in_threads(4)),
]


def nanoseconds_each(
    work: Callable[[Recorder, int], None], *, is_on: bool, num_spans: int
) -> float:
    recorder = Recorder(is_on=is_on)
    start_seconds = time.process_time()
    work(recorder, num_spans)
    return (time.process_time() - start_seconds) * 1e9 / num_spans


def measure(num_spans: int, num_repeats: int) -> dict[str, list[float]]:
    """Return the nanoseconds per span of every repeat of every case, without the loop's own."""
    measured: dict[str, list[float]] = {name: [] for name, _, _ in CASES}
    for _ in range(num_repeats):
        loop = nanoseconds_each(empty, is_on=True, num_spans=num_spans)
        for name, is_on, work in CASES:
            measured[name].append(nanoseconds_each(work, is_on=is_on, num_spans=num_spans) - loop)
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--spans", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    measured = measure(options.spans, options.repeats)
    if options.json:
        facts = {"python": platform.python_version(), "spans": options.spans}
        print(json.dumps(facts | {"nanoseconds_per_span": measured}))
        return
    print(f"python {platform.python_version()}, {options.spans} spans, {options.repeats} repeats")
    for name, each in measured.items():
        print(f"{name:32s} {statistics.median(each):7.0f} ns  ({min(each):.0f} to {max(each):.0f})")


if __name__ == "__main__":
    main()
