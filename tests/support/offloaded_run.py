"""A run of the engine on a model that is never whole in memory, as a program of its own.

Usage: python -m support.offloaded_run '{"layers": 4, ...}' (see `Settings`)

Says on standard output when it enters each phase and waits for an answer, so that a parent can
measure the memory of each phase from outside (`support.watched_runs`). Ends with the losses and
what the run was made of.
"""

import ctypes
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What to run."""

    directory: str
    layers: int = 4
    hidden: int = 512
    vocabulary: int = 2048
    batch: int = 2
    sequence: int = 128
    num_micro_batches: int = 1
    num_steps: int = 3
    ram: str = "64MiB"
    gpu: str | None = None
    device: str = "cpu"
    max_grad_norm: float | None = 1.0
    should_resume: bool = True
    checks_first: bool = False
    """Whether the size of a step is known, and checked, before anything is written."""


def config_of(settings: Settings) -> transformers.LlamaConfig:
    return transformers.LlamaConfig(
        vocab_size=settings.vocabulary,
        hidden_size=settings.hidden,
        intermediate_size=4 * settings.hidden,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.hidden // 64,
        num_key_value_heads=settings.hidden // 64,
        max_position_embeddings=max(256, settings.sequence),
        architectures=["LlamaForCausalLM"],
    )


def initial(shapes: dict[str, tuple[int, ...]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Random weights, one tensor at a time."""
    for number, (name, shape) in enumerate(shapes.items()):
        generator = torch.Generator().manual_seed(number)
        if len(shape) == 1:
            yield name, torch.ones(shape, dtype=torch.bfloat16)
        else:
            values = torch.empty(shape, dtype=torch.bfloat16)
            yield name, values.normal_(0.0, 0.02, generator=generator)


def batches_of(settings: Settings, step: int) -> list[dict[str, torch.Tensor]]:
    found = []
    for number in range(settings.num_micro_batches):
        generator = torch.Generator().manual_seed(1000 * step + number)
        tokens = torch.randint(
            0, settings.vocabulary, (settings.batch, settings.sequence), generator=generator
        )
        found.append({"input_ids": tokens, "labels": tokens})
    return found


def enter(phase: str, **facts: Any) -> None:
    """Tell the parent, and wait until it has taken its measure."""
    print(json.dumps({"phase": phase, **facts}), flush=True)
    sys.stdin.readline()


def warm_up(settings: Settings) -> None:
    """A step of one layer in memory: what torch takes once is not the engine's.

    The layer has the run's own sizes: which kernels the math libraries compile, and the work space
    they keep, depend on them and on the processor.
    """
    one = replace(settings, layers=1)
    model = transformers.LlamaForCausalLM(config_of(one)).to(torch.bfloat16)
    model(**batches_of(one, 0)[0]).loss.backward()
    del model
    # What is merely freed must not count as the bare process's.
    ctypes.CDLL(None).malloc_trim(0)


def main() -> None:
    settings = Settings(**json.loads(sys.argv[1]))
    torch.set_num_threads(1)
    warm_up(settings)
    import lohan
    import lohan.attaching
    import lohan.engine.attach
    from lohan.train.weights.source import source_of_config
    from support.small_machines import small_machine

    source = source_of_config(config_of(settings))
    shapes = {name: tuple(shape) for name, shape in source.parameters.items()}
    Path(settings.directory).mkdir(exist_ok=True)

    def attach(run: str | None) -> Any:
        model = source.make_model()
        optimizer = lohan.AdamW(model.parameters(), lr=1e-3, max_grad_norm=settings.max_grad_norm)
        return lohan.attach(
            model,
            optimizer,
            ssd=settings.directory,
            ram=settings.ram,
            gpu=settings.gpu,
            device=settings.device,
            machine=small_machine(),
            weights=initial(shapes) if run is None else None,
            largest_step=batches_of(settings, 0) if settings.checks_first else None,
            run=run,
            threads=1,
        )

    source.make_model()
    enter("bare")
    enter("attach")
    engine = attach(None)
    losses = []
    enter("first step")
    for step in range(settings.num_steps):
        if step == 1:
            enter("steps")
        losses.append(engine.step(batches_of(settings, step)).loss)
    enter("seal")
    engine.seal({"note": 1})
    enter("evaluate")
    evaluated = engine.evaluate(batches_of(settings, 99))
    enter("weights")
    total = 0.0
    for _, master in engine.weights():
        total += master.sum(dtype=torch.float64).item()
        del master
    run, states = engine.run_id, engine.store.layout.slot_bytes()
    buffers, plan = engine.ram_peak_bytes, engine.plan
    assert plan is not None
    planned = {str(tier): plan.ledger.total(tier) for tier in plan.ledger.budgets}
    device_peak = engine.device.peak_bytes
    if settings.should_resume:
        engine.close()
        del engine
        enter("resume")
        engine = attach(run)
        enter("steps after resume")
        losses.append(engine.step(batches_of(settings, settings.num_steps)).loss)
    engine.close(should_delete=True)
    enter(
        "end",
        losses=losses,
        evaluated=evaluated,
        total=total,
        states_bytes=states,
        buffers_bytes=buffers,
        planned_bytes=planned,
        device_peak_bytes=device_peak,
        settings=asdict(settings),
    )


if __name__ == "__main__":
    main()
