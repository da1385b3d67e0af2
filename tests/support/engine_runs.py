"""Runs of the engine on tiny models, next to the same runs in memory."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from lohan.engine.attach import attach_engine
from lohan.engine.engine import Engine
from lohan.engine.options import FirstStates, Options
from lohan.hardware.machine import Machine
from lohan.model.shape import ModelShape
from lohan.optimizer.torch_optimizer import AdamW
from lohan.paper import policy_named
from lohan.plan.plan import BlockPlan, Plan
from lohan.plan.policies import Policy
from lohan.plan.workload import Workload
from lohan.vocabulary import Choice, TensorKind
from support import accelerator
from support.in_memory_training import PlainRun, plain_end
from support.small_machines import small_machine
from support.tiny_models import LOSS_FUNCTIONS, TINY_MODELS

MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class EngineCase:
    """One combination of everything that must not change a bit."""

    model: str = "llama"
    policy: str | Policy = "lohan+"
    choice: Choice | None = None
    """Of all outputs; None: as the policy chooses."""
    residents: bool | None = None
    num_parts: int = 1
    num_micro_batches: int = 1
    max_grad_norm: float | None = 1.0
    num_ssds: int = 1
    num_threads: int = 1
    device: str = accelerator.NAME if accelerator.is_loaded() else "cpu"
    ram_bytes: int = 64 * MIB
    gpu_bytes: int = 64 * MIB
    dropout: float = 0.0
    num_steps: int = 4
    dtype: torch.dtype = torch.bfloat16
    spills: bool | None = None
    options: dict[str, Any] = field(default_factory=dict)


def forced(case: EngineCase) -> Policy:
    """The policy of a case: a named one, with some of its decisions overruled."""
    if case.choice is None and case.residents is None and case.num_parts == 1:
        return policy_named(case.policy) if isinstance(case.policy, str) else case.policy
    assert isinstance(case.policy, str)
    policy = case.policy

    def make(machine: Machine, shape: ModelShape, workload: Workload) -> Plan:
        plan = policy_named(policy).plan(machine, shape, workload)
        blocks = [
            _overruled(case, block, shape.blocks[number], number, len(plan.blocks))
            for number, block in enumerate(plan.blocks)
        ]
        system = plan.system
        if case.spills is not None:
            system = replace(system, spills_gradients=case.spills)
        return replace(
            plan,
            blocks=tuple(blocks),
            num_update_parts=case.num_parts,
            system=system,
            gradient_slots=4 if case.spills else plan.gradient_slots,
        )

    return make


def _overruled(
    case: EngineCase, block: BlockPlan, shape: Any, number: int, count: int
) -> BlockPlan:
    if case.choice is not None and 0 < number < count - 1:
        saved = [op.index for op in shape.operators if op.is_saved]
        chosen = case.choice
        block = replace(
            block,
            input_choice=Choice.KEEP if chosen is Choice.RECOMPUTE else chosen,
            choices=() if chosen is Choice.RECOMPUTE else tuple((index, chosen) for index in saved),
        )
    if case.residents is not None:
        kinds = (TensorKind.P16, TensorKind.P32, TensorKind.OS32) if case.residents else ()
        block = replace(block, residents=frozenset(kinds))
    return block


def build(case: EngineCase) -> torch.nn.Module:
    torch.manual_seed(7)
    model = TINY_MODELS[case.model].build(case.dropout).train()
    for parameter in model.parameters():
        parameter.data = parameter.data.to(case.dtype)
    return model


def batches_of(case: EngineCase) -> list[list[dict[str, Any]]]:
    tiny = TINY_MODELS[case.model]
    return [
        [tiny.batch(100 * step + number, case.dtype) for number in range(case.num_micro_batches)]
        for step in range(case.num_steps)
    ]


def optimizer_for(case: EngineCase, model: torch.nn.Module, lr: float = 3e-3) -> AdamW:
    """Two groups, as usual: no decay for vectors."""
    matrices = [p for p in model.parameters() if p.requires_grad and p.dim() > 1]
    vectors = [p for p in model.parameters() if p.requires_grad and p.dim() <= 1]
    groups = [
        {"params": matrices, "weight_decay": 0.1},
        {"params": vectors, "weight_decay": 0.0, "lr": 2 * lr},
    ]
    return AdamW([g for g in groups if g["params"]], lr=lr, max_grad_norm=case.max_grad_norm)


FIRST_NAMES = tuple(one.name for one in fields(FirstStates))


def attach(
    case: EngineCase,
    model: torch.nn.Module,
    optimizer: AdamW,
    directory: Path,
    **options: Any,
) -> Engine:
    places = []
    for number in range(case.num_ssds):
        place = directory / f"ssd{number}"
        place.mkdir(exist_ok=True)
        places.append(place)
    tiny = TINY_MODELS[case.model]
    given = {"device": case.device, **case.options, **options}
    first = FirstStates(**{name: given.pop(name) for name in FIRST_NAMES if name in given})
    return attach_engine(
        model,
        optimizer,
        Options(
            ssd=places,
            ram_bytes=case.ram_bytes,
            gpu_bytes=case.gpu_bytes,
            machine=small_machine(case.num_ssds),
            policy=forced(case),
            num_threads=case.num_threads,
            example=tiny.batch(0, case.dtype),
            loss_fn=LOSS_FUNCTIONS.get(case.model),
            **given,
        ),
        first,
    )


def plain_run(case: EngineCase, engine: Engine, model: torch.nn.Module) -> PlainRun:
    """The same run in memory, on the same device. `model` is a twin made before the engine took the
    first one."""
    target = engine.device.torch_device
    model.to(target)
    return plain_end(
        model,
        optimizer_for(case, model),
        tree_map_only(torch.Tensor, lambda leaf: leaf.to(target), batches_of(case)),
        layout=engine.store.layout,
        loss_fn=LOSS_FUNCTIONS.get(case.model),
        loss_scale=2.0**16 if case.dtype is torch.float16 else None,
        reduction_groups=case.options.get("reduction_groups", 1),
    )


@dataclass
class Outcome:
    """What the engine's run gave."""

    losses: list[list[float]]
    norms: list[float | None]
    masters: dict[str, torch.Tensor]
    moments: dict[str, tuple[torch.Tensor, torch.Tensor]]
    engine_peak_bytes: int


