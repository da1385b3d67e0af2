"""What a run began with knowing of its drives, and what its steps have shown of them."""

import pathlib
from dataclasses import replace

import pytest

from lohan.engine.planning.known_drives import KnownDrives
from lohan.hardware.machine import Machine
from support.hand_made import machine
from support.toy_models import Toy, ToyBlock
from support.toy_runs import attach_toy, make_toy, toy_optimizer, toy_steps


def with_rates(box: Machine, *, read: float, write: float) -> Machine:
    ssd = replace(
        box.ssds[0],
        read_bytes_per_second=read * box.ssds[0].read_bytes_per_second,
        write_bytes_per_second=write * box.ssds[0].write_bytes_per_second,
    )
    return replace(box, ssds=(ssd, *box.ssds[1:]))


def test_rates_are_remembered_once_both_directions_were_seen() -> None:
    told: list[Machine] = []
    box = machine()
    known = KnownDrives(machine=box, remember=told.append)
    for learned in (box, with_rates(box, read=0.5, write=1), with_rates(box, read=1, write=0.5)):
        known.note_learned(learned)
    assert told == []
    both = with_rates(box, read=0.5, write=0.5)
    known.note_learned(both)
    assert told == [both]
    KnownDrives(machine=box).note_learned(both)  # its figures are kept already


def test_a_stated_life_holds_for_drives_that_are_measured_later() -> None:
    first, later = machine(), with_rates(machine(), read=2, write=2)
    known = KnownDrives(machine=first, measure=lambda: KnownDrives(machine=later))
    rated = known.with_rated_lives([7])
    assert rated.measure is not None
    for one, rates in ((rated, first), (rated.measure(), later)):
        assert {ssd.endurance_bytes for ssd in one.machine.ssds} == {7}
        assert one.machine.ssd_read_bytes_per_second == rates.ssd_read_bytes_per_second


def test_an_engine_tells_what_its_steps_have_shown(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Machine] = []
    monkeypatch.setattr(KnownDrives, "note_learned", lambda _, learned: told.append(learned))
    model = make_toy(lambda: Toy(lambda _: ToyBlock()))
    with attach_toy(model, toy_optimizer(model), tmp_path) as engine:
        for number, batches in enumerate(toy_steps(5)):
            assert len(told) == (number >= 4)
            engine.step(batches)
        assert told == [engine.machine]
