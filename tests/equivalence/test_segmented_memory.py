"""What stays alive: one block's graph, one micro-batch's logits, and nothing after the step."""

import gc
import threading
import weakref
from typing import Any

import torch

from lohan.device import EmulatedDevice
from lohan.drive import Phase, SegmentedModel, SegmentGradients
from lohan.drive.activations.store import ActivationKey
from lohan.vocabulary import BlockId
from support.driving_hooks import ComeAndGo, twin
from support.keep_store import KeepStore
from support.mapped_segments import map_segments
from support.toy_models import WIDTH, Toy, ToyBlock, toy_batches


class Watch:
    """Counts tensors that are still alive, by label."""

    def __init__(self) -> None:
        self._refs: list[tuple[Any, weakref.ref[torch.Tensor]]] = []

    def note(self, label: Any, tensor: torch.Tensor) -> None:
        self._refs.append((label, weakref.ref(tensor)))

    def alive(self) -> list[Any]:
        return [label for label, ref in self._refs if ref() is not None]


class LoggedHooks(ComeAndGo):
    def __init__(self, segments: Any, sets: Any, watch: Watch) -> None:
        super().__init__(segments, sets)
        self.watch = watch

    def before(self, segment: BlockId, phase: Phase) -> None:
        assert self.watch.alive() == []
        super().before(segment, phase)

    def after(self, segment: BlockId, phase: Phase, gradients: Any) -> None:
        assert self.watch.alive() == []
        super().after(segment, phase, gradients)


def test_no_graph_of_a_block_outlives_its_visit() -> None:
    watch = Watch()

    class WatchedBlock(ToyBlock):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = torch.tanh(self.up(x))  # saved for backward by tanh and by the projection
            watch.note(id(self), hidden)
            return x + self.down(hidden)

    model = Toy(lambda _: WatchedBlock(), depth=4)
    segments = map_segments(model)
    sets = segments.parameter_sets(model)
    hooks = LoggedHooks(segments, sets, watch)
    driven = SegmentedModel(model, segments, sets=sets, hooks=hooks, store=KeepStore())
    gc.disable()  # nothing may need the collector to go away
    try:
        driven.step(toy_batches(3))
        assert watch.alive() == []
    finally:
        gc.enable()
    assert hooks.gradients


class CountedStore(KeepStore):
    """Remembers which keys were in it at the same time."""

    def __init__(self) -> None:
        super().__init__()
        self.puts: list[ActivationKey] = []
        self.largest = 0

    def put(self, key: ActivationKey, tensor: torch.Tensor) -> None:
        super().put(key, tensor)
        self.puts.append(key)
        self.largest = max(self.largest, len(self))


def test_only_the_inputs_of_blocks_survive_the_forward() -> None:
    model = Toy(lambda _: ToyBlock(), depth=4)
    segments = map_segments(model)
    sets = segments.parameter_sets(model)
    store = CountedStore()
    hooks = ComeAndGo(segments, sets)
    driven = SegmentedModel(model, segments, sets=sets, hooks=hooks, store=store)
    driven.step(toy_batches(3))
    assert store.largest == 4 * 3
    assert all(key.ordinal == -1 for key in store.puts)
    assert len(store) == 0


