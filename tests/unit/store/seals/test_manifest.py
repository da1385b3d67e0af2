"""What a seal leaves behind, and what is refused when a run is opened again."""

import json
import os
import pathlib
import shutil

import numpy as np
import pytest

from lohan.errors import CheckpointError, Corrupt, ShortTransfer, StorageError
from lohan.ssd import IoEngine, RunDirectories
from lohan.ssd.checksums import checksum_memory
from lohan.store import ComputeFormat, Manifest, Part, StateStoreWarning, find_manifest
from lohan.vocabulary import BlockId
from support.state_stores import (
    RUN_ID,
    MirrorStates,
    contents,
    created,
    make_directories,
    opened,
    random_tensors,
    small_layout,
    update_all,
)


@pytest.fixture
def engine():
    engine = IoEngine(is_uring=False)
    yield engine
    engine.close()


@pytest.fixture
def sealed(tmp_path: pathlib.Path, engine):
    """Three directories with a run sealed at step 1, and what it held."""
    directories = make_directories(tmp_path, 3)
    with created(directories, small_layout(), engine) as store:
        store.fill(random_tensors(small_layout()).items())
        store.seal(step=0, metadata={"note": "first"})
        update_all(store, 1)
        store.seal(step=1, metadata={"note": "second"})
        mirror = MirrorStates(contents(store))
    return directories, mirror


def manifests(directories: list[pathlib.Path]) -> list[pathlib.Path]:
    return [directory / f"lohan-{RUN_ID}" / "manifest.json" for directory in directories]


def with_checksum(fields: dict[str, object]) -> str:
    """A manifest text with any content and a right checksum, made as the format page says."""
    fields.pop("checksum", None)
    text = json.dumps(fields)
    content = np.frombuffer(text.encode(), np.uint8)
    return f'{text[:-1]}, "checksum": {checksum_memory(content.ctypes.data, content.size)}}}\n'


def test_every_directory_has_the_same_manifest_and_it_is_private(sealed) -> None:
    directories, _ = sealed
    texts = {path.read_text() for path in manifests(directories)}
    assert len(texts) == 1
    fields = json.loads(texts.pop())
    assert fields["format"] == "lohan-states"
    assert (fields["version"], fields["step"], fields["seal_number"]) == (1, 1, 2)
    assert fields["metadata"] == {"note": "second"}
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in manifests(directories))
    assert not any(path.with_suffix(".json.tmp").exists() for path in manifests(directories))


def test_a_manifest_survives_its_text(sealed) -> None:
    directories, _ = sealed
    text = manifests(directories)[0].read_text()
    manifest = Manifest.from_text(text)
    assert manifest.to_text() == text
    assert with_checksum(json.loads(text)) == text


def test_an_older_or_missing_or_damaged_copy_is_named_and_written_anew(sealed, engine) -> None:
    directories, mirror = sealed
    paths = manifests(directories)
    whole = paths[0].read_text()
    older = json.loads(whole)
    older["seal_number"], older["step"] = 1, 0
    paths[0].write_text(with_checksum(older))
    paths[1].write_text(whole.replace("second", "SECOND"))
    with pytest.warns(StateStoreWarning) as caught, opened(directories, engine) as store:
        mirror.judge(contents(store))
    message = str(caught[0].message)
    assert f"{paths[0]} is of seal 1" in message
    assert f"{paths[1]} is damaged" in message
    assert str(paths[2]) not in message
    assert {path.read_text() for path in paths} == {whole}
    paths[2].unlink()
    with (
        pytest.warns(StateStoreWarning, match="manifest.json is missing"),
        opened(directories, engine),
    ):
        pass
    assert paths[2].read_text() == whole


def test_without_any_whole_manifest_opening_says_why(sealed, engine) -> None:
    directories, _ = sealed
    paths = manifests(directories)
    paths[0].unlink()
    paths[1].write_bytes(b"\xff\xfe")
    paths[2].write_text("")
    with (
        pytest.raises(CheckpointError, match="no sealed state") as caught,
        opened(directories, engine),
    ):
        pass
    assert all(str(path) in str(caught.value) for path in paths)


