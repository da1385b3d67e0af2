"""What ranks agree on: before a run, before every step, and at a seal.

Owns how a step is dealt to ranks and reduction groups (what must be known of all its micro-batches,
wherever they are: how many, how large, what their labels weigh, from where random numbers are
drawn), what must be the same on all ranks, and when a seal counts. One rank alone asks only itself.
Called by `attach` and the engine, on the main thread.
"""

import contextlib
import hashlib
import os
import platform
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from importlib.metadata import version
from typing import Any, TypeVar

import torch

from lohan.drive.hooks import StepGroups
from lohan.drive.surroundings.randomness import Generators, RandomState
from lohan.engine.loss import Labels, loss_weights
from lohan.engine.options import FirstStates, Options
from lohan.engine.planning.traced_model import BatchSizes, TracedModel, sizes_of
from lohan.engine.results import sealed_counters
from lohan.engine.run_setup import RunSetup
from lohan.errors import ConfigError, LohanError, RankLost, StorageError
from lohan.optimizer import AdamWSettings
from lohan.optimizer.torch_optimizer import AdamW
from lohan.parallel.peers import Peers, groups_of, in_turn
from lohan.ssd import RunDirectories, check_directories
from lohan.ssd.runs.run_directory import PREFIX
from lohan.store import Manifest, StateLayout, find_manifest
from lohan.store.seals.commits import name_of_rank, refuse_other_ranks, write_commit
from lohan.store.seals.sealing import Agree

T = TypeVar("T")

# A run -----------------------------------------------------------------------------------------


def reduction_groups_of(options: Options, first: FirstStates, peers: Peers) -> int:
    """How many groups gradients are added in: as the run has it, as asked for, or one per rank.

    Raises:
        ConfigError: ranks cannot have equally many, or the run has another number.
    """
    sealed = first.counters
    if first.run is not None:
        name = name_of_rank(first.run, peers.rank, peers.num_ranks)
        with contextlib.suppress(LohanError):  # told when the run is opened
            places = [os.path.join(parent, f"{PREFIX}{name}") for parent in options.ssd]
            sealed = sealed_counters(find_manifest(places, name).manifest) or {}
    known = sealed.get("reduction_groups", 1) if sealed is not None else None
    groups = known or peers.num_ranks
    if options.reduction_groups is not None:
        groups = options.reduction_groups
    if groups < 1:
        raise ConfigError(
            f"reduction_groups is {groups}",
            why="micro-batches are dealt to at least one",
            remedy="leave it out, or give 1 or more",
        )
    if known is not None and groups != known:
        raise ConfigError(
            f"reduction_groups is {groups}, and the run has {known}",
            why="sums of gradients depend on the number of groups",
            remedy="leave it out: a run goes on with its own",
        )
    if groups % peers.num_ranks:
        raise ConfigError(
            f"{peers.num_ranks} ranks cannot share {groups} reduction group(s) evenly",
            why="every rank adds up equally many",
            remedy="start a number of ranks that divides the groups, or begin a run with "
            "reduction_groups= set to a multiple of the ranks",
        )
    return groups


def least_budgets(options: Options, peers: Peers) -> tuple[int, int | None]:
    """RAM and GPU memory that every rank has: one plan is for all.

    Raises:
        ConfigError: something was asked for that ranks do not do.
    """
    assert options.ram_bytes is not None
    if peers.num_ranks == 1:
        return options.ram_bytes, options.gpu_bytes
    if options.write_limit is not None:
        raise ConfigError(
            f"a write limit was given to {peers.num_ranks} ranks",
            why="what each of them writes is not counted together",
            remedy="leave the limit out, or train with one rank",
        )
    told = peers.share((options.ram_bytes, options.gpu_bytes), what="the memory of all ranks")
    gpus = [gpu_bytes for _, gpu_bytes in told if gpu_bytes is not None]
    return min(ram_bytes for ram_bytes, _ in told), min(gpus, default=None)


