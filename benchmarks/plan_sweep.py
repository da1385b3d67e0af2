"""Plans of `lohan+` over sweeps: more of anything must never be planned slower, nor wear more.

    python benchmarks/plan_sweep.py [--sample] [--random 500 --seed 1] [--jobs 2] [--show 20]

Plans and simulates every case of the sweep and compares each with its neighbours that have less:
the next smaller RAM, fewer drives, clipping instead of none. `--random` makes so many of these
comparisons, which ones the seed says: a sample that nothing was tuned on. Prints the worst cases, a
table by kind and one JSON object as its last line. Exit code 1 if there is a violation. Tokens per
second that fall with a larger batch are counted apart: its activations take the RAM that states
had.
"""

import argparse
import itertools
import json
import multiprocessing
import random
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from lohan.hardware.presets import machine_named
from lohan.model.names import shape_of
from lohan.plan import Workload
from lohan.plan.limits import Question
from lohan.simulate.choose import Judge
from lohan.units import GIB

SEQUENCE = 1024
SLOWER = 2e-3
"""Less than this share is no violation: plans within a thousandth of the fastest are equally fast
to the planner, which takes the one that writes least; and lanes take the most urgent task that may
run, which is not the best order there is, so that one plan may take a little longer where something
gets faster."""
EQUAL = 1e-3
"""Steps that differ by less than this share are equally fast, and then bytes written count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One request."""

    model: str
    machine: str
    ram_gib: int
    num_ssds: int
    batch: int
    clips: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """All combinations of these."""

    models: Sequence[str]
    machines: Sequence[str]
    ram_gib: Sequence[int]
    num_ssds: Sequence[int]
    batches: Sequence[int]

    def groups(self) -> Iterator[list[Case]]:
        """Cases of one model on one machine with one batch."""
        for model, machine, batch in itertools.product(self.models, self.machines, self.batches):
            yield [
                Case(
                    model=model,
                    machine=machine,
                    ram_gib=ram,
                    num_ssds=ssds,
                    batch=batch,
                    clips=clips,
                )
                for ram in self.ram_gib
                for ssds in self.num_ssds
                for clips in (True, False)
            ]


