"""`lohan plan --machines`, `lohan train --machines`, and errors of ranks that ended."""

from types import SimpleNamespace

import pytest

from lohan.cli.reading.request import as_ranks, parse_network, request_of
from lohan.errors import ConfigError, RankLost
from lohan.parallel.launch import launch_ranks
from lohan.parallel.peers import loss_explained
from lohan.simulate.answers.answer import Request
from lohan.train.settings.arguments import refuse_unsupported


def asked(policy: str = "lohan+", batch: int = 8) -> Request:
    return request_of(
        model="gpt-6b",
        machine="paper-4090",
        batch=batch,
        seq=None,
        ram=None,
        gpu=None,
        ssds=None,
        gpus=2,
        policy=policy,
        clip=None,
    )


def test_machines_are_planned_as_one_of_their_ranks_sees_them() -> None:
    whole = asked()
    rank = as_ranks(whole, 2, "10Gbit/s")
    assert (rank.workload.batch, rank.workload.num_ranks) == (2, 4)
    assert rank.workload.reduction_groups == 4
    assert rank.workload.num_tokens == whole.workload.num_tokens
    assert rank.machine.peer_bytes_per_second == 1.25e9 / 2
    assert rank.machine.ram_bytes == whole.machine.ram_bytes // 2


def test_ranks_hold_all_states_once() -> None:
    whole, rank = asked(), as_ranks(asked(), 2, "10Gbit/s")

    def stored(request: Request) -> int:
        plan = request.policy.plan(request.machine, request.shape, request.workload)
        resident = sum(
            line.nbytes for line in plan.ledger.lines if line.purpose == "resident states"
        )
        slots = [line for line in plan.ledger.lines if line.purpose == "states in two slots"]
        return resident + sum(line.nbytes for line in slots) // 2

    assert 4 * stored(rank) == pytest.approx(stored(whole), rel=1e-3)


@pytest.mark.parametrize(
    ("text", "expected"), [("10Gbit/s", 1.25e9), ("100 Mbit/s", 12.5e6), ("3GB/s", 3e9)]
)
def test_networks_are_said_in_bits_or_bytes(text: str, expected: float) -> None:
    assert parse_network(text) == expected


def test_what_cannot_be_planned_for_machines_is_refused() -> None:
    with pytest.raises(ConfigError, match="no network"):
        as_ranks(asked(), 2, None)
    with pytest.raises(ConfigError, match="--machines was asked of lohan"):
        as_ranks(asked("lohan"), 2, "10Gbit/s")
    with pytest.raises(ConfigError, match="does not divide over 4 GPUs"):
        as_ranks(asked(batch=6), 2, "10Gbit/s")
    with pytest.raises(ConfigError, match="is not a rate"):
        parse_network("fast")


def test_machines_need_a_place_to_meet() -> None:
    with pytest.raises(ConfigError, match="2 machines were asked for, and no place"):
        launch_ranks(1, num_machines=2)


def test_a_broken_connection_is_told_as_a_lost_rank() -> None:
    with pytest.raises(RankLost, match="rank 1 has lost"), loss_explained(1, 2):
        raise RuntimeError("[gloo/transport] Connection closed by peer")
    with pytest.raises(RuntimeError, match="gloo"), loss_explained(0, 1):
        raise RuntimeError("gloo")


def test_tokens_weigh_the_same_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lohan.train.settings.arguments.refuse_impossible", lambda _: None)
    args = SimpleNamespace(optim="adamw_torch", world_size=2, average_tokens_across_devices=False)
    with pytest.raises(ConfigError, match="average_tokens_across_devices is off, and 2 processes"):
        refuse_unsupported(args)
