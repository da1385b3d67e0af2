"""Each order that matters, taken away on purpose: the test accelerator notices.

What the other devices see is in the table of docs/test-accelerator.md, which is compared here.
"""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lohan.device.accelerator import AcceleratorDevice
from lohan.vocabulary import Choice, Lane
from support import accelerator
from support.accelerator_cases import on_accelerator
from support.engine_runs import assert_same, run_case
from support.mistakes import MISTAKES, Mistake, make_late, memory_is_reused_under_compute

CASE = on_accelerator(model="llama_packed", choice=Choice.SWAP_TO_SSD, num_micro_batches=2)
NAMES = {"accelerator": accelerator.NAME}
DOCUMENT = Path(__file__).parents[2] / "docs" / "test-accelerator.md"


def is_seen(mistake: Mistake, kind: str, place: Path) -> bool:
    """Whether a run fails or has other bits than the plain loop."""
    case = replace(CASE, device=NAMES.get(kind, kind), **mistake.changes)
    with pytest.MonkeyPatch.context() as patch:
        mistake.put(patch)
        make_late(mistake, patch)
        try:
            outcome, expected = run_case(case, place)
            assert_same(outcome, expected, norms=case.max_grad_norm is not None)
        except Exception:  # whatever a wrong order leads to
            return True
    return False


@pytest.mark.parametrize(
    ("mistake", "kind"),
    [
        pytest.param(mistake, kind, id=f"{mistake.words} ({kind})")
        for mistake in MISTAKES
        for kind in sorted(mistake.seen_by)
    ],
)
def test_a_mistake_is_seen(mistake: Mistake, kind: str, tmp_path: Path) -> None:
    assert is_seen(mistake, kind, tmp_path)


@pytest.mark.parametrize("lanes", [(), (Lane.GPU_TO_RAM,), (Lane.RAM_TO_GPU,)])
def test_nothing_is_seen_where_there_is_no_mistake(lanes: tuple[Lane, ...], tmp_path: Path) -> None:
    none = Mistake(words="", put=lambda patch: None, seen_by=frozenset(), late_lanes=lanes)
    assert not is_seen(none, "accelerator", tmp_path)


@pytest.mark.parametrize("is_mistaken", [False, True])
def test_memory_used_again_under_queued_compute_is_seen(
    is_mistaken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_mistaken:
        memory_is_reused_under_compute(monkeypatch)
    with AcceleratorDevice() as device:
        threes, nines = torch.full((1024,), 3.0), torch.full((1024,), 9.0)
        slot = device.alloc(4096)
        device.wait(device.copy_async(slot, threes, lane=Lane.RAM_TO_GPU))
        accelerator.calls().hold(0)
        with device.compute():
            doubled = slot.tensor(torch.float32, (1024,)) * 2
        device.free(slot)
        other = device.alloc(4096)
        device.wait(device.copy_async(other, nines, lane=Lane.RAM_TO_GPU))
        accelerator.calls().let_go(0)
        assert (doubled.cpu().tolist() == [6.0] * 1024) is not is_mistaken


def test_the_table_of_the_document_is_this_one() -> None:
    rows = re.findall(
        r"^\| ([^|]+) \| (yes|no) \| (yes|no) \| (yes|no) \|$", DOCUMENT.read_text(), re.M
    )
    kinds = ("cpu", "emulated", "accelerator")
    expected = [
        (one.words, *("yes" if kind in one.seen_by else "no" for kind in kinds)) for one in MISTAKES
    ]
    assert [*rows] == [*expected, ("memory is used again under queued compute", "no", "no", "yes")]