FULL = Sweep(
    models=("gpt-13b", "gpt-30b", "gpt-175b"),
    machines=("desktop-4090", "workstation-4090", "paper-4090"),
    ram_gib=(32, 48, 64, 96, 128, 192, 256, 384, 512),
    num_ssds=(1, 2, 3, 4, 5, 6, 8, 12),
    batches=(8, 16, 32, 64, 128, 256),
)
SAMPLE = replace(
    FULL,
    ram_gib=(32, 64, 96, 128, 256, 512),
    num_ssds=(1, 2, 4, 5, 8, 12),
    batches=(8, 32, 128),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """What a plan comes to."""

    seconds: float
    written_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """More of something that is planned worse."""

    kind: str
    less: Case
    more: Case
    factor: float
    """How much worse: seconds, seconds per token or bytes written."""


def planned(case: Case, judge: Judge) -> Planned | None:
    """The plan of a case, simulated; None where it does not fit."""
    machine = machine_named(case.machine).with_ram(case.ram_gib * GIB).with_ssds(case.num_ssds)
    workload = Workload(batch=case.batch, sequence=SEQUENCE, clips_gradients=case.clips)
    shape = shape_of(case.model)
    question = Question(policy="lohan+", machine=machine, shape=shape, workload=workload)
    found = judge.best(question)
    if found is None:
        return None
    return Planned(seconds=found.step.step_seconds, written_bytes=found.step.written_bytes)


def planned_group(cases: Sequence[Case]) -> list[tuple[Case, Planned | None]]:
    """Every case of a group; what is known of one is not worked out again for another."""
    judge = Judge()
    return [(case, planned(case, judge)) for case in cases]


def pairs(sweep: Sweep) -> Iterator[tuple[str, Case, Case]]:
    """What is compared: a kind, the case with less, and the one with more."""
    for group in sweep.groups():
        for case in group:
            for kind, name, values in (
                ("RAM", "ram_gib", sweep.ram_gib),
                ("drives", "num_ssds", sweep.num_ssds),
                ("batch", "batch", sweep.batches),
            ):
                index = values.index(getattr(case, name))
                if index + 1 < len(values):
                    yield kind, case, replace(case, **{name: values[index + 1]})
            if case.clips:
                yield "no clipping", case, replace(case, clips=False)


def violations(
    compared: Iterable[tuple[str, Case, Case]], found: dict[Case, Planned | None]
) -> Iterator[tuple[str, Violation | None]]:
    """The kind of every comparison, and what is wrong with it."""
    for kind, less, more in compared:
        before, after = found[less], found[more]
        if before is None:
            continue
        if after is None:
            if kind != "batch":
                yield kind, Violation(kind=kind, less=less, more=more, factor=float("inf"))
            continue
        tokens = more.batch / less.batch
        slower = after.seconds / before.seconds / tokens
        wear = after.written_bytes / max(1, before.written_bytes) / tokens
        if slower > 1 + SLOWER:
            yield kind, Violation(kind=kind, less=less, more=more, factor=slower)
        elif slower > 1 - EQUAL and wear > 1 + EQUAL:
            yield kind, Violation(kind=f"{kind}, writes", less=less, more=more, factor=wear)
        else:
            yield kind, None


def run(groups: Sequence[Sequence[Case]], num_jobs: int) -> dict[Case, Planned | None]:
    """Plan every case."""
    if num_jobs == 1:
        results: Iterable[list[tuple[Case, Planned | None]]] = map(planned_group, groups)
        return dict(itertools.chain.from_iterable(results))
    with multiprocessing.Pool(num_jobs) as pool:
        results = pool.imap_unordered(planned_group, groups, chunksize=1)
        return dict(itertools.chain.from_iterable(results))


def main() -> int:
    """Run the sweep and say what is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sample", action="store_true", help="about a quarter of the cases")
    parser.add_argument("--random", type=int, help="so many comparisons, taken at random")
    parser.add_argument("--seed", type=int, default=0, help="of what is taken at random")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--show", type=int, default=20, help="violations printed, the worst first")
    parser.add_argument("--models", nargs="*", help="other models")
    parser.add_argument("--save", help="file for what every case came to, as JSON lines")
    options = parser.parse_args()
    sweep = SAMPLE if options.sample else FULL
    if options.models:
        sweep = replace(sweep, models=options.models)
    begin = time.perf_counter()
    chosen = list(pairs(sweep))
    if options.random:
        chosen = [one for one in chosen if one[0] != "batch"]
        chosen = random.Random(options.seed).sample(chosen, options.random)
    asked = {case for _, less, more in chosen for case in (less, more)}
    groups = [[case for case in group if case in asked] for group in sweep.groups()]
    found = run(groups, options.jobs)
    if options.save:
        with open(options.save, "w", encoding="utf-8") as file:
            for case, result in sorted(found.items(), key=lambda one: repr(one[0])):
                values = [getattr(case, name) for name in Case.__slots__]
                numbers = (result.seconds, result.written_bytes) if result else (None, None)
                file.write(json.dumps([*values, *numbers]) + "\n")
    compared: dict[str, int] = {}
    wrong: list[Violation] = []
    for kind, violation in violations(chosen, found):
        compared[kind] = compared.get(kind, 0) + 1
        if violation is not None:
            wrong.append(violation)
    wrong.sort(key=lambda one: -one.factor)
    slower_batches = [one for one in wrong if one.kind.startswith("batch")]
    wrong = [one for one in wrong if not one.kind.startswith("batch")]
    for one in wrong[: options.show]:
        print(f"{one.kind}: {one.factor:.4f} {one.less} -> {one.more}")
    counts = {
        kind: sum(one.kind == kind for one in wrong) for kind in sorted({o.kind for o in wrong})
    }
    worst = {kind: max(one.factor for one in wrong if one.kind == kind) for kind in counts}
    for kind, count in counts.items():
        print(f"{kind:24} {count:5} worst {worst[kind]:.4f}")
    print(
        json.dumps(
            {
                "cases": len(found),
                "fit": sum(one is not None for one in found.values()),
                "comparisons": compared,
                "violations": counts,
                "num_violations": len(wrong),
                "slower_with_a_larger_batch": len(slower_batches),
                "worst": {kind: round(factor, 5) for kind, factor in worst.items()},
                "seconds": round(time.perf_counter() - begin, 1),
            }
        )
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
