"""What follows from a batch alone is known in a trace; the judge computes it for real."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lohan.model.tracing import known_values
from lohan.model.tracing.known_values import KnownValues, PythonValues
from lohan.model.tracing.trace_ops import OperatorRecorder

IDS = torch.tensor([[5, 7, 7, 7, 2, 0], [7, 5, 7, 2, 0, 0]])


def traced(work: Callable[..., Any]) -> Any:
    """What work returns for the ids, and for embeddings of which only the shape is known."""
    values, buffer = IDS.clone(), torch.arange(6)
    with FakeTensorMode(allow_non_fake_inputs=True):
        ids, x = torch.empty_like(IDS), torch.empty(2, 6, 4, requires_grad=True)
        position = torch.empty(6, dtype=torch.int64)
        known = KnownValues([(buffer, position)])
        known.note(ids, values)
        with PythonValues(known), OperatorRecorder(set(), set(), known=known):
            return work(ids, x, position)


def real(work: Callable[..., Any]) -> Any:
    return work(IDS.clone(), torch.zeros(2, 6, 4, requires_grad=True), torch.arange(6))


ASKED: dict[str, Callable[..., Any]] = {
    "counts": lambda ids, x, p: int((ids == 7).sum()),
    "lists": lambda ids, x, p: (ids != 0).sum(-1).tolist(),
    "arrays": lambda ids, x, p: np.asarray(ids.numpy()).tolist(),
    "numbers of tensors": lambda ids, x, p: torch.tensor([ids[0, 0], ids.max()]).tolist(),
    "buffers": lambda ids, x, p: p[ids[0] == 7].tolist(),
    "views written to": lambda ids, x, p: (ids[1].fill_(3), ids.sum().item())[1],
    "places": lambda ids, x, p: [len(one) for one in torch.where(ids == 7)],
    "rows of what is not known": lambda ids, x, p: tuple(x[ids == 7].shape),
    "sizes with gradients": lambda ids, x, p: tuple(
        torch.autograd.grad(x.index_put((ids == 7,), x.new_zeros(5, 4)).sum(), x)[0].shape
    ),
}


@pytest.mark.parametrize("name", ASKED)
def test_values_of_the_batch_are_answered(name: str) -> None:
    assert traced(ASKED[name]) == real(ASKED[name])


def test_what_weights_decide_is_not_known() -> None:
    def ask(ids: torch.Tensor, x: torch.Tensor, _: torch.Tensor) -> float:
        return float(x.detach()[0, 0, 0])

    with pytest.raises(Exception, match="_local_scalar_dense"):
        traced(ask)


def test_what_is_overwritten_with_something_unknown_is_unknown() -> None:
    def ask(ids: torch.Tensor, x: torch.Tensor, _: torch.Tensor) -> int:
        row = ids[0]
        row.copy_(x.detach()[0, :, 0])
        return int(ids[1].sum())

    with pytest.raises(Exception, match="_local_scalar_dense"):
        traced(ask)


def test_large_results_are_not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_values, "_MOST_BYTES", 100)
    assert traced(ASKED["lists"]) == real(ASKED["lists"])
    with pytest.raises(Exception, match="_local_scalar_dense"):
        traced(lambda ids, x, p: int(ids.repeat(9, 9).sum()))


def test_values_given_are_left_alone() -> None:
    before = torch.arange(6)
    given = before.clone()
    with FakeTensorMode():
        fake = torch.empty(6, dtype=torch.int64)
        known = KnownValues([(given, fake)])
        with OperatorRecorder(set(), set(), known=known):
            fake.add_(1)
            assert fake.tolist() == [1, 2, 3, 4, 5, 6]
    assert torch.equal(given, before)
