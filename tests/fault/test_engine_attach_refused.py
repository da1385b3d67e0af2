"""Whatever attach refuses: nothing is left on the drives, and the user's model is as it was."""

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from lohan.engine.attach import attach_engine
from lohan.engine.options import FirstStates, Options
from lohan.errors import CheckpointError, ConfigError, DoesNotFit, LohanError, StorageError
from support.engine_faults import everything_moves, is_empty, watched
from support.engine_runs import FIRST_NAMES, batches_of, build, optimizer_for
from support.small_machines import small_machine

CASE = everything_moves("emulated")


def fingerprint(model: torch.nn.Module) -> dict[str, Any]:
    """Everything a user could see of a model."""
    config = getattr(model, "config", None)
    return {
        "modules": {name: type(module) for name, module in model.named_modules()},
        "own": {name: sorted(vars(module)) for name, module in model.named_modules()},
        "tensors": {
            name: (id(tensor), tensor.dtype, tensor.device, tensor.requires_grad, tensor.stride())
            for name, tensor in (*model.named_parameters(), *model.named_buffers())
        },
        "values": {
            name: None if tensor.is_meta else tensor.detach().clone().view(torch.uint8)
            for name, tensor in (*model.named_parameters(), *model.named_buffers())
            if tensor.dim()
        },
        "training": model.training,
        "config": copy.deepcopy(config.to_dict()) if config is not None else None,
    }


def is_same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    values, others = one.pop("values"), other.pop("values")
    return one == other and all(
        (value is None and others[name] is None) or torch.equal(value, others[name])
        for name, value in values.items()
    )


def named(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [(name, parameter.detach().clone()) for name, parameter in model.named_parameters()]


def without_one(model: torch.nn.Module) -> dict[str, Any]:
    return {"weights": named(model)[1:]}


def with_a_stranger(model: torch.nn.Module) -> dict[str, Any]:
    return {"weights": [*named(model), ("stranger", torch.zeros(3))]}


def of_another_shape(model: torch.nn.Module) -> dict[str, Any]:
    (name, first), *rest = named(model)
    return {"weights": [*rest, (name, first[1:])]}


def that_fail_on_the_way(model: torch.nn.Module) -> dict[str, Any]:
    def stream() -> Any:
        yield from named(model)[:3]
        raise OSError("the download broke off")

    return {"weights": stream()}


def to_meta(model: torch.nn.Module) -> dict[str, Any]:
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, torch.nn.Parameter(parameter.to("meta")))
    return {}


def buffers_to_meta(model: torch.nn.Module) -> dict[str, Any]:
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq.to("meta")
    return {}


def mixed_types(model: torch.nn.Module) -> dict[str, Any]:
    model.lm_head.weight.data = model.lm_head.weight.data.to(torch.float16)
    return {}


def double(model: torch.nn.Module) -> dict[str, Any]:
    model.double()
    return {}


def sgd(model: torch.nn.Module) -> dict[str, Any]:
    return {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}


def of_another_model(model: torch.nn.Module) -> dict[str, Any]:
    return {"optimizer": optimizer_for(CASE, build(CASE))}


def frozen_later(model: torch.nn.Module) -> dict[str, Any]:
    """An optimizer made before a parameter was unfrozen does not know it."""
    model.lm_head.requires_grad_(False)
    optimizer = optimizer_for(CASE, model)
    model.lm_head.requires_grad_(True)
    return {"optimizer": optimizer}


def a_file(model: torch.nn.Module) -> dict[str, Any]:
    return {"ssd": [__file__]}


