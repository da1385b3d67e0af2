"""One architecture, built small, trained by the plain loop and offloaded, and judged.

Owns what the outcomes mean. The comparison is `lohan.verify`'s: its loop in memory, its engine run,
its bits. Runs in a process of its own (`children`), for whatever may happen.
"""

import random
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from lohan.errors import ConfigError, LohanError
from lohan.verify import Case, SmallCopy, verify_copy
from lohan.verify.plain_loop import losses_and_gradients
from lohan.verify.small_copy import DTYPE
from support.sweep import catalogue, inputs
from support.sweep.catalogue import DENOISERS, Family
from support.sweep.small_configs import small_config

EQUAL, WRONG, REFUSED = "equal", "wrong", "refused"
PLAIN_FAILS, NOT_BUILT, TIME_LIMIT, CRASHED = (
    "plain loop fails too",
    "not built",
    "time limit",
    "crashed",
)
OUTCOMES = (EQUAL, WRONG, REFUSED, CRASHED, TIME_LIMIT, PLAIN_FAILS, NOT_BUILT)

CASES = tuple(
    Case(activations=name, num_micro_batches=2, max_grad_norm=1.0)
    for name in ("as planned", "recomputed")
)
_NUM_STEPS = 3
_SEED = 5
_MOST_PARAMETERS = 8_000_000
_OF_PICTURES = ("vis", "image", "encoder", "patch")
"""In names of weights that a picture goes through."""


@dataclass(kw_only=True)
class Row:
    """What came of one architecture."""

    name: str
    kind: str
    class_name: str
    outcome: str
    reason: str = ""
    case: str = ""
    """The way of running in which it went wrong."""
    num_parameters: int = 0
    num_with_gradient: int = 0
    num_tensors: int = 0
    """Of the trained tensors, and as many of them as have a gradient other than zero."""
    has_dropout: bool = False
    seconds: float = 0.0
    captured: list[str] = field(default_factory=list)
    """What the engine says of each block: captured, or not and why."""


