"""What a rank says of one that is gone, and by which card it reaches the others."""

import socket
import threading
from typing import Any, cast

import pytest

from lohan.errors import ConfigError
from lohan.parallel import peers as module
from lohan.parallel.launch import card_towards
from lohan.parallel.peers import Peers


class _Store:
    """Where ranks say what has become of them."""

    def __init__(self, said: dict[str, bytes], *, is_cut_off: bool = False) -> None:
        self.said, self.is_cut_off = said, is_cut_off
        self.mended = threading.Event()

    def set(self, key: str, words: str) -> None:
        if self.is_cut_off:
            self.mended.wait()
        self.said[key] = words.encode()

    def check(self, keys: list[str]) -> bool:
        return keys[0] in self.said

    def get(self, key: str) -> bytes:
        return self.said[key]


def lost_by(store: _Store, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(module, "_ROLL_CALL_SECONDS", 0.2)
    peers = Peers()
    peers.num_ranks, peers._ranks, peers._store = 2, [0, 1], cast(Any, store)
    return str(peers._lost("the weights", 7.0, RuntimeError("gloo: closed")))


def test_a_rank_that_has_said_why_it_ends_is_told_with_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = lost_by(_Store({"lohan/ended/1": b"failed with OSError: no"}), monkeypatch)
    assert said.startswith("rank 0 waited 7.0 s for the weights: rank 1 failed with OSError: no")


def test_a_store_behind_a_cut_link_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    store = _Store({}, is_cut_off=True)
    try:
        said = lost_by(store, monkeypatch)
    finally:
        store.mended.set()
    assert said.startswith("rank 0 waited 7.0 s for the weights: rank 1 does not answer")


def test_the_card_is_the_one_by_which_the_others_are_reached() -> None:
    name, address = card_towards("127.0.0.1")
    assert name in {known for _, known in socket.if_nameindex()}
    assert address == "127.0.0.1"
    with pytest.raises(ConfigError, match=r"no\.such\.host\.invalid cannot be reached"):
        card_towards("no.such.host.invalid")
