"""What was tried and what came of it, kept in a file so that a torture can go on.

Owns the file's form. A life is one unit: it has a number, and with the seed that gives all of its
faults again.
"""

import dataclasses
import json
import pathlib
import time
from collections import Counter
from typing import Any

_VERSION = 1
_MOST_WRONG = 200


@dataclasses.dataclass
class Totals:
    """Counts by kind of fault."""

    seed: int
    next_life: int = 0
    seconds: float = 0.0
    faults: Counter[str] = dataclasses.field(default_factory=Counter)
    lives: Counter[str] = dataclasses.field(default_factory=Counter)
    outcomes: dict[str, Counter[str]] = dataclasses.field(default_factory=dict)
    skipped: dict[str, str] = dataclasses.field(default_factory=dict)
    wrong: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def count(self, kind: str, outcome: str, number: int = 1) -> None:
        """Note what came of faults."""
        self.faults[kind] += number
        self.outcomes.setdefault(kind, Counter())[outcome] += number

    def note_wrong(self, kind: str, life: int, sentence: str) -> None:
        """Note what should not be, with how to have it again, and print it."""
        again = f"scripts/torture --seed {self.seed} --life {life} --only {kind}"
        self.outcomes.setdefault(kind, Counter())["wrong"] += 1
        self.wrong = [*self.wrong, {"kind": kind, "life": life, "what": sentence}][-_MOST_WRONG:]
        print(f"WRONG {kind}: {sentence}\n    again: {again}", flush=True)

    @property
    def num_wrong(self) -> int:
        """How many faults were not as promised."""
        return sum(counts["wrong"] for counts in self.outcomes.values())

    def as_json(self) -> dict[str, Any]:
        """For the file, and for the last line."""
        return {
            "version": _VERSION,
            "date": time.strftime("%Y-%m-%d"),
            "seed": self.seed,
            "next_life": self.next_life,
            "seconds": round(self.seconds, 1),
            "faults": sum(self.faults.values()),
            "wrong": self.num_wrong,
            "by_kind": {
                kind: {
                    "faults": self.faults[kind],
                    "lives": self.lives[kind],
                    **dict(sorted(self.outcomes.get(kind, Counter()).items())),
                }
                for kind in sorted(self.faults | self.lives)
            },
            "skipped": self.skipped,
            "what_was_wrong": self.wrong,
        }

    def save(self, path: pathlib.Path) -> None:
        """Replace the file in one instant."""
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.write_text(json.dumps(self.as_json(), indent=1) + "\n", encoding="utf-8")
        temporary.replace(path)


def read_totals(path: pathlib.Path | None, seed: int | None) -> Totals:
    """The totals of a file, or new ones."""
    if path is None or not path.exists():
        return Totals(seed=0 if seed is None else seed)
    found = json.loads(path.read_text(encoding="utf-8"))
    if found["version"] != _VERSION or seed not in (None, found["seed"]):
        raise SystemExit(f"torture: {path} has seed {found['seed']}: give that one or another file")
    totals = Totals(seed=found["seed"], next_life=found["next_life"], seconds=found["seconds"])
    totals.wrong = found["what_was_wrong"]
    for kind, counts in found["by_kind"].items():
        totals.faults[kind] = counts.pop("faults")
        totals.lives[kind] = counts.pop("lives")
        totals.outcomes[kind] = Counter(counts)
    return totals