def test_a_tensor_that_enters_every_block_is_stored_once() -> None:
    class Conditioned(ToyBlock):
        def forward(self, x: torch.Tensor, c: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return super().forward(x * c + mask)

    class ConditionedToy(Toy):
        def body(self, x: torch.Tensor) -> torch.Tensor:
            c, mask = x.sigmoid(), torch.ones(6)
            for block in self.blocks:
                x = block(x, c, mask=mask)
            return x

    model = ConditionedToy(lambda _: Conditioned(), depth=4)
    segments = map_segments(model)
    sets = segments.parameter_sets(model)
    store = CountedStore()
    hooks = ComeAndGo(segments, sets)
    SegmentedModel(model, segments, sets=sets, hooks=hooks, store=store).step(toy_batches(2))
    assert len(store.puts) == 2 * (4 + 2)


class ForgetfulStore:
    """Keeps copies and lets go of the tensors, as a store on an SSD does."""

    def __init__(self, watch: Watch) -> None:
        self._copies: dict[ActivationKey, torch.Tensor] = {}
        self._watch = watch

    def put(self, key: ActivationKey, tensor: torch.Tensor) -> None:
        self._watch.note(key, tensor)
        self._copies[key] = tensor.clone()

    def get(self, key: ActivationKey) -> torch.Tensor:
        return self._copies[key]

    def drop(self, key: ActivationKey) -> None:
        del self._copies[key]


def test_inputs_that_a_store_copied_are_freed_on_the_device() -> None:
    """The memory of a block's input is gone when the micro-batch is two blocks further."""
    watch = Watch()
    storages: list[Any] = []

    class Noting(ToyBlock):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            storages.append(weakref.ref(x.untyped_storage()))
            return super().forward(x)

    alive_at_turn: list[int] = []

    class Hooks(ComeAndGo):
        def before(self, segment: BlockId, phase: Phase) -> None:
            if phase is Phase.TURN:
                alive_at_turn.append(len(watch.alive()))
            super().before(segment, phase)

    model = Toy(lambda _: Noting(), depth=5)
    segments = map_segments(model)
    sets = segments.parameter_sets(model)
    store = ForgetfulStore(watch)
    SegmentedModel(model, segments, sets=sets, hooks=Hooks(segments, sets), store=store).step(
        toy_batches(2)
    )
    assert alive_at_turn == [0]


def test_gradients_of_a_block_are_not_collected_before_they_are_added() -> None:
    """Beside the flat buffer there is the gradient of one parameter at a time."""
    used: list[int] = []

    class Hooks(ComeAndGo):
        def before(self, segment: BlockId, phase: Phase) -> None:
            super().before(segment, phase)
            if segment == 2 and phase is Phase.BACKWARD:
                used.append(device.bytes_in_use)
                device.reset_peak()

        def after(self, segment: BlockId, phase: Phase, gradients: SegmentGradients | None) -> None:
            if segment == 2 and phase is Phase.BACKWARD:
                used.append(device.peak_bytes)
            super().after(segment, phase, gradients)

    model = Toy(lambda _: ToyBlock(hidden=40_000))
    segments = map_segments(model)
    sets = segments.parameter_sets(model)
    with EmulatedDevice() as device:
        driven = SegmentedModel(
            model,
            segments,
            sets=sets,
            hooks=Hooks(segments, sets),
            enter_thread=device.compute,
            store=KeepStore(),
        )
        with device.compute():
            for _ in range(2):  # eager, then captured
                driven.step(toy_batches(1, rows=1))
    flat_bytes = 4 * 2 * 40_000 * WIDTH
    for before, peak in zip(used[::2], used[1::2], strict=True):
        assert flat_bytes < peak - before < 1.8 * flat_bytes


def test_logits_of_one_micro_batch_are_alive_at_a_time() -> None:
    watch, most = Watch(), []

    def loss_fn(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        logits = model.leave(model.body(model.enter(batch["x"])))
        most.append(len(watch.alive()))
        watch.note("logits", logits)
        return logits.square().mean()

    model = Toy(lambda _: ToyBlock())
    segments = map_segments(model)
    sets = segments.parameter_sets(model)
    driven = SegmentedModel(
        model, segments, sets=sets, hooks=ComeAndGo(segments, sets), store=KeepStore()
    )
    driven.step(toy_batches(4), loss_fn)
    assert most == [0, 0, 0, 0]


def test_a_step_leaves_no_thread_and_no_hook() -> None:
    model = Toy(lambda _: ToyBlock())
    untouched = twin(model)
    segments = map_segments(model)
    sets = segments.parameter_sets(model)
    driven = SegmentedModel(
        model, segments, sets=sets, hooks=ComeAndGo(segments, sets), store=KeepStore()
    )
    threads = threading.active_count()
    driven.step(toy_batches(3))
    assert threading.active_count() == threads
    for own, other in zip(model.modules(), untouched.modules(), strict=True):
        assert vars(own).keys() == vars(other).keys()
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
