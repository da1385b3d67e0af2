"""A short life of a store: fill, seal, update, seal, update twice, seal. For fault tests.

Says after every seal what a later opening must find.
"""

import pathlib
from collections.abc import Mapping, Sequence

from lohan.ssd import IoEngine
from lohan.store import GRAIN, Part, StateLayout, StateStore, TensorEntry
from lohan.vocabulary import BlockId
from support.state_stores import MirrorStates, contents, created, random_tensors, update_all

LAYOUT = StateLayout.pack(
    {
        "first": (
            TensorEntry(name="a", shape=(3,)),
            TensorEntry(name="b", shape=(60, 40)),
            TensorEntry(name="c", shape=(700,), is_trainable=False),
        ),
        "second": (TensorEntry(name="d", shape=(1025,)),),
    }
)
RESIDENT: Mapping[BlockId, Sequence[Part]] = {BlockId(0): [Part.V32], BlockId(1): [Part.P16]}
# Whole blocks: every read is one the checksums cover.
POSITIONS = 2 * GRAIN


class Life:
    """Runs the workload and keeps what was sealed; `mirrors[n]` is the state of seal n + 1."""

    def __init__(self) -> None:
        self.mirrors: list[MirrorStates] = []
        self.num_sealed = 0
        self.peak_leased_bytes = 0

    def run(self, directories: list[pathlib.Path], engine: IoEngine) -> None:
        with created(directories, LAYOUT, engine, RESIDENT) as store:
            store.fill(random_tensors(LAYOUT).items())
            self._seal(store, MirrorStates(contents(store)))
            update_all(store, 1, POSITIONS)
            self._seal(store, self._updated(1))
            update_all(store, 2, POSITIONS)
            update_all(store, 3, POSITIONS)
            self._seal(store, self._updated(2, 3))
            update_all(store, 4, POSITIONS)

    def _updated(self, *steps: int) -> MirrorStates:
        mirror = self.mirrors[-1].copy()
        for step in steps:
            mirror.update_all(step)
        return mirror

    def _seal(self, store: StateStore, mirror: MirrorStates) -> None:
        self.mirrors.append(mirror)
        mirror.judge(contents(store))
        store.seal(step=len(self.mirrors))
        self.num_sealed = len(self.mirrors)

    def judge(self, store: StateStore) -> None:
        """A store opened later holds the last seal, or the one that was being made."""
        assert store.sealed is not None
        step = store.sealed.step
        assert step in (self.num_sealed, len(self.mirrors)), (step, self.num_sealed)
        self.mirrors[step - 1].judge(contents(store))
