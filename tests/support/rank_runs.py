"""Runs of several ranks, and what they leave: a program for `run_forked`, and for scripts/ranks.

A run is a JSON object (`RankRun`); the program forks its ranks, each of which takes the same steps,
and prints losses, norms and digests of all states as the first rank has them.
"""

import hashlib
import json
import os
import pathlib
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
import transformers

from lohan.engine import ranks
from lohan.engine.attach import attach_engine
from lohan.engine.engine import Engine
from lohan.engine.options import FirstStates, Options
from lohan.hardware.machine import Machine
from lohan.model.shape import ModelShape
from lohan.optimizer.torch_optimizer import AdamW
from lohan.paper import policy_named
from lohan.parallel.peers import Peers
from lohan.plan.plan import Plan
from lohan.plan.policies import Policy
from lohan.plan.workload import Workload
from support import accelerator
from support.small_machines import small_machine
from support.tiny_models import TinyDiT, denoising_loss

VOCABULARY = 300
_TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}


def _llama(dropout: float) -> torch.nn.Module:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**_TEXT, attention_dropout=dropout)
    )


def _gpt2(dropout: float) -> torch.nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=48,
        n_layer=2,
        n_head=2,
        n_positions=32,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=0,
        eos_token_id=1,
    )
    return transformers.GPT2LMHeadModel(config)


def _moe(dropout: float) -> torch.nn.Module:
    config = transformers.MixtralConfig(
        **_TEXT,
        num_local_experts=4,
        output_router_logits=True,
        router_aux_loss_coef=0.5,
        attention_dropout=dropout,
    )
    return transformers.MixtralForCausalLM(config)


def _t5(dropout: float) -> torch.nn.Module:
    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=48,
        d_kv=12,
        d_ff=96,
        num_layers=2,
        num_heads=4,
        dropout_rate=dropout,
        decoder_start_token_id=0,
        relative_attention_num_buckets=8,
    )
    return transformers.T5ForConditionalGeneration(config)


def _dit(dropout: float) -> torch.nn.Module:
    return TinyDiT(dropout, width=48, depth=2)


def _counting(dropout: float) -> torch.nn.Module:
    """A model that counts its forward passes in a buffer."""
    model = _dit(dropout)
    model.register_buffer("num_seen", torch.zeros(()))
    model.patch.register_forward_hook(lambda *_: model.num_seen.add_(1))
    return model


def _even(dropout: float) -> torch.nn.Module:
    """Blocks so large that slices come out about even; for what is moved, not for bits."""
    sizes = {**_TEXT, "vocab_size": 512, "hidden_size": 512, "intermediate_size": 1024}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))


MODELS: dict[str, Callable[[float], torch.nn.Module]] = {
    "llama": _llama,
    "gpt2": _gpt2,
    "moe": _moe,
    "t5": _t5,
    "dit": _dit,
}


@dataclass(frozen=True, kw_only=True)
class RankRun:
    """What is run, and by how many."""

    model: str = "llama"
    num_ranks: int = 1
    groups: int | None = 2
    max_grad_norm: float | None = None
    dropout: float = 0.0
    freezes: bool = False
    counts: list[int] = field(default_factory=lambda: [4, 4, 3])
    """Micro-batches of each step, of all ranks together."""
    resumes_at: int | None = None
    """After so many steps the run is sealed, closed and attached again."""
    seals_every: int | None = None
    run: str | None = None
    """Goes on with this run, from where it was sealed."""
    residents: bool = True
    """Whether states may live in RAM."""
    spills: bool = False
    """Whether gradients wait on SSD, where there is a norm to wait for."""
    keeps: bool = False
    """Whether what is sealed stays."""
    device: str = "cpu"
    fails: dict[str, Any] = field(default_factory=dict)
    """`rank`, `step` and `how`: "raise", "exit", "hang"; `timeout_seconds` of all."""
    unlike: dict[str, Any] = field(default_factory=dict)
    """What the last rank has otherwise; `version`: of lohan."""