def test_a_run_that_was_never_sealed_cannot_be_opened(tmp_path, engine) -> None:
    directories = make_directories(tmp_path, 1)
    with created(directories, small_layout(), engine) as store:
        store.fill(random_tensors(small_layout()).items())
    with pytest.raises(CheckpointError, match="before its first seal"), opened(directories, engine):
        pass


def test_another_runs_manifest_is_refused(sealed, tmp_path, engine) -> None:
    directories, _ = sealed
    paths = manifests(directories)
    whole = paths[0].read_text()
    fields = json.loads(whole)
    paths[1].write_text(with_checksum(fields | {"run_id": "other"}))
    with (
        pytest.raises(CheckpointError, match="is of run 'other', not of 'tests'"),
        opened(directories, engine),
    ):
        pass
    paths[1].write_text(with_checksum(fields | {"store_key": "0" * 32}))
    with (
        pytest.raises(CheckpointError, match="two runs named 'tests'"),
        opened(directories, engine),
    ):
        pass


def test_a_newer_format_is_refused_even_beside_a_known_one(sealed, engine) -> None:
    directories, _ = sealed
    path = manifests(directories)[2]
    path.write_text(with_checksum(json.loads(path.read_text()) | {"version": 2}))
    with (
        pytest.raises(CheckpointError, match=r"manifest\.json: .* has version 2"),
        opened(directories, engine),
    ):
        pass


def test_fields_that_contradict_each_other_are_damage(sealed) -> None:
    directories, _ = sealed
    whole = json.loads(manifests(directories)[0].read_text())

    def damaged(change) -> str:
        fields = json.loads(json.dumps(whole))
        change(fields)
        return with_checksum(fields)

    changes = [
        lambda f: f.update(format="other"),
        lambda f: f["blocks"].pop(),
        lambda f: f["blocks"][0].update(slot=2),
        lambda f: f["blocks"][0]["parts"].pop("M32"),
        lambda f: f["blocks"][0]["parts"]["M32"]["checksums"].append(1),
        lambda f: f["blocks"][0]["parts"]["M32"]["extents"][0].__setitem__(1, 4096 * 9),
        lambda f: f.update(slot_count=3),
        lambda f: f["file"].update(checksum_algorithm="md5"),
        lambda f: f.pop("metadata"),
    ]
    for change in changes:
        with pytest.raises(CheckpointError, match="manifest cannot be read"):
            Manifest.from_text(damaged(change))
    for text in ("", "{}", "[1]", '{"a": 1, "checksum": 1}\n', '{"a": 1, "checksum": x}\n'):
        with pytest.raises(CheckpointError, match="manifest cannot be read"):
            Manifest.from_text(text)


def test_a_directory_that_is_not_given_or_gone_is_named(sealed, engine) -> None:
    directories, _ = sealed
    with (
        pytest.raises(CheckpointError, match=r"missing: .*ssd1/lohan-tests"),
        opened([directories[0], directories[2]], engine),
    ):
        pass
    shutil.rmtree(directories[1])
    with (
        pytest.raises(StorageError, match="a run directory is missing") as caught,
        opened(directories, engine),
    ):
        pass
    assert "ssd1" in str(caught.value.path)
    (directories[1] / f"lohan-{RUN_ID}").mkdir(parents=True)
    with (
        pytest.raises(StorageError, match=r"states\.1\.bin is in none of the 3"),
        opened(directories, engine),
    ):
        pass


def test_directories_may_be_given_in_another_order_and_elsewhere(sealed, tmp_path, engine) -> None:
    directories, mirror = sealed
    moved = tmp_path / "elsewhere"
    directories[0].rename(moved)
    with opened([directories[2], moved, directories[1]], engine) as store:
        mirror.judge(contents(store))