def refuse_unlike_ranks(
    whole: StateLayout,
    options: Options,
    optimizer: AdamW,
    traced: TracedModel,
    peers: Peers,
    groups: int,
) -> None:
    """Refuse ranks that would not train the same model in the same way, before they write.

    Raises:
        ConfigError: naming the rank and what differs; or a model that ranks cannot train.
    """
    blocks = [(one.label, one.segment.num_calls) for one in traced.stretches]
    rates = [repr(rates) for rates in optimizer.rates()]
    known = {
        "versions": f"torch {torch.__version__}, lohan {version('lohan')}, Python "
        f"{platform.python_version()}",
        "model": _digest((whole.to_json(), blocks)),
        "settings": _digest((rates, optimizer.max_grad_norm)),
        "options": f"nonfinite={options.nonfinite} slots={options.num_slots} groups={groups}",
    }
    peers.refuse_difference(known)
    if peers.num_ranks > 1 and traced.changed_buffers:
        raise _buffer_changes(peers, traced.changed_buffers[0])


def _digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


def _buffer_changes(peers: Peers, name: str) -> ConfigError:
    return ConfigError(
        f"a step on {peers.num_ranks} ranks changes the buffer {name}",
        why="each rank changes its own by its own micro-batches, and results would depend on "
        "their number",
        remedy="train with one rank, or put such modules into evaluation mode",
    )


def open_run(
    ssd: Sequence[str | os.PathLike[str]], run: str | None, peers: Peers
) -> tuple[RunDirectories, str, bool]:
    """This rank's directories of a new run, or of one to go on with; and the run's id.

    Raises:
        CheckpointError: the run was made by another number of ranks.
    """
    run_id = run or peers.from_first(lambda: secrets.token_hex(4), what="the id of the run")

    def enter() -> RunDirectories:
        check_directories(ssd)
        name = name_of_rank(run_id, peers.rank, peers.num_ranks)
        if run is None:
            return RunDirectories.create(ssd, name)
        refuse_other_ranks(ssd, run_id, peers.num_ranks)
        return RunDirectories.attach(ssd, name)

    return peers.together(enter, what="the directories of all ranks"), run_id, run is None


def agreement(peers: Peers, directories: RunDirectories) -> Agree | None:
    """How ranks seal: when all have prepared, the first one puts it on record. None: alone."""
    if peers.num_ranks == 1:
        return None

    def agree(prepare: Callable[[], Manifest]) -> Manifest:
        def prepare_here() -> Manifest:
            manifest = prepare()
            directories.sync()
            return manifest

        manifest = peers.together(prepare_here, what="the seals of all ranks")

        def commit() -> None:
            if peers.is_first:
                write_commit(directories.paths, manifest)

        try:
            peers.together(commit, what="the record of a seal")
        except StorageError as error:
            raise RankLost(error.what, why=error.why, remedy=error.remedy) from error
        return manifest

    return agree


# A step ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class DealtStep:
    """One rank's part of a step."""

    sizes: BatchSizes
    """That cover the micro-batches of every rank."""
    shares: list[float]
    """What the losses of its micro-batches are multiplied by."""
    order: list[int]
    """Which of the micro-batches it was given each one is: those of a group run together."""
    groups: StepGroups

    def as_given(self, losses: Sequence[T]) -> list[T]:
        """Put in the order in which micro-batches were given."""
        places = {given: place for place, given in enumerate(self.order)}
        return [losses[places[given]] for given in range(len(losses))]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Words:
    """What a rank tells of its part of a step."""

    num_steps: int
    sizes: BatchSizes | None
    labels: list[Labels]
    weights: list[float] | None
    settings: str
    random_state: RandomState | None


