"""What a run takes of each filesystem: uses on one drive add up, what is there is not asked for."""

import pathlib
from dataclasses import replace

from lohan.hardware.presets import machine_named
from lohan.model.names import shape_of
from lohan.paper import policy_named
from lohan.plan import make_plan
from lohan.plan.ledger import LedgerLine
from lohan.plan.run_cost import run_warnings
from lohan.plan.run_room import (
    STATES,
    DriveSpace,
    DriveUse,
    drive_rooms,
    parts_of,
    space_at,
    states_uses,
)
from lohan.plan.workload import Workload
from lohan.units import GB
from lohan.vocabulary import Tier

DESKTOP = machine_named("desktop-4090")
PLAN = make_plan("lohan+", DESKTOP, shape_of("gpt-1.55b"), Workload(batch=1, sequence=64))


def space_of(path: str) -> DriveSpace:
    """Paths that begin with the same letter are on one filesystem of 100 GB."""
    return DriveSpace(device=ord(path[1]), free_bytes=100 * GB)


def use(path: str, purpose: str, size_gb: float, *, is_there: bool = False) -> DriveUse:
    return DriveUse(path=path, purpose=purpose, nbytes=int(size_gb * GB), is_there=is_there)


def test_uses_on_one_filesystem_add_up_and_those_that_are_there_are_shown() -> None:
    one, other = drive_rooms(
        [
            use("/a/ssd", "states", 30),
            use("/b/ssd", "states", 30),
            use("/a/ssd2", "states", 30),
            use("/a/models", "the model to start from", 4, is_there=True),
            use("/a/out", "the finished model", 4),
            use("/a/out", "0 archive(s)", 0),
        ],
        space_of,
    )
    assert (one.path, one.asked_bytes, other.asked_bytes) == ("/a/ssd", 64 * GB, 30 * GB)
    assert one.in_words() == (
        "/a/ssd: 64.0 GB of 100.0 GB free for 60.0 GB of states, 4.0 GB of the finished model; "
        "there already: 4.0 GB of the model to start from"
    )
    assert other.in_words() == "/b/ssd: 30.0 GB of 100.0 GB free for 30.0 GB of states"
    assert one.to_fields()["asked_bytes"] == 64 * GB


def test_the_real_free_space_is_what_is_warned_of() -> None:
    for output_gb, words in ((5, None), (12, "95% of what is free"), (18, "does not fit on")):
        rooms = drive_rooms([use("/a", "states", 83), use("/a", "a model", output_gb)], space_of)
        found = run_warnings(DESKTOP, PLAN.ledger, written_bytes=0, rooms=rooms)
        assert len(found) == (words is not None)
        assert all(str(words) in one and "/a: " in one for one in found)


def test_states_are_divided_and_those_of_a_resumed_run_are_there() -> None:
    parts = {STATES: 101, "swapped activations": 10}
    fresh = states_uses(parts, ["/a", "/b"])
    assert [(one.path, one.nbytes) for one in fresh] == [
        ("/a", 51),
        ("/a", 5),
        ("/b", 51),
        ("/b", 5),
    ]
    assert not any(one.is_there for one in fresh)
    resumed = states_uses(parts, ["/a"], is_resumed=True)
    assert [one.is_there for one in resumed] == [True, False]


def test_states_that_live_in_ram_have_their_place_on_ssd() -> None:
    """And what a plan swaps or spills comes on top; published systems keep what they keep."""
    assert PLAN.ledger.total(Tier.SSD) == 0
    assert parts_of(PLAN) == {STATES: 24 * PLAN.shape.num_parameters}
    lines = tuple(
        LedgerLine(tier=Tier.SSD, purpose=purpose, nbytes=7, remedy="none")
        for purpose in ("states in two slots", "swapped activations")
    )
    swapping = replace(PLAN, ledger=replace(PLAN.ledger, lines=lines))
    assert parts_of(swapping) == {**parts_of(PLAN), "swapped activations": 7}
    shape, workload = shape_of("gpt-13b"), Workload(batch=32, sequence=1024)
    published = make_plan(policy_named("zero-infinity"), DESKTOP, shape, workload)
    assert sum(parts_of(published).values()) == published.ledger.total(Tier.SSD)


def test_a_folder_that_is_not_made_yet_is_on_the_filesystem_of_its_parent(
    tmp_path: pathlib.Path,
) -> None:
    found = space_at(str(tmp_path / "a" / "b"))
    assert found.device == tmp_path.stat().st_dev
    assert found.free_bytes > 0