def batch_of(model: str, seed: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    """Rows and lengths differ from batch to batch."""
    generator = torch.Generator().manual_seed(1000 + seed)
    if model in ("dit", "counting"):
        rows = 1 + seed % 3
        shapes = {"pixels": (rows, 6, 4), "time": (rows, 8), "noise": (rows, 6, 4)}
        return {n: torch.randn(s, generator=generator).to(dtype) for n, s in shapes.items()}
    sizes = (2, 8) if model == "even" else (1 + seed % 3, 5 + seed % 4)
    tokens = torch.randint(2, VOCABULARY, sizes, generator=generator)
    labels = tokens.clone()
    if model != "t5":
        labels[:, : seed % 3] = -100
    return {"input_ids": tokens, "labels": labels}


def built(run: RankRun) -> torch.nn.Module:
    torch.manual_seed(7)
    make = {**MODELS, "even": _even, "counting": _counting}[run.model]
    # Nothing is drawn, and no forward pass is needed to find that out, in evaluation mode.
    model = make(run.dropout).train(run.model != "even").bfloat16()
    if run.freezes:
        for number, parameter in enumerate(model.parameters()):
            parameter.requires_grad_(number % 3 != 1)
    return model


def optimizer_of(run: RankRun, model: torch.nn.Module) -> AdamW:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0, "lr": 6e-3},
    ]
    return AdamW([g for g in groups if g["params"]], lr=3e-3, max_grad_norm=run.max_grad_norm)


def loss_of_model(run: RankRun) -> Any:
    return denoising_loss if run.model in ("dit", "counting") else None


def all_batches(run: RankRun) -> list[list[dict[str, Any]]]:
    return [
        [batch_of(run.model, 100 * step + number) for number in range(count)]
        for step, count in enumerate(run.counts)
    ]


def attach(run: RankRun, directory: str, peers: Peers, model: Any, run_id: str | None) -> Engine:
    return attach_engine(
        model,
        optimizer_of(run, model),
        Options(
            ssd=[directory],
            ram_bytes=1 << 29 if run.model == "even" else 64 << 20,
            gpu_bytes=1 << 29 if run.model == "even" else 64 << 20,
            policy=policy_of(run),
            machine=small_machine(),
            device=run.device,
            num_threads=1,
            example=batch_of(run.model, 2),
            loss_fn=loss_of_model(run),
            reduction_groups=run.groups,
            peers=peers,
        ),
        FirstStates(run=run_id),
    )


def policy_of(run: RankRun) -> Policy:
    def make(machine: Machine, shape: ModelShape, workload: Workload) -> Plan:
        plan = policy_named("lohan+").plan(machine, shape, workload)
        if run.residents:
            return plan
        spills = run.spills and run.max_grad_norm is not None
        return replace(
            plan,
            blocks=tuple(replace(block, residents=frozenset()) for block in plan.blocks),
            num_update_parts=3,
            system=replace(plan.system, spills_gradients=spills),
            gradient_slots=4 if spills else plan.gradient_slots,
        )

    return make


def digest(items: Mapping[str, torch.Tensor]) -> str:
    known = hashlib.sha256()
    for name in sorted(items):
        known.update(name.encode() + items[name].contiguous().numpy().tobytes())
    return known.hexdigest()[:16]


