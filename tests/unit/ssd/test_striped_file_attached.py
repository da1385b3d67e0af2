"""A striped file taken up again from what was saved of it."""

import json
import pathlib

import pytest

from lohan.errors import (
    CheckpointError,
    OutOfSpace,
    ShortTransfer,
    StorageError,
)
from lohan.ssd import (
    RunDirectories,
    StripedFile,
)
from support.ssd_engines import PAGE, cut_short, random_bytes
from support.striped_rig import CHUNK, Rig


def test_a_saved_file_is_attached_again_with_its_directories_in_any_order(rig: Rig) -> None:
    first, second = rig.file.allocate(6 * CHUNK), rig.file.allocate(PAGE)
    rig.write(first, first.nbytes, seed=5)
    rig.write(second, PAGE, seed=6)
    fields = json.loads(json.dumps(rig.file.to_json()))
    assert len(fields["checksums"]["stretches"]) == 2
    rig.file.close()
    rig.run.close()
    run = RunDirectories.attach(list(reversed(rig.directories)), "unit")
    rig.run, rig.file = run, StripedFile.attach(run, fields, engine=rig.engine)
    assert rig.file.extents == (first, second)
    assert rig.file.to_json() == fields
    rig.verify(first)
    # Verifying as a whole made the parts known again.
    rig.read(first, CHUNK, CHUNK, should_verify=True)
    assert rig.file.to_json() == fields
    assert rig.read(second, PAGE, should_verify=True) == random_bytes(PAGE, 6).tobytes()
    with pytest.raises(OutOfSpace):
        rig.file.allocate(11 * CHUNK)


def test_a_short_or_missing_file_is_refused_on_attach(rig: Rig) -> None:
    fields = rig.file.to_json()
    rig.file.close()
    cut_short(rig.engine, rig.file.paths[1], CHUNK)
    with pytest.raises(ShortTransfer, match="asked 131072 bytes, got 16384 bytes"):
        StripedFile.attach(rig.run, fields, engine=rig.engine)
    with pytest.raises(StorageError, match="in none of the 2 SSD directories"):
        StripedFile.attach(rig.run, {**fields, "name": "other"}, engine=rig.engine)
    rig.file = StripedFile.create(
        rig.run, name="g", engine=rig.engine, capacity_bytes=CHUNK, chunk_bytes=CHUNK
    )
    for path in fields["name"] + ".0.bin", fields["name"] + ".1.bin":
        for directory in rig.run.paths:
            (pathlib.Path(directory) / path).unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("version", 2),
        ("version", None),
        ("layout", {}),
        ("layout", {"version": 1, "chunk_bytes": 5}),
        ("extents", [[0, 5]]),
        ("extents", [[0, PAGE], [0, PAGE]]),
        ("extents", [[0, 10**12]]),
        ("extents", 7),
        ("checksums", {"version": 1, "algorithm": "md5", "stretches": []}),
        ("checksums", {"version": 1, "algorithm": "crc32c", "stretches": [[0, 8, 1], [4, 8, 1]]}),
        ("checksums", {"version": 9}),
    ],
)
def test_saved_fields_that_make_no_sense_are_refused(rig: Rig, key: str, value: object) -> None:
    fields = {**rig.file.to_json(), key: value}
    with pytest.raises(CheckpointError):
        StripedFile.attach(rig.run, fields, engine=rig.engine)


def test_attaching_with_fewer_directories_is_refused(rig: Rig) -> None:
    fields = rig.file.to_json()
    fields["layout"]["num_drives"] = 3
    with pytest.raises(CheckpointError, match="lies on 3 SSD directories, 2 are given"):
        StripedFile.attach(rig.run, fields, engine=rig.engine)
