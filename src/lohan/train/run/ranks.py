"""Several processes that train one model with a trainer: who writes, who goes along.

Owns what a trainer asks of the other ranks besides steps. Files in OUT are the first rank's; what
one rank is told (a signal) or finds (an error) holds for all. Mixed into the trainers by `saving`.
"""

import contextlib
import datetime
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch.distributed as dist

from lohan.parallel.peers import Peers

T = TypeVar("T")
# For the type checker: a mixin has whatever the trainer it is put before has.
_SomeTrainer: Any = object


class RanksMixin(_SomeTrainer):  # type: ignore[misc]
    """The other ranks, for `SavingMixin`."""

    _peers: Peers | None = None
    _written_elsewhere_bytes = 0
    """By other ranks of this run, as they last told."""

    @functools.cached_property
    def is_first(self) -> bool:
        """Whether this process writes files and speaks to people."""
        return bool(self.args.process_index == 0)

    @property
    def peers(self) -> Peers:
        """The ranks of this run. An engine that is closed lets them go: they then meet anew."""
        if self._peers is None or self._peers.has_left:
            alone = self.args.world_size == 1
            timeout_seconds = float(self.args.ddp_timeout)
            self._peers = Peers() if alone else Peers.join(timeout_seconds=timeout_seconds)
            if not alone:
                # TRL gathers figures by the default group, which on a CPU was made without it.
                timeout = datetime.timedelta(seconds=timeout_seconds)
                dist.distributed_c10d._set_pg_timeout(timeout)
        return self._peers

    def by_first(self, do: Callable[[], T], what: str) -> T:
        """Done by the first rank only; result and errors are everybody's. All have to call it."""
        return self.peers.from_first(do, what=what)

    @contextlib.contextmanager
    def told_of_failure(self) -> Iterator[None]:
        """What fails inside ends all ranks, with the name of this one."""
        try:
            yield
        except BaseException as error:
            if self._peers is not None:
                self._peers.tell_failure(error)
                self._peers.leave()
            raise

    def refuse_unlike_ranks(self) -> None:
        """Refuse ranks with other rows or arguments than the first one.

        Raises:
            ConfigError: naming the rank.
        """
        arguments = {name: str(one) for name, one in self._comparable_arguments().items()}
        order = "order or content of its rows"
        self.peers.refuse_difference({order: str(self.data_hash), **arguments})

    def agree_to_stop(self) -> None:
        """A signal that one rank got is everybody's: they end after the same step."""
        if self.args.world_size > 1:
            number = self.stop_request.signal_number
            found = self.peers.share(number, what="whether to stop")
            self.stop_request.signal_number = next((n for n in found if n is not None), None)

    def count_written(self, *, is_sealing: bool = False) -> None:
        """Know what the other ranks have written so far, or will have with a seal. All have to
        call it."""
        nbytes = self.engine.written_bytes + (self.engine.due_bytes if is_sealing else 0)
        found = self.peers.share(nbytes, what="what was written")
        self._written_elsewhere_bytes = sum(found) - found[self.peers.rank]


def go_along(streamed: Iterable[Any]) -> None:
    """Take part in what the first rank asks all for, one tensor at a time, and keep nothing."""
    for _ in streamed:
        pass