def take(run: RankRun, directory: str, rank: int) -> dict[str, Any]:
    """One rank of a run; what it found."""
    timeout = run.fails.get("timeout_seconds", 60.0)
    peers = Peers.join(timeout_seconds=timeout)
    model = built(run)
    torch.manual_seed(11 if rank == 0 else 1000 + rank)
    engine = attach(run, directory, peers, model, run.run)
    results, first = [], engine.num_steps
    sealed = engine.sealed
    if rank == 0 and sealed is not None and "random" in sealed.metadata:
        torch.set_rng_state(torch.tensor(sealed.metadata["random"], dtype=torch.uint8))
    told: dict[str, Any] = {"run": engine.run_id}
    for step, batches in list(enumerate(all_batches(run)))[first:]:
        if step == run.resumes_at:
            engine.seal({"step": step})
            run_id = engine.run_id
            engine.close()
            engine = attach(run, directory, Peers.join(timeout_seconds=timeout), model, run_id)
        if run.seals_every and step and step % run.seals_every == 0:
            engine.seal({"random": torch.get_rng_state().tolist()})
        _fail(run.fails, rank, step)
        results.append(engine.step(batches[rank :: run.num_ranks]))
    engine.synchronize()
    named = dict(model.named_parameters())
    told |= {
        "read_bytes": engine.store.counters.read_bytes,
        "written_bytes": engine.store.counters.written_bytes,
        "sent_bytes": engine._setup.peers.sent_bytes,
        "sizes": {name: parameter.numel() for name, parameter in named.items()},
    }
    told |= {
        "losses": [list(result.losses) for result in results],
        "norms": [result.grad_norm for result in results],
        "masters": digest(dict(engine.weights())),
        "trained": digest(dict(engine.weights(are_frozen_wanted=False))),
        "m": digest({name: m for name, m, _ in engine.moments()}),
        "v": digest({name: v for name, _, v in engine.moments()}),
        "missed": engine.counters["missed"],
        "evaluated": engine.evaluate([batch_of(run.model, 5 + rank)] * (1 + rank)),
    }
    if run.keeps:
        engine.seal()
    engine.close(should_delete=not run.keeps)
    return told


def _fail(fails: dict[str, Any], rank: int, step: int) -> None:
    if (fails.get("rank"), fails.get("step")) != (rank, step):
        return
    if fails["how"] == "raise":
        raise ValueError("this rank fails")
    if fails["how"] == "exit":
        os._exit(9)
    while fails["how"] == "hang":
        time.sleep(1)


def run_ranks(run: RankRun, directory: str) -> list[dict[str, Any]]:
    """Fork the ranks of a run; what each found, or its error."""
    with tempfile.TemporaryDirectory(prefix="lohan-ranks-") as place:
        outputs = [pathlib.Path(place, f"{rank}.json") for rank in range(run.num_ranks)]
        children = [
            fork_rank(run, directory, rank, f"file://{place}/store", outputs[rank])
            for rank in range(run.num_ranks)
        ]
        for rank, child in enumerate(children):
            if rank == run.fails.get("rank") and run.fails["how"] == "hang":
                continue
            os.waitpid(child, 0)
        if run.fails.get("how") == "hang":
            os.kill(children[run.fails["rank"]], signal.SIGKILL)
            os.waitpid(children[run.fails["rank"]], 0)
        return [
            json.loads(one.read_text()) if one.exists() else {"error": "killed"} for one in outputs
        ]


def fork_rank(
    run: RankRun,
    directory: str,
    rank: int,
    store: str,
    output: pathlib.Path,
    *,
    enter: Callable[[], None] = lambda: None,
) -> int:
    """Start one rank; its process id. `enter` is what it does first."""
    child = os.fork()
    if child:
        return child
    torch.set_num_threads(1)
    unlike = dict(run.unlike) if rank == run.num_ranks - 1 else {}
    if "version" in unlike:
        told_version = unlike.pop("version")
        setattr(ranks, "version", lambda _: told_version)  # noqa: B010 - of a fork only
    run = replace(run, **unlike)
    try:
        enter()
        if run.device == accelerator.NAME:
            accelerator.load()
        if run.num_ranks > 1:
            dist.init_process_group("gloo", init_method=store, rank=rank, world_size=run.num_ranks)
        told = take(run, directory, rank)
    except BaseException as error:
        told = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
    output.write_text(json.dumps(told))
    os._exit(0)


def main() -> None:
    """Words: a directory, then runs as JSON; prints a list of what their first ranks found, or of
    what all did for one that fails."""
    directory, *runs = sys.argv[1:]
    for one in runs:
        run = RankRun(**json.loads(one))
        print(json.dumps(run_ranks(run, directory)), flush=True)


def as_word(run: RankRun) -> str:
    """For `main`."""
    return json.dumps(asdict(run))


def results_of(output: str, count: int) -> list[list[dict[str, Any]]]:
    """What the ranks of each of so many runs found, from what `main` printed."""
    lines = [line for line in output.splitlines() if line.startswith("[{")]
    assert len(lines) == count, output
    return [json.loads(line) for line in lines]


if __name__ == "__main__":
    main()
