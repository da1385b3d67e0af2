"""Which seal a rank goes on from: the one on record, whatever else was prepared."""

import pathlib
from collections.abc import Callable, Iterator

import pytest

from lohan.errors import CheckpointError, RankLost
from lohan.ssd import IoEngine
from lohan.store import Manifest
from lohan.store.seals.commits import (
    name_of_rank,
    read_commit,
    refuse_other_ranks,
    refuse_other_seal,
    settle_prepared,
    write_commit,
)
from support.sealing_workload import LAYOUT, POSITIONS
from support.state_stores import (
    contents,
    created,
    make_directories,
    opened,
    random_tensors,
    update_all,
)


@pytest.fixture
def engine() -> Iterator[IoEngine]:
    engine = IoEngine(is_uring=False)
    yield engine
    engine.close()


def left_between_two_seals(places: list[pathlib.Path], engine: IoEngine) -> list[str]:
    """Two directories of a rank that was killed when it had prepared its second seal."""
    paths: list[str] = []

    def agree(prepare: Callable[[], Manifest]) -> Manifest:
        manifest = prepare()
        paths[:] = manifest.directories
        write_commit(manifest.directories, manifest)
        return manifest

    def stop(prepare: Callable[[], Manifest]) -> Manifest:
        prepare()
        raise RankLost("a rank is gone", why="it was killed", remedy="start again")

    with created(places, LAYOUT, engine) as store:
        store.fill(random_tensors(LAYOUT).items())
        store.seal(step=1, agree=agree)
        update_all(store, 1, POSITIONS)
        with pytest.raises(RankLost):
            store.seal(step=2, agree=stop)
        with pytest.raises(CheckpointError, match="neither be updated nor sealed"):
            store.seal(step=2)
    return paths


@pytest.mark.parametrize("committed", [1, 2])
def test_what_was_prepared_is_taken_if_all_ranks_had_prepared(
    committed: int, tmp_path: pathlib.Path, engine: IoEngine
) -> None:
    places = make_directories(tmp_path, 2)
    paths = left_between_two_seals(places, engine)
    assert read_commit(paths) == 1
    settle_prepared(paths, committed)
    with opened(places, engine) as store:
        assert store.sealed is not None
        assert (store.sealed.seal_number, store.sealed.step) == (committed, committed)
        refuse_other_seal(store.sealed, committed, rank=1)
        with pytest.raises(CheckpointError, match=f"rank 1 has seal {committed} of step"):
            refuse_other_seal(store.sealed, committed + 1, rank=1)
        assert contents(store)
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_record_that_is_missing_or_damaged(tmp_path: pathlib.Path) -> None:
    assert read_commit([str(tmp_path)]) == 0
    (tmp_path / "commit.json").write_text("{}")
    with pytest.raises(CheckpointError, match="is damaged"):
        read_commit([str(tmp_path)])


def test_a_manifest_that_was_being_written_is_removed(tmp_path: pathlib.Path) -> None:
    (tmp_path / "manifest.json.tmp").write_text('{"format": "loh')
    settle_prepared([str(tmp_path)], 3)
    assert not list(tmp_path.iterdir())


def test_directories_say_how_many_ranks_made_a_run(tmp_path: pathlib.Path) -> None:
    for rank in range(2):
        (tmp_path / f"lohan-{name_of_rank('ab', rank, 2)}").mkdir()
    (tmp_path / "lohan-abc").mkdir()
    refuse_other_ranks([tmp_path], "ab", 2)
    refuse_other_ranks([tmp_path], "other", 4)
    for count in (1, 4):
        with pytest.raises(CheckpointError, match="was made by 2 rank"):
            refuse_other_ranks([tmp_path], "ab", count)
    with pytest.raises(CheckpointError, match="was made by 1 rank"):
        refuse_other_ranks([tmp_path], "abc", 2)
