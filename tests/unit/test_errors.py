"""The exception tree: its shape, the shape of its messages, its way across processes."""

import copy
import errno
import inspect
import multiprocessing
import pickle
import re
from concurrent.futures import ProcessPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lohan import errors
from lohan.errors import LohanError, OutOfSpace, StorageError, nearest_names

KINDS = [
    kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, LohanError)
]


def made(kind: type[LohanError]) -> LohanError:
    return kind("3 of 2 blocks do not fit", why="there is no room", remedy="use fewer blocks")


def test_the_tree_is_the_one_drawn_at_the_top_of_the_file() -> None:
    assert errors.__doc__ is not None
    drawn: dict[str, str] = {}
    ancestors: list[str] = []
    for line in errors.__doc__.splitlines():
        match = re.match(r"^    ( *)([A-Z]\w+)(?: {2,}\S.*)?$", line)
        if match:
            depth = len(match[1]) // 2
            ancestors = [*ancestors[:depth], match[2]]
            drawn[match[2]] = ancestors[depth - 1] if depth else "Exception"
    assert drawn == {kind.__name__: kind.__base__.__name__ for kind in KINDS if kind.__base__}


@pytest.mark.parametrize("kind", KINDS)
def test_a_message_says_what_why_and_what_to_do(kind: type[LohanError]) -> None:
    error = made(kind)
    expected = "3 of 2 blocks do not fit: there is no room. To fix it: use fewer blocks."
    assert str(error) == expected
    assert (error.why, error.remedy) == ("there is no room", "use fewer blocks")
    assert kind.__doc__


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_every_error_pickles_and_copies(kind: type[LohanError], protocol: int) -> None:
    error = made(kind)
    error.add_note("while reading block 3")
    for other in (
        pickle.loads(pickle.dumps(error, protocol)),
        copy.copy(error),
        copy.deepcopy(error),
    ):
        assert type(other) is kind
        assert str(other) == str(error)
        assert vars(other) == vars(error)
        assert other.__notes__ == ["while reading block 3"]


def test_a_storage_error_carries_the_facts_of_its_transfer() -> None:
    error = OutOfSpace(
        "a write failed",
        why="the drive is full",
        remedy="free 4096 bytes",
        path="/ssd/a",
        offset_bytes=0,
        asked_bytes=8192,
        got_bytes=0,
        errno=errno.ENOSPC,
    )
    assert str(error) == (
        f"a write failed [errno {errno.ENOSPC} (No space left on device), file /ssd/a, offset 0, "
        "asked 8192 bytes, got 0 bytes]: the drive is full. To fix it: free 4096 bytes."
    )
    other = pickle.loads(pickle.dumps(error))
    assert isinstance(other, StorageError)
    assert (other.path, other.offset_bytes, other.asked_bytes, other.got_bytes, other.errno) == (
        "/ssd/a",
        0,
        8192,
        0,
        errno.ENOSPC,
    )


def test_an_error_of_another_process_arrives_whole() -> None:
    spawned = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawned) as pool:
        error = pool.submit(OutOfSpace, "full", why="no room", remedy="free some").result()
    assert str(error) == "full: no room. To fix it: free some."


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("paper4090", 'write "paper-4090" or "paper-3090"'),
        ("PAPER-4090", 'write "paper-4090"'),
        ("zzz", 'write one of "paper-4090", "paper-3090", "Box"'),
        ("box", 'write "Box"'),
        ("", 'write one of "paper-4090", "paper-3090", "Box"'),
    ],
)
def test_the_nearest_names_are_offered(word: str, says: str) -> None:
    assert nearest_names(word, ["paper-4090", "paper-3090", "Box"]) == says


def test_without_known_names_nothing_is_offered() -> None:
    assert nearest_names("x", []) == "leave it out"


@given(st.text(), st.lists(st.text(min_size=1), min_size=1))
def test_what_is_offered_is_known(word: str, known: list[str]) -> None:
    assert any(f'"{name}"' in nearest_names(word, known) for name in known)
