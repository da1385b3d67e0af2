"""The ranks of a run: who this one is, what they tell each other, and what if one is gone.

Built on torch.distributed. Two groups of gloo carry everything through main memory: one is for the
main thread (words: sizes, counts, plans), one for the peer lane (tensors), so that neither can come
between the other's calls. All ranks make the same calls in the same order.

Note "A rank that fails". It writes why to the store that torch.distributed has, and lets its groups
go. Those that wait for it find the connection closed, at once, or their time over; each then looks
into the store for what the others say, and its error names the ranks that failed or are silent.
"""

import contextlib
import datetime
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from lohan.errors import ConfigError, LohanError, RankLost
from lohan.units import MIB

T = TypeVar("T")

# Newer releases of torch have another name for it and warn of the old one.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

TIMEOUT_SECONDS = 600.0
"""How long a rank waits for another one, unless told."""
_LEAST_MEASURED_BYTES, _MOST_MEASURED_BYTES = MIB // 4, 32 * MIB
"""That a rank has after a measurement of the link: more while it takes less than this long."""
_MEASURED_SECONDS = 0.1
_NUM_MEASURED = 3
_ROLL_CALL_SECONDS = 5.0
"""How long the others then have to say what happened to them."""


class Peers:
    """This rank and the others; alone, every call is about this one only."""

    def __init__(self) -> None:
        """Alone. With others: `join`."""
        self.rank, self.num_ranks = 0, 1
        self.num_here, self.place_here = 1, 0
        """Ranks on this machine, and how many of them come before this one."""
        self.sent_bytes = 0
        """What this rank has sent for weights and gradients."""
        self._words: Any = None
        self._tensors: Any = None
        self._store: Any = None
        self._timeout_seconds = TIMEOUT_SECONDS
        self._ranks: list[int] = [0]
        self._has_spoken = self.has_left = False

    @classmethod
    def join(
        cls, process_group: Any = None, *, timeout_seconds: float = TIMEOUT_SECONDS
    ) -> "Peers":
        """The ranks of a process group, or of the default one if there is one. Blocks.

        Raises:
            RankLost: one of them does not come.
        """
        peers = cls()
        if not dist.is_available() or not dist.is_initialized():
            return peers
        group = process_group if process_group is not None else dist.group.WORLD
        ranks = dist.get_process_group_ranks(group)
        if len(ranks) == 1:
            return peers
        peers.rank, peers.num_ranks, peers._ranks = dist.get_rank(group), len(ranks), ranks
        peers._timeout_seconds = timeout_seconds
        peers._store = dist.distributed_c10d._get_default_store()
        peers._store.delete_key(peers._key(peers.rank))  # of an attempt before this one

        def make() -> Any:
            return dist.new_group(
                ranks,
                timeout=datetime.timedelta(seconds=timeout_seconds),
                backend="gloo",
                # Of all processes there may be one group after another; others do not hear of it.
                use_local_synchronization=len(ranks) < dist.get_world_size(),
            )

        peers._words = peers._met("making the group of all ranks", make)
        peers._tensors = peers._met("making the group of all ranks", make)
        hosts = peers.share(socket.gethostname(), what="the names of machines")
        peers.num_here = hosts.count(hosts[peers.rank])
        peers.place_here = hosts[: peers.rank].count(hosts[peers.rank])
        return peers

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that plans and writes for all."""
        return self.rank == 0

    # Words: on the main thread -----------------------------------------------------------------

    def share(self, value: T, *, what: str) -> list[T]:
        """Everybody's value, in the order of ranks."""
        if self.num_ranks == 1:
            return [value]
        found: list[Any] = [None] * self.num_ranks
        self._met(what, lambda: dist.all_gather_object(found, value, group=self._words))
        return found

    def from_first(self, make: Callable[[], T], *, what: str) -> T:
        """What the first rank makes; an error of it is everybody's.

        Raises:
            LohanError: as raised there.
        """
        if self.num_ranks == 1:
            return make()
        made: list[Any] = [None, None]
        if self.is_first:
            try:
                made[0] = make()
            except LohanError as error:
                made[1] = error
        self._met(
            what,
            lambda: dist.broadcast_object_list(made, src=self._ranks[0], group=self._words),
        )
        if made[1] is not None:
            if not self.is_first:
                made[1].add_note("lohan: found on rank 0")
            raise made[1]
        found: T = made[0]
        return found

    def together(self, do: Callable[[], T], *, what: str) -> T:
        """Do something that may fail on one rank only; then it has failed on all. Raises as
        `share_made` does."""
        own: list[T] = []
        self.share_made(lambda: own.append(do()), what=what)
        return own[0]

    def share_made(self, make: Callable[[], T], *, what: str) -> list[T]:
        """What everybody makes, in the order of ranks, unless one cannot.

        Raises:
            Exception: this rank's own.
            LohanError: of the first rank that could not.
        """
        if self.num_ranks == 1:
            return [make()]
        made: T | None = None
        error: Exception | None = None
        told: LohanError | None = None
        try:
            made = make()
        except Exception as raised:
            error = raised
            told = raised if isinstance(raised, LohanError) else self._told(raised)
        found = self.share((made, told), what=what)
        if error is not None:
            raise error
        for rank, (_, failure) in enumerate(found):
            if failure is not None:
                failure.add_note(f"lohan: found on rank {rank}")
                raise failure
        return [one for one, _ in found]  # type: ignore[misc]

    def _told(self, error: Exception) -> RankLost:
        return RankLost(
            f"rank {self.rank} failed with {type(error).__name__}: {error}",
            why="what ranks do together all of them must do",
            remedy="look at that rank's own message",
        )

    def refuse_difference(self, values: Mapping[str, str]) -> None:
        """Refuse ranks of which one has another value of something.

        Raises:
            ConfigError: naming the first rank that differs from the first one, and in what.
        """
        found = self.share(dict(values), what="what all ranks must have alike")
        for rank, other in enumerate(found):
            for what, first in found[0].items():
                if other[what] != first:
                    raise ConfigError(
                        f"rank {rank} has another {what} than rank 0: {other[what]} in place of "
                        f"{first}",
                        why="ranks that take steps together run the same tasks on the same model",
                        remedy="start every rank with the same program, versions, settings and "
                        "data",
                    )

    def broadcast(self, tensor: torch.Tensor, rank: int, *, what: str) -> None:
        """Fill a tensor with what it is on one rank."""
        source = self._ranks[rank]
        self._met(what, lambda: dist.broadcast(tensor, src=source, group=self._words))

    # Tensors: on the peer lane -----------------------------------------------------------------

    def gather(self, whole: torch.Tensor, own: torch.Tensor, *, what: str) -> None:
        """Everybody's tensors, one behind the other. Runs on: the peer lane."""
        self._met(what, lambda: _all_gather(whole, own, group=self._tensors))
        self.sent_bytes += own.nbytes * (self.num_ranks - 1)

    def exchange(self, arrived: torch.Tensor, sent: torch.Tensor, *, what: str) -> None:
        """The r-th of equal parts goes to rank r. Runs on: the peer lane."""
        self._met(what, lambda: dist.all_to_all_single(arrived, sent, group=self._tensors))
        self.sent_bytes += sent.nbytes // self.num_ranks * (self.num_ranks - 1)

    def link_bytes_per_second(self) -> float | None:
        """What a rank gets from the others per second, as measured by all of them; None: alone."""
        if self.num_ranks == 1:
            return None
        nbytes = _LEAST_MEASURED_BYTES
        while nbytes < _MOST_MEASURED_BYTES:
            seconds, _ = self._sent_and_got(nbytes)
            # All ranks have to do the same next.
            if max(self.share(seconds, what="a measurement")) > _MEASURED_SECONDS:
                break
            nbytes *= 4
        measured = [self._sent_and_got(nbytes) for _ in range(_NUM_MEASURED)]
        return max(got_bytes / seconds for seconds, got_bytes in measured)

    def _sent_and_got(self, nbytes: int) -> tuple[float, float]:
        """Seconds that both collectives take together, and the bytes that come."""
        own = torch.zeros(nbytes // self.num_ranks, dtype=torch.uint8, device="cpu")
        whole = own.new_empty(self.num_ranks * own.nbytes)
        arrived = own.new_empty(own.nbytes // self.num_ranks * self.num_ranks)
        sent, what = own[: arrived.nbytes], "a measurement"
        self.share(None, what="the begin of a measurement")
        started = time.perf_counter()
        self._met(what, lambda: _all_gather(whole, own, group=self._words))
        self._met(what, lambda: dist.all_to_all_single(arrived, sent, group=self._words))
        seconds = time.perf_counter() - started
        return seconds, (own.nbytes + arrived.nbytes / self.num_ranks) * (self.num_ranks - 1)

    # Failure -----------------------------------------------------------------------------------

    def tell_failure(self, error: BaseException) -> None:
        """This rank goes no further. Runs on: any thread; only the first time counts."""
        _in_time(lambda: self._speak(f"failed with {type(error).__name__}: {error}"))

    @contextlib.contextmanager
    def told_of_failure(self) -> Iterator[None]:
        """Whatever fails inside ends this rank's part, and the others are told."""
        try:
            yield
        except BaseException as error:
            self.tell_failure(error)
            self.leave()
            raise

    def leave(self) -> None:
        """Let the groups go; those who wait for this rank are told by that. Twice is fine."""
        for group in (self._words, self._tensors):
            if group is not None and dist.is_initialized():
                dist.destroy_process_group(group)
        self._words = self._tensors = None
        self.has_left = self.num_ranks > 1

    def _met(self, what: str, meet: Callable[[], T]) -> T:
        started = time.monotonic()
        try:
            return meet()
        except RuntimeError as error:  # gloo has no other
            raise self._lost(what, time.monotonic() - started, error) from error

    def _lost(self, what: str, seconds: float, error: RuntimeError) -> RankLost:
        said = self._roll_call(f"waited for {what}")
        failed = [f"rank {rank} {words}" for rank, words in said.items() if "failed" in words]
        silent = [rank for rank in range(self.num_ranks) if rank not in said]
        found = failed + [f"rank {rank} does not answer" for rank in silent]
        return RankLost(
            f"rank {self.rank} waited {seconds:.1f} s for {what}: "
            + ("; ".join(found) or f"the connection failed ({str(error).splitlines()[0]})"),
            why="a step needs all ranks; what is sealed is whole on each of them",
            remedy="look at that rank's own message, then start all ranks again: the run goes on "
            "from its last seal",
        )

    def _speak(self, words: str) -> None:
        if self._store is None or self._has_spoken:
            return
        self._has_spoken = True
        self._store.set(self._key(self.rank), words)

    def _roll_call(self, words: str) -> dict[int, str]:
        """What ranks say has become of them, by rank. Blocks until all have, or for some time."""
        said = {self.rank: "is here"}
        deadline = time.monotonic() + _ROLL_CALL_SECONDS

        def ask() -> None:
            self._speak(words)
            # It must have ended when the process does: inside the store, that would abort it.
            while len(said) < self.num_ranks and time.monotonic() < deadline:
                for rank in range(self.num_ranks):
                    if rank not in said and self._store.check([self._key(rank)]):
                        said[rank] = self._store.get(self._key(rank)).decode()
                time.sleep(0.05)

        _in_time(ask)
        return dict(said)

    def _key(self, rank: int) -> str:
        return f"lohan/ended/{self._ranks[rank]}"


def _in_time(ask: Callable[[], None]) -> None:
    """Talk to the store, which may be lost too: with the rank that kept it, or behind a link that
    is cut, where its client waits for minutes and cannot be told not to."""

    def asked() -> None:
        with contextlib.suppress(RuntimeError):
            ask()

    thread = threading.Thread(target=asked, name="lohan ranks asked", daemon=True)
    thread.start()
    thread.join(_ROLL_CALL_SECONDS)


@contextlib.contextmanager
def loss_explained(rank: int, num_ranks: int) -> Iterator[None]:
    """Within it, what libraries raise when another rank is gone is told as such.

    Raises:
        RankLost: in place of a broken connection.
    """
    try:
        yield
    except RuntimeError as error:
        is_connection = isinstance(error, dist.DistError) or "gloo" in str(error)
        if num_ranks == 1 or not is_connection:
            raise
        raise RankLost(
            f"rank {rank} has lost the connection to another one",
            why="all ranks of a run begin and end together",
            remedy="look at the other ranks' messages: one of them says why it ended",
        ) from error


def groups_of(counts: Sequence[int], rank: int, groups: int) -> list[int]:
    """The group of each micro-batch of a rank.

    A step's micro-batches are dealt out like cards: the i-th goes to rank i modulo the ranks, as
    accelerate deals them, and to group i modulo the groups; so a group is of the same rank's ones
    whatever number of ranks divides the groups.

    Args:
        counts: micro-batches that each rank has.

    Raises:
        ConfigError: a rank has more or less than its share of all.
    """
    for number, count in enumerate(counts):
        own = len(range(number, sum(counts), len(counts)))
        if count != own:
            raise ConfigError(
                f"rank {number} has {count} micro-batches, and {own} are its share of the "
                f"{sum(counts)} of the step",
                why="a step's micro-batches are dealt to ranks and reduction groups in turn, so "
                "that sums do not depend on the number of ranks",
                remedy="give every rank equally many, or the first ones one more",
            )
    return [number % groups for number in range(rank, sum(counts), len(counts))]


def in_turn(of_ranks: Sequence[Sequence[T]]) -> list[T]:
    """What ranks have of each micro-batch, in the order in which these were dealt out."""
    most = max(map(len, of_ranks))
    return [own[number] for number in range(most) for own in of_ranks if number < len(own)]
