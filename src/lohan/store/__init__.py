"""States of blocks and swapped tensors, in RAM and on SSD.

Owns what is valid after a crash. Imported by `lanes`, `engine` and `train`. Never knows a schedule.
"""

from lohan.store.activations import SwapFile, SwapKey
from lohan.store.files.tickets import RamBuffer, StoreCounters, StoreTicket, wait_for
from lohan.store.format.layout import (
    GRAIN,
    TRAINABLE_PARTS,
    BlockLayout,
    ByteRange,
    ComputeFormat,
    MasterFormat,
    Part,
    StateLayout,
    TensorEntry,
    TensorPlace,
)
from lohan.store.format.residents import (
    MIN_SCRATCH_BYTES,
    SCRATCH_BYTES,
    parts_of_kinds,
    resident_bytes,
)
from lohan.store.format.slots import BlockState, SlotCount
from lohan.store.left_runs import (
    LeftRun,
    LeftRuns,
    Removal,
    list_left_runs,
    refuse_removal,
    remove_left_run,
)
from lohan.store.opening import StateStoreWarning, create_states, open_states
from lohan.store.seals.manifest import CopiesInDoubt, FoundManifest, Manifest, find_manifest
from lohan.store.states import StateStore

__all__ = [
    "GRAIN",
    "MIN_SCRATCH_BYTES",
    "SCRATCH_BYTES",
    "TRAINABLE_PARTS",
    "BlockLayout",
    "BlockState",
    "ByteRange",
    "ComputeFormat",
    "CopiesInDoubt",
    "FoundManifest",
    "LeftRun",
    "LeftRuns",
    "Manifest",
    "MasterFormat",
    "Part",
    "RamBuffer",
    "Removal",
    "SlotCount",
    "StateLayout",
    "StateStore",
    "StateStoreWarning",
    "StoreCounters",
    "StoreTicket",
    "SwapFile",
    "SwapKey",
    "TensorEntry",
    "TensorPlace",
    "create_states",
    "find_manifest",
    "list_left_runs",
    "open_states",
    "parts_of_kinds",
    "refuse_removal",
    "remove_left_run",
    "resident_bytes",
    "wait_for",
]