def test_a_flipped_byte_of_any_part_is_found_and_named(sealed, engine) -> None:
    directories, mirror = sealed
    run = RunDirectories.attach(directories, RUN_ID)
    manifest = find_manifest(run.paths, RUN_ID).manifest
    run.close()
    for home in manifest.sealed_homes():
        extent = manifest.extents[home]
        for at in (extent.offset_bytes, extent.offset_bytes + extent.nbytes - 1):
            page = at // 4096 * 4096
            piece = next(manifest.stripe.pieces(page, 4096))
            path = directories[piece.drive] / f"lohan-{RUN_ID}" / f"states.{piece.drive}.bin"
            flip(path, piece.offset_bytes + at % 4096)
            name = manifest.layout.blocks[home[0]].name
            for resident_parts in ({}, {home[0]: [home[2]]}):
                with pytest.raises(Corrupt) as caught, opened(directories, engine, resident_parts):
                    pass
                assert f"{home[2]} of block {home[0]} ({name})" in str(caught.value)
                assert caught.value.path == str(path)
                found_at = caught.value.offset_bytes
                assert found_at <= piece.offset_bytes + at % 4096 < found_at + 4 * 4096
            flip(path, piece.offset_bytes + at % 4096)
    with opened(directories, engine) as store:
        mirror.judge(contents(store))
        extent = manifest.extents[BlockId(0), manifest.slots[0], Part.P16]
        piece = next(manifest.stripe.pieces(extent.offset_bytes, 4096))
        flip(pathlib.Path(store.paths[piece.drive]), piece.offset_bytes)
        with pytest.raises(Corrupt, match="block 0"):
            store.verify()


def flip(path: pathlib.Path, offset_bytes: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset_bytes)
        byte = file.read(1)
        file.seek(offset_bytes)
        file.write(bytes([byte[0] ^ 0x40]))


def test_a_truncated_file_is_refused(sealed, engine) -> None:
    directories, _ = sealed
    path = directories[1] / f"lohan-{RUN_ID}" / "states.1.bin"
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(ShortTransfer) as caught, opened(directories, engine):
        pass
    assert caught.value.path == str(path)


def test_states_of_another_model_are_refused(sealed, engine) -> None:
    directories, _ = sealed
    with (
        pytest.raises(CheckpointError, match="do not fit the model"),
        opened(directories, engine, layout=small_layout(ComputeFormat.FP16)),
    ):
        pass
    with opened(directories, engine, layout=small_layout()):
        pass


def test_a_seal_makes_everything_durable_in_the_right_order(
    tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directories = make_directories(tmp_path, 2)
    events: list[str] = []
    inner = IoEngine(is_uring=False)

    class NotingEngine:
        def __getattr__(self, name: str):
            return getattr(inner, name)

        def start_write(self, file, *arguments):
            events.append(f"write {os.path.basename(file.path)}")
            return inner.start_write(file, *arguments)

        def start_flush(self, file):
            events.append(f"flush {os.path.basename(file.path)}")
            return inner.start_flush(file)

    def note(name: str) -> None:
        call = getattr(os, name)

        def noted(*arguments):
            target = arguments[-1] if name == "replace" else arguments[0]
            path = os.readlink(f"/proc/self/fd/{target}") if name != "replace" else target
            events.append(f"{name} {os.path.relpath(path, tmp_path)}")
            return call(*arguments)

        monkeypatch.setattr(os, name, noted)

    layout = small_layout()
    with created(directories, layout, NotingEngine(), {BlockId(0): [Part.P16]}) as store:
        store.fill(random_tensors(layout).items())
        events.clear()
        for name in ("write", "fsync", "replace"):
            note(name)
        store.seal(step=0)
        monkeypatch.undo()
    inner.close()
    assert {"write states.0.bin", "write states.1.bin"} >= set(events[:-12]) != set()
    assert events[-12:] == [
        "flush states.0.bin",
        "flush states.1.bin",
        "fsync ssd0",
        "fsync ssd1",
        "write ssd0/lohan-tests/manifest.json.tmp",
        "fsync ssd0/lohan-tests/manifest.json.tmp",
        "write ssd1/lohan-tests/manifest.json.tmp",
        "fsync ssd1/lohan-tests/manifest.json.tmp",
        "replace ssd0/lohan-tests/manifest.json",
        "fsync ssd0/lohan-tests",
        "replace ssd1/lohan-tests/manifest.json",
        "fsync ssd1/lohan-tests",
    ]


def test_a_manifest_that_cannot_be_read_is_named(sealed, engine) -> None:
    directories, _ = sealed
    path = manifests(directories)[1]
    path.unlink()
    path.mkdir()
    with (
        pytest.raises(StorageError, match="a manifest could not be read") as caught,
        opened(directories, engine),
    ):
        pass
    assert caught.value.path == str(path)
