"""Draws that were seen once are repeated exactly, without the tensors."""

from collections.abc import Callable

import pytest
import torch

from lohan.drive.surroundings.randomness import (
    Draw,
    DrawLedger,
    DrawRecorder,
    Generators,
    same_state,
    signature_of,
)

DRAWS: dict[str, Callable[[], object]] = {
    "dropout": lambda: torch.nn.functional.dropout(torch.ones(7, 5), 0.3),
    "dropout of nothing": lambda: torch.nn.functional.dropout(torch.ones(7, 5), 0.0),
    "alpha dropout": lambda: torch.nn.functional.alpha_dropout(torch.ones(9), 0.2, training=True),
    "feature dropout": lambda: torch.nn.functional.dropout2d(torch.ones(2, 3, 4, 4), 0.5),
    "rand": lambda: torch.rand(3, 3),
    "rand_like of a view": lambda: torch.rand_like(torch.ones(6, 4).t()),
    "randn": lambda: torch.randn(17),
    "odd randn": lambda: torch.randn(1),
    "randint": lambda: torch.randint(0, 9, (5,)),
    "randperm": lambda: torch.randperm(11),
    "normal_": lambda: torch.empty(5).normal_(2.0, 3.0),
    "uniform_": lambda: torch.empty(4, dtype=torch.bfloat16).uniform_(),
    "exponential_": lambda: torch.empty(4).exponential_(),
    "attention": lambda: torch.nn.functional.scaled_dot_product_attention(
        torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4), dropout_p=0.5
    ),
}


@pytest.mark.parametrize("name", DRAWS)
def test_advancing_by_recorded_draws_equals_drawing(name: str) -> None:
    generators, ledger = Generators([torch.device("cpu")]), DrawLedger()
    torch.manual_seed(3)
    start = generators.state()
    draws: list[Draw | None] = []
    with DrawRecorder(draws):
        DRAWS[name]()
    after = generators.state()
    ledger.learn("shape", draws)
    generators.set_state(start)
    ledger.advance("shape")
    assert same_state(generators.state(), after)


def test_draws_that_depend_on_values_are_not_learned() -> None:
    ledger, draws = DrawLedger(), []
    with DrawRecorder(draws):
        torch.multinomial(torch.ones(5), 2)
        torch.bernoulli(torch.full((3,), 0.5))
        torch.nn.functional.rrelu(-torch.ones(6), training=True)
    assert draws == [None, None, None]
    ledger.learn("shape", draws)
    state = torch.get_rng_state()
    ledger.advance("shape")
    assert torch.equal(torch.get_rng_state(), state)


def test_draws_from_a_generator_of_the_model_s_own_are_left_alone() -> None:
    draws: list[Draw | None] = []
    with DrawRecorder(draws):
        torch.rand(3, generator=torch.Generator())
    assert draws == []


def test_signatures_tell_shapes_types_and_settings_apart() -> None:
    base = {"x": torch.zeros(2, 3), "n": 1}
    assert signature_of(base, True) == signature_of({"x": torch.ones(2, 3), "n": 1}, True)
    for other, training in [
        ({"x": torch.zeros(3, 2), "n": 1}, True),
        ({"x": torch.zeros(2, 3, dtype=torch.float64), "n": 1}, True),
        ({"x": torch.zeros(2, 3), "n": 2}, True),
        ({"y": torch.zeros(2, 3), "n": 1}, True),
        (base, False),
    ]:
        assert signature_of(other, training) != signature_of(base, True)
