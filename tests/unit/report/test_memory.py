"""Measured memory is compared with what is allowed for the same memory."""

from dataclasses import replace

from lohan.hardware import Machine, machine_named
from lohan.report.run_files import RunFiles
from lohan.report.sections.memory import memory
from lohan.units import MIB

PROCESS = "; the process 900.0 MiB with Python, its libraries and what they keep"
LEDGER = [
    {"tier": tier, "purpose": purpose, "bytes": nbytes * MIB}
    for tier, purpose, nbytes in (
        ("RAM", "budget", 252), ("RAM", "states", 200),
        ("GPU", "budget", 100), ("GPU", "weights", 80),
    )
]  # fmt: skip


def _files(machine: Machine, peaks: dict[str, int]) -> RunFiles:
    fields = dict.fromkeys(RunFiles.__dataclass_fields__)
    found = RunFiles(**fields)  # type: ignore[arg-type]
    return replace(
        found,
        plan={"ledger": LEDGER},
        machine=machine,
        summary={"peak_bytes": peaks, "process_peak_bytes": 900 * MIB},
    )


def test_where_the_processor_computes_both_tiers_are_one_memory() -> None:
    card = machine_named("desktop-4090")
    processor = replace(card, gpu=replace(card.gpu, is_processor=True))
    (only,) = memory(_files(processor, {"RAM": 334 * MIB}))
    assert only["verdict"] == (
        "280.0 MiB set aside, 352.0 MiB allowed, peak 334.0 MiB measured" + PROCESS
    )
    summary = {"peak_bytes": {"GPU": 90 * MIB}, "gpu_reserved_bytes": 95 * MIB}
    gpu, _ = memory(replace(_files(card, {}), summary=summary))
    assert str(gpu["verdict"]).endswith(
        "peak 90.0 MiB measured; torch's allocator held 95.0 MiB for it"
    )
    with_card = memory(_files(card, {"RAM": 210 * MIB, "GPU": 90 * MIB}))
    assert [bar["verdict"] for bar in with_card] == [
        "80.0 MiB set aside, 100.0 MiB allowed, peak 90.0 MiB measured",
        "200.0 MiB set aside, 252.0 MiB allowed, peak 210.0 MiB measured" + PROCESS,
    ]