REFUSED: dict[str, tuple[Callable[[torch.nn.Module], dict[str, Any]], type[BaseException], str]] = {
    "another optimizer": (sgd, ConfigError, "lohan.AdamW"),
    "an optimizer of another model": (of_another_model, ConfigError, "in no group"),
    "a parameter the optimizer does not know": (frozen_later, ConfigError, "lm_head"),
    "mixed types": (mixed_types, ConfigError, "bfloat16, float16"),
    "a type that is not trained in": (double, ConfigError, "float64"),
    "meta without weights": (to_meta, ConfigError, "weights="),
    "meta buffers": (buffers_to_meta, ConfigError, "inv_freq"),
    "a weight that did not come": (without_one, ConfigError, "did not come"),
    "a weight nobody knows": (with_a_stranger, ConfigError, "stranger"),
    "a weight of another shape": (of_another_shape, ConfigError, "shape"),
    "weights that break off": (that_fail_on_the_way, OSError, "broke off"),
    "no directory": (lambda _: {"ssd": ["/nowhere/at/all"]}, StorageError, "/nowhere"),
    "a file as directory": (a_file, StorageError, "test_engine_attach_refused"),
    "a directory that cannot be written": (lambda _: {"ssd": ["/proc"]}, StorageError, "/proc"),
    "no directories": (lambda _: {"ssd": []}, ConfigError, "no SSD directory"),
    "a run that is not there": (lambda _: {"run": "neverwas"}, StorageError, "neverwas"),
    "a run id that is none": (lambda _: {"run": "../up"}, ConfigError, "not a run id"),
    "a policy nobody knows": (
        lambda _: {"policy": "lohan++", "largest_step": batches_of(CASE)[0]},
        LohanError,
        "lohan",
    ),
    "too little RAM": (
        lambda _: {"ram_bytes": 4096, "largest_step": batches_of(CASE)[0]},
        DoesNotFit,
        "RAM",
    ),
    "another word for non-finite": (lambda _: {"nonfinite": "ignore"}, ConfigError, '"skip"'),
    "counters of something else": (lambda _: {"counters": {"steps": 3}}, ConfigError, "counters"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_attach_refuses_leaves_nothing_behind(what: str, tmp_path: Path) -> None:
    change, kind, words = REFUSED[what]
    model = build(CASE)
    model.config.use_cache = True
    options = change(model)
    first = FirstStates(**{name: options.pop(name) for name in FIRST_NAMES if name in options})
    optimizer = options.pop("optimizer", None) or optimizer_for(CASE, model)
    before = fingerprint(model)
    place = tmp_path / "ssd0"
    place.mkdir()
    with watched(), pytest.raises(kind, match=words):
        attach_engine(
            model,
            optimizer,
            Options(
                **{
                    "ssd": [place],
                    "ram_bytes": CASE.ram_bytes,
                    "gpu_bytes": CASE.gpu_bytes,
                    "machine": small_machine(1),
                    "device": "emulated",
                    "example": batches_of(CASE)[0][0],
                    **options,
                }
            ),
            first,
        )
    assert is_empty(tmp_path)
    assert is_same(before, fingerprint(model))


def test_a_model_without_repeated_blocks_is_refused_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lohan.model.tracing.blocks.MOST_IN_ONE_BLOCK", 20)  # it has 25
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)).to(torch.bfloat16)
    before = fingerprint(model)
    with watched(), pytest.raises(ConfigError, match="block"):
        attach_engine(
            model,
            optimizer_for(CASE, model),
            Options(
                ssd=[tmp_path],
                ram_bytes=CASE.ram_bytes,
                machine=small_machine(1),
                device="cpu",
                example={"input": torch.zeros(2, 4, dtype=torch.bfloat16)},
            ),
        )
    assert not list(tmp_path.iterdir())
    assert is_same(before, fingerprint(model))


def test_another_model_cannot_go_on_with_a_run(tmp_path: Path) -> None:
    model = build(CASE)
    options = Options(
        ssd=[tmp_path],
        ram_bytes=CASE.ram_bytes,
        gpu_bytes=CASE.gpu_bytes,
        machine=small_machine(1),
        device="cpu",
        example=batches_of(CASE)[0][0],
    )
    with attach_engine(model, optimizer_for(CASE, model), options) as engine:
        engine.step(batches_of(CASE)[0])
        engine.seal()
    config = copy.deepcopy(model.config)
    config.intermediate_size = 32
    other = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    before = fingerprint(other)
    with watched(), pytest.raises(CheckpointError):
        attach_engine(other, optimizer_for(CASE, other), options, FirstStates(run=engine.run_id))
    assert is_same(before, fingerprint(other))
    again = build(CASE)
    first = FirstStates(run=engine.run_id)
    with attach_engine(again, optimizer_for(CASE, again), options, first) as resumed:
        assert resumed.num_steps == 1
        resumed.close(should_delete=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_of_somebody_else_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        model = build(CASE)
        with watched(), pytest.raises(StorageError):
            attach_engine(
                model,
                optimizer_for(CASE, model),
                Options(
                    ssd=[tmp_path],
                    ram_bytes=CASE.ram_bytes,
                    machine=small_machine(1),
                    device="cpu",
                ),
            )
    finally:
        tmp_path.chmod(0o700)
