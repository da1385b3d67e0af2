"""Models that each do one hard thing, driven block by block, against plain PyTorch."""

from typing import Any

import pytest
import torch

from lohan.drive import Phase, SegmentedModel
from lohan.drive.activations.store import BlockChoices
from lohan.verify.plain_loop import losses_and_gradients
from support.driven_toys import EVERYTHING
from support.driving_hooks import (
    ComeAndGo,
    assert_same_gradients,
    gather,
    same_bits,
    step_with_known_draws,
    twin,
)
from support.keep_store import KeepStore
from support.mapped_segments import map_segments, observe_rest_uses
from support.toy_models import TOYS, Toy, ToyBlock, toy_batches

RUNS = [["blocks.0", "blocks.1", "blocks.2"]]


def drive(model: torch.nn.Module) -> tuple[SegmentedModel, ComeAndGo, KeepStore]:
    observed = twin(model)
    batch = toy_batches(1)[0]
    uses = observe_rest_uses(observed, RUNS, lambda: observed(**batch))
    segments = map_segments(model, RUNS, uses)
    sets = segments.parameter_sets(model)
    hooks, store = ComeAndGo(segments, sets), KeepStore()
    return SegmentedModel(model, segments, sets=sets, hooks=hooks, store=store), hooks, store


def make(name: str) -> Toy:
    torch.manual_seed(11)
    return TOYS[name]().train()


def everything_stored(driven: SegmentedModel) -> dict[Any, BlockChoices]:
    return {block.id: EVERYTHING for block in driven.segments.blocks}


@pytest.mark.parametrize("stored", ["nothing", "everything"])
@pytest.mark.parametrize("num_micro_batches", [1, 3])
@pytest.mark.parametrize("name", TOYS)
def test_hard_models_equal_plain_training(name: str, num_micro_batches: int, stored: str) -> None:
    model = make(name)
    plain = twin(model)
    driven, hooks, store = drive(model)
    batches = toy_batches(num_micro_batches)
    choices = everything_stored(driven) if stored == "everything" else {}
    for step in range(2):
        torch.manual_seed(step)
        expected_losses, expected = losses_and_gradients(plain, batches)
        expected_state = torch.get_rng_state()
        torch.manual_seed(step)
        hooks.gradients.clear()
        losses = step_with_known_draws(driven, batches, choices=choices)
        assert all(map(same_bits, losses, expected_losses))
        assert_same_gradients(hooks.gradients, expected)
        assert torch.equal(torch.get_rng_state(), expected_state)
        for (_, own), (_, other) in zip(model.named_buffers(), plain.named_buffers(), strict=True):
            assert same_bits(own, other)
        assert len(store) == 0


def test_parameters_without_a_gradient_are_reported_as_missing() -> None:
    driven, hooks, _ = drive(make("frozen parameters"))
    driven.step(toy_batches(2))
    assert hooks.missing == {"unused", "blocks.2.idle.weight", "blocks.2.idle.bias"}


def test_every_block_is_visited_once_forward_and_once_backward() -> None:
    driven, hooks, _ = drive(make("plain"))
    driven.step(toy_batches(4))
    blocks = RUNS[0]
    assert hooks.visits == [
        ("embedding", Phase.FORWARD),
        *((name, Phase.FORWARD) for name in blocks),
        ("head", Phase.TURN),
        *((name, Phase.BACKWARD) for name in reversed(blocks)),
        ("embedding", Phase.BACKWARD),
    ]


def test_segments_before_the_first_trainable_parameter_have_no_backward() -> None:
    driven, hooks, _ = drive(make("frozen parameters"))
    driven.model.unused.requires_grad_(False)
    driven.step(toy_batches(2))
    backward = [name for name, phase in hooks.visits if phase is Phase.BACKWARD]
    assert backward == ["blocks.2", "blocks.1"]


def test_evaluate_gives_the_losses_of_the_plain_model() -> None:
    model = make("plain")
    plain = twin(model)
    driven, hooks, _ = drive(model)
    with torch.no_grad():
        expected = [plain(**batch)[0] for batch in toy_batches(3)]
    losses = driven.evaluate(toy_batches(3))
    assert all(map(same_bits, losses, expected))
    assert not any(loss.requires_grad for loss in losses)
    assert {phase for _, phase in hooks.visits} == {Phase.FORWARD}
    assert not hooks.gradients


def test_autocast_around_the_step_and_inside_the_model_is_followed() -> None:
    class Mixed(Toy):
        def body(self, x: torch.Tensor) -> torch.Tensor:
            x = self.blocks[0](x)
            with torch.autocast("cpu", enabled=False):
                x = self.blocks[1](x.float())
            return self.blocks[2](x)

    torch.manual_seed(0)
    model = Mixed(lambda _: ToyBlock())
    plain = twin(model)
    driven, hooks, _ = drive(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected_losses, expected = losses_and_gradients(plain, toy_batches(3))
        losses = driven.step(toy_batches(3))
    assert all(map(same_bits, losses, expected_losses))
    assert_same_gradients(hooks.gradients, expected)


def test_hooks_of_users_on_blocks_run_once_per_micro_batch() -> None:
    model = make("plain")
    plain, calls = twin(model), []
    for one in (model, plain):
        one.blocks[1].register_forward_pre_hook(lambda module, args: (args[0] * 2,))
        one.blocks[1].register_forward_hook(lambda module, args, out: calls.append(1) or out * 3)
    driven, hooks, _ = drive(model)
    _, expected = losses_and_gradients(plain, toy_batches(2))
    calls.clear()
    driven.step(toy_batches(2))
    assert len(calls) == 2
    assert_same_gradients(hooks.gradients, expected)


def test_a_leaf_of_the_batch_gets_its_gradient() -> None:
    model = make("plain")
    plain = twin(model)
    driven, _, _ = drive(model)
    ours, theirs = toy_batches(2), toy_batches(2)
    for batch in (*ours, *theirs):
        batch["x"].requires_grad_()
    losses_and_gradients(plain, theirs)
    driven.step(ours)
    assert all(same_bits(a["x"].grad, b["x"].grad) for a, b in zip(ours, theirs, strict=True))


def test_a_model_made_on_meta_is_driven_with_weights_from_elsewhere() -> None:
    plain = make("nested arguments")
    with torch.device("meta"):
        model = TOYS["nested arguments"]()
    segments = map_segments(model, RUNS)
    sets = segments.parameter_sets(model)
    homes = {}
    for segment, own in segments.parameter_sets(twin(plain)).items():
        homes[segment] = torch.zeros(own.layout.num_bytes, dtype=torch.uint8)
        gather(own, homes[segment])
    before = dict(model.named_parameters())
    hooks = ComeAndGo(segments, sets, homes)
    driven = SegmentedModel(model, segments, sets=sets, hooks=hooks, store=KeepStore())
    _, expected = losses_and_gradients(plain, toy_batches(3))
    driven.step(toy_batches(3))
    assert_same_gradients(hooks.gradients, expected)
    assert all(p is before[name] for name, p in model.named_parameters())


def test_the_number_of_threads_is_that_of_the_caller() -> None:
    seen = []

    def loss_fn(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        seen.append(torch.get_num_threads())
        return model(**batch)[0]

    driven, _, _ = drive(make("plain"))
    torch.set_num_threads(2)
    driven.step(toy_batches(2), loss_fn)
    assert seen == [2, 2]
