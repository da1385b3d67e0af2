"""Filling a store from tensors, and getting masters and moments back."""

import random
import weakref

import pytest
import torch

from lohan.errors import ConfigError
from lohan.ssd import IoEngine
from lohan.store import ComputeFormat, MasterFormat, Part, StateLayout, TensorEntry
from lohan.vocabulary import BlockId
from support.state_stores import (
    STATE_FORMATS,
    contents,
    created,
    make_directories,
    random_tensors,
    small_layout,
)


@pytest.fixture
def engine():
    engine = IoEngine(is_uring=False)
    yield engine
    engine.close()


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int32 if tensor.dtype is torch.float32 else torch.int16)


@pytest.mark.parametrize(("compute_format", "master_format"), STATE_FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("resident_parts", [{}, {BlockId(1): [Part.V32, Part.FROZEN16]}])
def test_masters_come_back_to_the_bit_in_any_order(
    tmp_path, engine, compute_format, master_format, dtype, resident_parts
) -> None:
    layout = small_layout(compute_format, master_format)
    tensors = random_tensors(layout, dtype=dtype)
    shuffled = list(tensors.items())
    random.Random(1).shuffle(shuffled)
    compute_dtype = torch.bfloat16 if compute_format is ComputeFormat.BF16 else torch.float16
    with created(make_directories(tmp_path, 2), layout, engine, resident_parts) as store:
        store.fill(shuffled)
        masters = dict(store.masters())
        moments = {name: (m, v) for name, m, v in store.moments()}
        raw = contents(store)
        store.seal(step=0)
        store.verify()
    assert list(masters) == list(layout.names)
    for block in layout.blocks:
        for place in block.places:
            name = place.entry.name
            given = tensors[name].float()
            is_trainable = place.entry.is_trainable
            expected = given if is_trainable else given.to(compute_dtype).float()
            assert torch.equal(bits(masters[name]), bits(expected)), name
            assert (name in moments) == is_trainable
    assert all(not m.any() and not v.any() for m, v in moments.values())
    if dtype is torch.bfloat16 and master_format is MasterFormat.SPLIT:
        assert not raw[0, Part.LO16].any()
        assert not raw[0, Part.V32].any()


def test_every_kind_of_number_survives(tmp_path, engine) -> None:
    patterns = torch.tensor(
        [
            0x00000000, -0x80000000, 0x00000001, 0x3F808000, 0x3F818000, 0x7F7FFFFF, 0x7F7F8000,
            0x7F800000, -0x00800000, 0x7FC00000, 0x7F800001, 0x7FFFFFFF, -1, 0x00018000,
        ],
        dtype=torch.int32,
    )  # fmt: skip
    layout = StateLayout.pack({"b": (TensorEntry(name="w", shape=(14,)),)})
    with created(make_directories(tmp_path, 1), layout, engine) as store:
        store.fill([("w", patterns.view(torch.float32))])
        assert torch.equal(bits(dict(store.masters())["w"]), patterns)
        # Ties live in the sign of V32 and do not show in the moment.
        assert not next(store.moments())[2].any()


def test_tensors_larger_than_the_scratch_memory_go_in_pieces(tmp_path, engine) -> None:
    layout = StateLayout.pack(
        {
            "b": (
                TensorEntry(name="small", shape=(3,)),
                TensorEntry(name="large", shape=(301, 401)),
                TensorEntry(name="frozen", shape=(100001,), is_trainable=False),
                TensorEntry(name="view", shape=(200, 300)),
            )
        }
    )
    tensors = random_tensors(layout)
    tensors["view"] = tensors["view"].view(300, 200).t()  # not contiguous
    with created(make_directories(tmp_path, 3), layout, engine) as store:
        store.fill(reversed(tensors.items()))
        masters = dict(store.masters())
        store.seal(step=0)
        store.verify()
    for name in ("small", "large", "view"):
        assert torch.equal(masters[name], tensors[name])
    assert torch.equal(masters["frozen"], tensors["frozen"].bfloat16().float())


def test_names_and_shapes_and_types_are_checked_and_the_fill_can_be_repeated(
    tmp_path, engine
) -> None:
    layout = small_layout()
    tensors = random_tensors(layout)
    embed = tensors["embed"]
    cases = [
        ({"embeb": embed}, "there is no tensor 'embeb'"),
        ({"embed": embed.t()}, r"has shape \(33, 70\), \(70, 33\) is expected"),
        ({"embed": embed.double()}, "torch.float64 on cpu"),
        ({"embed": embed.to("meta")}, "on meta"),
        ({"embed": embed}, r"5 of 6 tensors did not come: 0\.norm, 0\.weight"),
        ({}, "6 of 6"),
    ]
    with created(make_directories(tmp_path, 1), layout, engine) as store:
        for given, message in cases:
            with pytest.raises(ConfigError, match=message):
                store.fill(given.items())
        with pytest.raises(ConfigError, match="embed came twice"):
            store.fill([("embed", embed), ("embed", embed)])
        store.fill(tensors.items())
        assert torch.equal(dict(store.masters())["0.weight"], tensors["0.weight"])


@pytest.mark.parametrize("name", ["embed", "head"])
def test_weights_fp16_cannot_hold_are_refused(tmp_path, engine, name: str) -> None:
    layout = small_layout(ComputeFormat.FP16)
    tensors = random_tensors(layout)
    tensors[name][1, 1] = -7e4
    with created(make_directories(tmp_path, 1), layout, engine) as store:
        with pytest.raises(ConfigError, match=f"{name} has values up to 70000"):
            store.fill(tensors.items())
        tensors[name][1, 1] = float("inf")  # infinite before: nothing is lost
        store.fill(tensors.items())


def test_an_error_of_the_iterator_passes_through_and_leaves_the_store_empty(
    tmp_path, engine
) -> None:
    layout = small_layout()
    tensors = random_tensors(layout)

    def breaking():
        yield "embed", tensors["embed"]
        raise FileNotFoundError("weights")

    with created(make_directories(tmp_path, 1), layout, engine) as store:
        with pytest.raises(FileNotFoundError):
            store.fill(breaking())
        store.fill(tensors.items())


@pytest.mark.parametrize(("compute_format", "master_format"), STATE_FORMATS)
@pytest.mark.parametrize("resident_parts", [{}, {BlockId(1): [Part.V32, Part.M32]}])
def test_given_moments_come_back_to_the_bit_and_so_do_the_masters(
    tmp_path, engine, compute_format, master_format, resident_parts
) -> None:
    layout = small_layout(compute_format, master_format)
    masters = random_tensors(layout, dtype=torch.float32)
    # Ties of bf16 masters are kept in the sign of the second moment: here every one is a tie.
    ties = {n: (bits(t) & -0x10000 | 0x8000).view(torch.float32) for n, t in masters.items()}
    masters = ties if master_format is MasterFormat.SPLIT else masters
    moments = {name: (torch.randn_like(t), torch.rand_like(t)) for name, t in masters.items()}
    with created(make_directories(tmp_path, 2), layout, engine, resident_parts) as store:
        store.fill(masters.items(), moments=moments.__getitem__)
        found = {name: (m, v) for name, m, v in store.moments()}
        for name, (mean, square) in found.items():
            assert torch.equal(bits(mean), bits(moments[name][0])), name
            assert torch.equal(bits(square), bits(moments[name][1])), name
        for name, master in store.masters():
            if name in found:
                assert torch.equal(bits(master), bits(masters[name])), name


@pytest.mark.parametrize(
    ("moment", "words"),
    [
        (torch.zeros(3, dtype=torch.bfloat16), "moments are fp32"),
        (torch.zeros(4), "shape"),
        (torch.tensor([0.0, -1.0, 0.0]), "negative"),
    ],
)
def test_moments_that_cannot_be_meant_are_refused(tmp_path, engine, moment, words) -> None:
    layout = StateLayout.pack({"b": (TensorEntry(name="w", shape=(3,)),)})
    with created(make_directories(tmp_path, 1), layout, engine) as store:
        with pytest.raises(ConfigError, match=words):
            store.fill([("w", torch.ones(3))], moments=lambda _: (torch.zeros(3), moment))
        store.fill([("w", torch.ones(3))])


def test_tensors_are_not_held_by_the_store_once_given_away(tmp_path, engine) -> None:
    layout = small_layout()
    with created(make_directories(tmp_path, 1), layout, engine, {}) as store:
        store.fill(random_tensors(layout).items())
        for found in (store.masters(), store.moments()):
            for _, *tensors in found:
                memory = [weakref.ref(tensor._base) for tensor in tensors]
                del tensors
                assert all(one() is None for one in memory)
