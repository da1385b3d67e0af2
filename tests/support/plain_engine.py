"""The engine's contract in plain PyTorch, all in RAM: what the trainers are tested with.

Slow and obvious, so it is also a judge: bf16 compute weights, fp32 masters, AdamW by
`lohan.optimizer.reference`, states sealed as plain files. Nothing is offloaded.
"""

import json
import os
import pathlib
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import safetensors.torch
import torch

from lohan.engine.model_buffers import ModelBuffers
from lohan.engine.options import FirstStates, Options
from lohan.errors import CheckpointError
from lohan.optimizer import AdamWSettings, prepare_step
from lohan.optimizer.reference import adamw_elements
from lohan.optimizer.torch_optimizer import clip_scale


@dataclass(frozen=True, kw_only=True)
class PlainResult:
    step: int
    loss: float
    losses: list[float]
    grad_norm: float | None
    tokens: int
    seconds: float
    read_bytes: int = 0
    written_bytes: int = 0
    busy: Mapping[str, float] = field(default_factory=dict)
    bottleneck: str = "cpu"
    predicted_seconds: float | None = None
    is_skipped: bool = False
    loss_scale: float | None = None


@dataclass(frozen=True, kw_only=True)
class PlainManifest:
    step: int
    metadata: dict[str, Any]