def deal_step(
    setup: RunSetup,
    batches: Callable[[], list[Any]],
    weights: Sequence[float] | None,
    *,
    num_steps: int,
    rates: Callable[[], Sequence[AdamWSettings]],
    counts_first_label: Callable[[Any], bool | None],
) -> tuple[list[Any], DealtStep]:
    """This rank's micro-batches on its device, and how they count. Blocks: until all ranks have
    come to this step.

    Args:
        batches: makes them; what it raises, it raises on all ranks.
        weights: of this rank's losses, if they are given.
        num_steps: steps taken so far.

    Raises:
        ConfigError: bad input, or ranks that are not at the same step with the same settings.
    """
    own: list[Any] = []
    peers, generators = setup.peers, Generators([setup.device.torch_device])

    def words() -> _Words:
        own.extend(batches())
        return _Words(
            num_steps=num_steps,
            sizes=sizes_of(own) if own else None,
            labels=[Labels.of(batch) for batch in own],
            weights=None if weights is None else _checked(own, weights),
            settings=repr(list(rates())),
            random_state=generators.state() if peers.num_ranks > 1 and peers.is_first else None,
        )

    told = peers.share_made(words, what="the micro-batches of a step")
    for rank, one in enumerate(told):
        _refuse_other(rank, "number of steps", one.num_steps, told[0].num_steps)
        _refuse_other(rank, "settings of its optimizer", one.settings, told[0].settings)
        has_weights = (one.weights is not None, told[0].weights is not None)
        _refuse_other(rank, "choice whether losses have weights", *has_weights)
    counts = [len(one.labels) for one in told]
    groups = groups_of(counts, peers.rank, setup.reduction_groups)
    if told[0].weights is not None:
        shares = in_turn([one.weights or [] for one in told])
    else:

        def asked() -> bool | None:
            # Every rank has to know, and one that has no batch can be told.
            return peers.from_first(lambda: counts_first_label(own[0]), what="which labels count")

        labels = in_turn([one.labels for one in told])
        shares = loss_weights(labels, None, counts_first_label=asked)
    if told[0].random_state is not None:
        generators.set_state(told[0].random_state)
    order = sorted(range(len(own)), key=lambda number: groups[number])
    return [own[number] for number in order], DealtStep(
        sizes=_covering([one.sizes for one in told if one.sizes is not None]),
        shares=[shares[peers.rank + number * peers.num_ranks] for number in order],
        order=order,
        groups=StepGroups(
            of=tuple(sorted(groups)),
            first=peers.rank,
            every=peers.num_ranks,
            count=setup.reduction_groups // peers.num_ranks,
            step=num_steps + 1,
        ),
    )


@contextlib.contextmanager
def buffers_unchanged(setup: RunSetup) -> Iterator[None]:
    """Refuse a model whose step changes its buffers (running means), among ranks: each would see
    its own micro-batches only.

    Raises:
        ConfigError: naming the first one.
    """
    if setup.peers.num_ranks == 1:
        yield
        return
    before = _buffer_versions(setup.model)
    yield
    for name, now in _buffer_versions(setup.model).items():
        if before.get(name) != now:
            raise _buffer_changes(setup.peers, name)


def _buffer_versions(model: torch.nn.Module) -> dict[str, tuple[int, int]]:
    return {name: (id(one), one._version) for name, one in model.named_buffers()}


def covering_sizes(setup: RunSetup, batches: Sequence[Any]) -> BatchSizes:
    """Sizes that cover what every rank has now. Blocks: until all have told."""
    found = setup.peers.share(sizes_of(batches) if batches else None, what="the sizes of batches")
    return _covering([one for one in found if one is not None])


def _covering(sizes: Sequence[BatchSizes]) -> BatchSizes:
    def both(one: BatchSizes, other: BatchSizes) -> BatchSizes:
        return BatchSizes(
            num_micro_batches=max(one.num_micro_batches, other.num_micro_batches),
            micro_batch=max(one.micro_batch, other.micro_batch),
            sequence=max(one.sequence, other.sequence),
            is_padded=one.is_padded or other.is_padded,
        )

    return reduce(both, sizes)


def _checked(batches: Sequence[Any], weights: Sequence[float]) -> list[float]:
    labels = [Labels.of(batch) for batch in batches]
    return loss_weights(labels, weights, counts_first_label=lambda: None)


def _refuse_other(rank: int, what: str, found: object, expected: object) -> None:
    if found != expected:
        raise ConfigError(
            f"rank {rank} has another {what} than rank 0: {found} in place of {expected}",
            why="ranks take every step together",
            remedy="give every rank the same schedule of steps, rates and weights",
        )
