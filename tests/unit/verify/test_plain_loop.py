"""The judge against PyTorch's own optimizer: the same training, up to fp32 rounding."""

import pytest
import torch

import lohan
from lohan.store import StateLayout, TensorEntry
from lohan.verify.plain_loop import loss_shares, train_in_memory


class Scaled(torch.nn.Module):
    """A loss in two tensors, one of which is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(-1, 1, 12).view(3, 4).bfloat16())
        self.fixed = torch.nn.Parameter(torch.ones(4).bfloat16(), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ((x @ self.weight.t() * self.fixed[:3]) ** 2).float().mean()


def layout_of(model: torch.nn.Module) -> StateLayout:
    entries = tuple(
        TensorEntry(name=name, shape=tuple(p.shape), is_trainable=p.requires_grad)
        for name, p in model.named_parameters()
    )
    return StateLayout.pack({"block": entries})


@pytest.mark.parametrize("max_grad_norm", [None, 0.1])
def test_training_is_that_of_torch_up_to_rounding(max_grad_norm: float | None) -> None:
    model, twin = Scaled(), Scaled()
    steps = [
        [{"x": torch.randn(2, 4, generator=torch.Generator().manual_seed(n)).bfloat16()}]
        for n in range(4)
    ]
    optimizer = lohan.AdamW([model.weight], lr=0.01, max_grad_norm=max_grad_norm)
    run = train_in_memory(model, optimizer, steps, layout=layout_of(model), loss_fn=None)
    master = torch.nn.Parameter(twin.weight.detach().float())
    judge = torch.optim.AdamW([master], lr=0.01)
    for batches, outcome in zip(steps, run.steps, strict=True):
        loss = twin(**batches[0])
        twin.weight.grad = None
        loss.backward()
        assert outcome.losses == (float(loss.detach()),)
        master.grad = twin.weight.grad.float()
        if max_grad_norm is not None:
            norm = torch.nn.utils.clip_grad_norm_([master], max_grad_norm)
            assert outcome.grad_norm == pytest.approx(float(norm), rel=1e-6)
        judge.step()
        twin.weight.data.copy_(master.data)
    last = run.states[4]["weight"]
    torch.testing.assert_close(last.master, master.data, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(last.first_moment, judge.state[master]["exp_avg"])
    torch.testing.assert_close(last.second_moment, judge.state[master]["exp_avg_sq"])
    assert set(run.states[4]) == {"weight"}
    assert not torch.equal(run.states[3]["weight"].master, last.master)


@pytest.mark.parametrize("num_shifted", [0, 1])
def test_micro_batches_weigh_as_the_concatenated_batch_says(num_shifted: int) -> None:
    table = torch.randn(6, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def loss_fn(_: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        logits, labels = table[batch["x"]], batch["labels"][:, num_shifted:]
        return torch.nn.functional.cross_entropy(
            logits[:, : labels.shape[1]].flatten(0, 1), labels.flatten()
        )

    few = {"x": torch.tensor([[0, 1, 2, 3]]), "labels": torch.tensor([[1, 2, -100, -100]])}
    many = {"x": torch.tensor([[5, 4, 2, 0]]), "labels": torch.tensor([[1, 2, 3, 4]])}
    shares = loss_shares(Scaled(), [few, many], loss_fn)
    assert shares == ([1 / 4, 3 / 4] if num_shifted else [2 / 6, 4 / 6])
    whole = loss_fn(Scaled(), {key: torch.cat([few[key], many[key]]) for key in few})
    parts = [share * loss_fn(Scaled(), one) for share, one in zip(shares, (few, many), strict=True)]
    torch.testing.assert_close(torch.stack(parts).sum(), whole)


def test_without_labels_micro_batches_weigh_alike() -> None:
    assert loss_shares(Scaled(), [{"x": 1}, {"x": 2}], None) == [0.5, 0.5]


def test_finding_out_about_labels_leaves_no_trace_in_the_model() -> None:
    class Counting(torch.nn.Module):
        num_calls = 0

        def forward(self, labels: torch.Tensor) -> torch.Tensor:
            if not self.num_calls:  # BigBird changes its kind of attention so
                self.drop = torch.nn.Dropout()
                self.drop.train(self.training)
            self.num_calls += 1
            return labels.float().mean()

    model = Counting()
    rows = [[1, 2, 3], [1, 2, -100]]
    loss_shares(model, [{"labels": torch.tensor([row])} for row in rows], None)
    assert model.num_calls == 0
    assert not list(model.children())


def test_no_row_is_tried_without_any_label() -> None:
    def loss_fn(_: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        labels = batch["labels"]
        assert (labels != -100).any(dim=1).all()  # mBART looks for the last one of each row
        return torch.nn.functional.cross_entropy(torch.eye(4)[:3], labels[0])

    batches = [{"labels": torch.tensor([[1, 2, 3]])}, {"labels": torch.tensor([[1, -100, -100]])}]
    assert loss_shares(Scaled(), batches, loss_fn) == [3 / 4, 1 / 4]