class PlainEngine:
    """See the contract; `ssd[0]/lohan-<run id>` holds the seal."""

    reduction_groups = 1

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Any,
        *,
        ssd: Sequence[str],
        weights: Iterable[tuple[str, torch.Tensor]] | None = None,
        moments: Callable[[str], tuple[torch.Tensor, torch.Tensor]] | None = None,
        counters: Mapping[str, Any] | None = None,
        buffers: Mapping[str, Any] | None = None,
        run: str | None = None,
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self._buffers = ModelBuffers(model, buffers)
        self.run_id = run or secrets.token_hex(4)
        self.folder = pathlib.Path(ssd[0]) / f"lohan-{self.run_id}"
        self.sealed: PlainManifest | None = None
        self.num_steps = int((counters or {}).get("num_steps", 0))
        self.plan = self.prediction = None
        self.written_bytes = self.measuring_bytes = self.ram_peak_bytes = self.due_bytes = 0
        self.rates_note = ""
        self.gpu_peak_bytes: int | None = None
        self.gpu_reserved_bytes: int | None = None
        self.is_rehearsing = False
        self.is_closed = False
        named = dict(model.named_parameters())
        if run is not None:
            self._open()
        else:
            self.folder.mkdir(parents=True)
            given = dict(weights) if weights is not None else named
            assert given.keys() == named.keys()
            self.masters = {n: t.detach().to(torch.float32).clone() for n, t in given.items()}
            self.m = {n: torch.zeros_like(t) for n, t in self.masters.items()}
            self.v = {n: torch.zeros_like(t) for n, t in self.masters.items()}
            if moments is not None:
                for name in self.masters:
                    if named[name].requires_grad:
                        self.m[name], self.v[name] = moments(name)
        for name, parameter in named.items():
            value = self.masters[name].to(parameter.dtype)
            if parameter.device.type == "meta":
                _put(model, name, parameter, value)
            else:
                parameter.data = value
        # Optimizer groups may hold the meta parameters: find settings by position.
        order = [n for n, p in named.items() if p.requires_grad]
        of = {id(p): g for g, group in enumerate(optimizer.param_groups) for p in group["params"]}
        self._group = {name: of[id(named[name])] for name in order}

    def prepare(self, micro_batches: list[Any], *, may_shrink: bool = False) -> None:
        assert micro_batches

    def step(
        self, micro_batches: list[Any], loss_fn: Any = None, *, weights: list[float] | None = None
    ) -> PlainResult:
        begin = time.perf_counter()
        assert self.model.training
        losses = []
        for number, batch in enumerate(micro_batches):
            loss = loss_fn(self.model, batch)
            (loss * (weights[number] if weights else 1.0)).backward()
            losses.append(loss.item())
        named = {n: p for n, p in self.model.named_parameters() if p.grad is not None}
        squares = [float(p.grad.double().square().sum()) for p in named.values()]
        norm = sum(squares) ** 0.5
        scale = clip_scale(norm, self.optimizer.max_grad_norm)
        self.num_steps += 1
        for name, parameter in named.items():
            rates = self.optimizer.rates()[self._group[name]]
            grad = parameter.grad.float().view(-1)
            scalars = prepare_step(
                rates,
                step=self.num_steps,
                num_elements=grad.numel(),
                grad_scale=scale,
            )
            flat = (t[name].view(-1) for t in (self.masters, self.m, self.v))
            updated = adamw_elements(grad, *flat, scalars)
            for store, value in zip((self.masters, self.m, self.v), updated, strict=True):
                store[name] = value.view(parameter.shape)
            parameter.data = self.masters[name].to(parameter.dtype)
            parameter.grad = None
        tokens = sum(
            int((batch.get("labels", batch["input_ids"]) != -100).sum()) for batch in micro_batches
        )
        written = 12 * sum(p.numel() for p in named.values())
        self.written_bytes += written
        return PlainResult(
            step=self.num_steps,
            loss=sum(losses),
            losses=losses,
            grad_norm=norm,
            tokens=tokens,
            seconds=time.perf_counter() - begin,
            written_bytes=written,
        )

    def evaluate(self, batches: list[Any], loss_fn: Any = None) -> list[float]:
        assert not self.model.training
        with torch.no_grad():
            return [loss_fn(self.model, batch).item() for batch in batches]

    def weights(self, *, are_frozen_wanted: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
        for name, master in self.masters.items():
            if are_frozen_wanted or name in self._group:
                yield name, master

    def moments(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        for name in self._group:
            yield name, self.m[name], self.v[name]

    @property
    def counters(self) -> dict[str, Any]:
        return {"num_steps": self.num_steps}

    @property
    def buffers(self) -> dict[str, Any]:
        return self._buffers.to_json()

    def synchronize(self) -> None:
        pass

    def seal(self, metadata: dict[str, Any]) -> None:
        tensors = {
            f"{kind}/{name}": tensor.contiguous()
            for kind, store in (("p", self.masters), ("m", self.m), ("v", self.v))
            for name, tensor in store.items()
        }
        path = self.folder / f"states-{self.num_steps}.safetensors"
        safetensors.torch.save_file(tensors, path)
        text = json.dumps(
            {
                "step": self.num_steps,
                "metadata": json.loads(json.dumps(metadata)),
                "file": path.name,
            }
        )
        (self.folder / "seal.tmp").write_text(text)
        os.replace(self.folder / "seal.tmp", self.folder / "seal.json")
        self.sealed = PlainManifest(step=self.num_steps, metadata=metadata)
        for old in self.folder.glob("states-*.safetensors"):
            if old != path:
                old.unlink()

    def _open(self) -> None:
        if not (self.folder / "seal.json").exists():
            raise CheckpointError("no sealed state", why="none", remedy="none")
        found = json.loads((self.folder / "seal.json").read_text())
        self.sealed = PlainManifest(step=found["step"], metadata=found["metadata"])
        self.num_steps = found["step"]
        tensors = safetensors.torch.load_file(self.folder / found["file"])
        stores: dict[str, dict[str, torch.Tensor]] = {"p": {}, "m": {}, "v": {}}
        for key, tensor in tensors.items():
            kind, name = key.split("/", 1)
            stores[kind][name] = tensor
        self.masters, self.m, self.v = stores["p"], stores["m"], stores["v"]

    def close(self, should_delete: bool = False) -> None:
        self.is_closed = True


def _put(
    model: torch.nn.Module, name: str, parameter: torch.nn.Parameter, value: torch.Tensor
) -> None:
    """Give a parameter on meta memory, under every name it has."""
    fresh = torch.nn.Parameter(value, requires_grad=parameter.requires_grad)
    for module in model.modules():
        for own, found in list(module._parameters.items()):
            if found is parameter:
                module._parameters[own] = fresh


def attach_plainly(model: Any, optimizer: Any, options: Options, first: FirstStates) -> PlainEngine:
    """In place of `lohan.attaching.attach_with`; nothing is planned."""
    return PlainEngine(
        model,
        optimizer,
        ssd=list(options.ssd),
        run=first.run,
        weights=first.weights,
        moments=first.moments,
        counters=first.counters,
        buffers=first.buffers,
    )


class MasterAdamW(torch.optim.Optimizer):
    """AdamW with fp32 masters in RAM: what TRL's own trainer is given to be compared with.

    As torch's it counts the steps of each parameter: one without a gradient takes none.
    """

    def __init__(self, groups: Any, lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self._first: dict[torch.Tensor, torch.Tensor] = {}

    def begin_with(self, parameter: torch.Tensor, first: torch.Tensor) -> None:
        """Its first master, where the parameter does not have all bits of it."""
        self._first[parameter] = first

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            settings = AdamWSettings(
                lr=group["lr"],
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                eps=group["eps"],
                weight_decay=group["weight_decay"],
            )
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    first = self._first.pop(parameter, parameter.detach().float())
                    state["master"] = first.reshape(-1).clone()
                    state["m"] = torch.zeros_like(state["master"])
                    state["v"] = torch.zeros_like(state["master"])
                    state["step"] = 0
                state["step"] += 1
                scalars = prepare_step(settings, step=state["step"], num_elements=parameter.numel())
                stores = (state["master"], state["m"], state["v"])
                updated = adamw_elements(parameter.grad.float().view(-1), *stores, scalars)
                state["master"], state["m"], state["v"] = updated
                parameter.copy_(state["master"].view(parameter.shape))