def run_case(
    case: EngineCase, directory: Path, prepare: Callable[[torch.nn.Module], None] | None = None
) -> tuple[Outcome, PlainRun]:
    """Run a case on the engine and in memory."""
    model = build(case)
    if prepare is not None:
        prepare(model)
    twin = copy.deepcopy(model)
    torch.manual_seed(11)
    with attach(case, model, optimizer_for(case, model), directory) as engine:
        results = [engine.step(batches) for batches in batches_of(case)]
        outcome = Outcome(
            losses=[list(result.losses) for result in results],
            norms=[result.grad_norm for result in results],
            masters={name: master.clone() for name, master in engine.weights()},
            moments={name: (m.clone(), v.clone()) for name, m, v in engine.moments()},
            engine_peak_bytes=engine.ram_peak_bytes,
        )
        torch.manual_seed(11)
        expected = plain_run(case, engine, twin)
        engine.close(should_delete=True)
    return outcome, expected


def assert_same(outcome: Outcome, expected: PlainRun, *, norms: bool = True) -> None:
    """Equal in every bit."""
    assert outcome.losses == expected.losses
    if norms:
        assert outcome.norms == expected.norms
    different: list[str] = []
    for name, master in expected.masters.items():
        if not torch.equal(outcome.masters[name].view(torch.int32), master.view(torch.int32)):
            different.append(f"master of {name}")
        first, second = outcome.moments[name]
        if not torch.equal(first.view(torch.int32), expected.first[name].view(torch.int32)):
            different.append(f"m of {name}")
        if not torch.equal(second.view(torch.int32), expected.second[name].view(torch.int32)):
            different.append(f"v of {name}")
    assert not different, different


def all_cases(**choices: Sequence[Any]) -> list[EngineCase]:
    """Every combination of the given fields."""
    cases = [EngineCase()]
    for name, values in choices.items():
        cases = [replace(case, **{name: value}) for case in cases for value in values]
    return cases
