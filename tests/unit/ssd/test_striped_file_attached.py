"""A striped file taken up again from what was saved of it."""

import pathlib
from dataclasses import replace

import pytest

from lohan.errors import (
    CheckpointError,
    OutOfSpace,
    ShortTransfer,
    StorageError,
)
from lohan.ssd import (
    Extent,
    RunDirectories,
    StripedFile,
)
from support.ssd_engines import PAGE, cut_short, random_bytes
from support.striped_rig import CHUNK, Rig, saved_of


def test_a_saved_file_is_attached_again_with_its_directories_in_any_order(rig: Rig) -> None:
    first, second = rig.file.allocate(6 * CHUNK), rig.file.allocate(PAGE)
    rig.write(first, first.nbytes, seed=5)
    rig.write(second, PAGE, seed=6)
    saved = saved_of(rig.file)
    known = saved["checksums"]
    rig.file.close()
    rig.run.close()
    run = RunDirectories.attach(list(reversed(rig.directories)), "unit")
    rig.run, rig.file = run, StripedFile.attach(run, engine=rig.engine, **saved)
    assert rig.file.extents == (first, second)
    assert rig.file.checksums.stretches() == known
    rig.verify(first)
    rig.read(first, CHUNK, CHUNK, should_verify=True)
    assert rig.file.checksums.stretches() == known
    assert rig.read(second, PAGE, should_verify=True) == random_bytes(PAGE, 6).tobytes()
    with pytest.raises(OutOfSpace):
        rig.file.allocate(11 * CHUNK)


def test_a_short_or_missing_file_is_refused_on_attach(rig: Rig) -> None:
    saved = saved_of(rig.file)
    rig.file.close()
    cut_short(rig.engine, rig.file.paths[1], CHUNK)
    with pytest.raises(ShortTransfer, match="asked 131072 bytes, got 16384 bytes"):
        StripedFile.attach(rig.run, engine=rig.engine, **saved)
    with pytest.raises(StorageError, match="in none of the 2 SSD directories"):
        StripedFile.attach(rig.run, engine=rig.engine, **{**saved, "name": "other"})
    rig.file = StripedFile.create(
        rig.run, name="g", engine=rig.engine, capacity_bytes=CHUNK, chunk_bytes=CHUNK
    )
    for path in saved["name"] + ".0.bin", saved["name"] + ".1.bin":
        for directory in rig.run.paths:
            (pathlib.Path(directory) / path).unlink(missing_ok=True)


@pytest.mark.parametrize(
    "ranges", [[(0, 5)], [(0, PAGE), (0, PAGE)], [(0, 10**12)], [(0, 0)], [(-PAGE, PAGE)]]
)
def test_extents_that_make_no_sense_are_refused(rig: Rig, ranges: list[tuple[int, int]]) -> None:
    extents = tuple(Extent(offset_bytes=offset, nbytes=nbytes) for offset, nbytes in ranges)
    with pytest.raises(CheckpointError, match="striped file cannot be read"):
        StripedFile.attach(rig.run, engine=rig.engine, **{**saved_of(rig.file), "extents": extents})


def test_attaching_with_fewer_directories_is_refused(rig: Rig) -> None:
    saved = saved_of(rig.file)
    saved["layout"] = replace(saved["layout"], num_drives=3)
    with pytest.raises(CheckpointError, match="lies on 3 SSD directories, 2 are given"):
        StripedFile.attach(rig.run, engine=rig.engine, **saved)