class _OwnValues(SmallCopy):
    """As the model's own code starts it, for those that are not finite otherwise."""

    __slots__ = ()

    def values(self, model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        return iter([(name, p.detach().clone()) for name, p in model.named_parameters()])


@dataclass(frozen=True, kw_only=True)
class _Attempt:
    has_dropout: bool
    values: type[SmallCopy]


_ATTEMPTS = (
    _Attempt(has_dropout=True, values=SmallCopy),
    _Attempt(has_dropout=False, values=SmallCopy),
    _Attempt(has_dropout=True, values=_OwnValues),
    _Attempt(has_dropout=False, values=_OwnValues),
)


class _NotTrainable(Exception):
    """The plain loop gives nothing to compare with."""


def judge(family: Family, ssd: Path) -> Row:
    """Build, train both ways, compare."""
    row = Row(name=family.name, kind=family.kind, class_name=family.class_name, outcome=NOT_BUILT)
    copy = trainable_copy(family, row)
    if copy is None:
        return row
    done: list[str] = []
    try:
        result = verify_copy(
            copy,
            ssd=[ssd],
            device="cpu",
            num_steps=_NUM_STEPS,
            cases=CASES,
            report=done.append,
            observe=lambda engine: _note_captured(engine, row),
        )
    except Exception as error:
        row.outcome, row.reason = REFUSED, first_line(error)
        if isinstance(error, ConfigError) and "trained twice in memory" in error.what:
            row.outcome = PLAIN_FAILS
        elif not isinstance(error, LohanError):
            row.reason += f" ({_place(error)})"
        row.case = CASES[min(len(done), len(CASES) - 1)].activations
        return row
    row.outcome = EQUAL
    for one in result.cases:
        if one.difference is not None:
            row.outcome, row.reason = WRONG, one.difference.words
            row.case = one.case.activations
            break
    return row


def build(family: Family, *, has_dropout: bool) -> nn.Module:
    """The small model with values of its own code, in training mode; always the same."""
    seed_everything()
    if family.kind == catalogue.DIFFUSION:
        import diffusers

        made = getattr(diffusers, family.class_name)(**DENOISERS[family.class_name].settings)
        made = made.to(DTYPE)
    else:
        import transformers

        kind: Any = getattr(transformers, family.class_name)
        config = small_config(kind.config_class, has_dropout=has_dropout)
        if family.kind == catalogue.CAUSAL and hasattr(config, "is_decoder"):
            config.is_decoder = True
        made = kind._from_config(config, dtype=DTYPE)
    model: nn.Module = made
    for parameter in model.parameters():
        parameter.data = parameter.data.to(DTYPE)
    return model.train()


def batches_of(family: Family, model: nn.Module) -> Iterator[inputs.MakeBatch]:
    """Ways to feed a model; the first that its forward takes is meant."""
    if family.kind == catalogue.DIFFUSION:
        yield _noise_batches(family)
        return
    by_kind: dict[str, Callable[..., Iterator[inputs.MakeBatch]]] = {
        catalogue.VISION: inputs.picture_classes,
        catalogue.AUDIO: inputs.sounds,
        catalogue.SPEECH: inputs.sounds,
        catalogue.PICTURES: inputs.picture_texts,
    }
    yield from by_kind.get(family.kind, inputs.text_batches)(model, DTYPE)


def loss_of_outputs(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    """Distance of everything a model gives from a wave: for models without a loss of their own."""
    found = model(**batch, return_dict=False)
    leaves = [one for one in torch.utils._pytree.tree_leaves(found) if _is_float(one)]
    shares = []
    for one in leaves:
        wave = torch.sin(torch.arange(one.numel(), dtype=torch.float32)).view(one.shape)
        shares.append((one.float() - wave).square().mean())
    return torch.stack(shares).sum()


def seed_everything() -> None:
    """Torch's, Python's and numpy's random numbers begin anew."""
    torch.manual_seed(_SEED)
    random.seed(_SEED)
    np.random.seed(_SEED)


def first_line(error: BaseException) -> str:
    """Of an error: its kind and the first line that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"[:400]


def trainable_copy(family: Family, row: Row) -> SmallCopy | None:
    """The first way to build and feed a model in which the plain loop trains it."""
    for attempt in _ATTEMPTS:
        try:
            model = build(family, has_dropout=attempt.has_dropout)
        except Exception as error:
            row.reason = row.reason or f"{first_line(error)} ({_place(error)})"
            continue
        row.num_parameters = sum(p.numel() for p in model.parameters())
        if row.num_parameters > _MOST_PARAMETERS:
            row.reason = f"{row.num_parameters:,} parameters"
            return None
        if row.outcome == NOT_BUILT:
            row.outcome, row.reason = PLAIN_FAILS, ""
        ways = batches_of(family, model)
        while True:
            try:
                make_batch = next(ways, None)
                if make_batch is None:
                    break
                copy = _copy(family, attempt, make_batch, row)
                _try_plain_loop(copy, make_batch, row)
            except Exception as error:
                row.reason = row.reason or f"{first_line(error)} ({_place(error)})"
                continue
            row.has_dropout = attempt.has_dropout
            row.reason = ""
            return copy
        row.reason = row.reason or "no form of inputs is known"
    return None


def _copy(family: Family, attempt: _Attempt, make_batch: inputs.MakeBatch, row: Row) -> SmallCopy:
    has_loss = family.kind != catalogue.DIFFUSION and "labels" in make_batch(0)
    return attempt.values(
        name=family.name,
        architecture=family.class_name,
        changes=(),
        num_parameters=row.num_parameters,
        make=lambda: build(family, has_dropout=attempt.has_dropout),
        make_batch=make_batch,
        loss_fn=None if has_loss else loss_of_outputs,
    )


def _try_plain_loop(copy: SmallCopy, make_batch: inputs.MakeBatch, row: Row) -> None:
    model = copy.in_memory(torch.device("cpu"))
    losses, gradients = losses_and_gradients(
        model, [make_batch(0), make_batch(1)], copy.loss_fn, [0.5, 0.5]
    )
    if not all(bool(torch.isfinite(one).all()) for one in (*losses, *gradients.values())):
        raise _NotTrainable("losses or gradients are not finite")
    if not gradients:
        raise _NotTrainable("nothing has a gradient")
    is_seen = any(
        one.any() and any(word in name for word in _OF_PICTURES) for name, one in gradients.items()
    )
    if row.kind == catalogue.PICTURES and not is_seen:
        raise _NotTrainable("the pictures are not looked at")
    row.num_tensors = sum(p.requires_grad for p in model.parameters())
    row.num_with_gradient = sum(bool(one.any()) for one in gradients.values())


def _noise_batches(family: Family) -> inputs.MakeBatch:
    def make(seed: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(3000 + seed)
        made = DENOISERS[family.class_name].inputs
        return {name: one(generator, DTYPE) for name, one in made.items()}

    return make


def _note_captured(engine: Any, row: Row) -> None:
    """An engine that captures blocks says of each what became of it."""
    row.captured = [str(one) for one in getattr(engine, "captured_blocks", ())]


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _place(error: BaseException) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{Path(frame.filename).name}:{frame.lineno}"
