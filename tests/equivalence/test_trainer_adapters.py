"""Adapters on a frozen base whose weights are on disk, against TRL and PEFT in memory."""

import inspect
import json
import pathlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import peft
import pytest
import safetensors.torch
import torch
import transformers
import trl
from accelerate.utils import convert_outputs_to_fp32

import lohan
from lohan.engine.run_setup import compute_format_of
from lohan.errors import ConfigError
from lohan.store import ComputeFormat, Part
from lohan.train.adapters.adapting import ADAPTER, Adapting
from lohan.train.adapters.merging import adapted_skeleton
from lohan.train.run.checking import check_directory
from lohan.train.run.sealed_runs import export_run, find_run
from lohan.train.trainer.trainer import SFTTrainer
from support import tiny_chat, trl_runs
from support.engine_runs import EngineCase, attach
from support.trainer_engines import attach_small

ROWS = tiny_chat.conversations(12)
pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated.*:FutureWarning")
LORA = {"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM"}
PROMPTS = {"num_virtual_tokens": 3, "task_type": "CAUSAL_LM"}
KINDS: dict[str, Callable[[], peft.PeftConfig]] = {
    "lora": lambda: peft.LoraConfig(**LORA, target_modules="all-linear"),
    "dora": lambda: peft.LoraConfig(**LORA, use_dora=True),
    "modules to save": lambda: peft.LoraConfig(**LORA, modules_to_save=["lm_head"]),
    "rank-stabilised": lambda: peft.LoraConfig(
        **LORA, use_rslora=True, lora_dropout=0.1, target_modules=["embed_tokens", "v_proj"]
    ),
    "ia3": lambda: peft.IA3Config(task_type="CAUSAL_LM"),
    "prompts": lambda: peft.PromptTuningConfig(**PROMPTS, prompt_tuning_init="RANDOM"),
    "prefix": lambda: peft.PrefixTuningConfig(**PROMPTS),
    "prefix by a network": lambda: peft.PrefixTuningConfig(
        **PROMPTS, prefix_projection=True, encoder_hidden_size=8
    ),
    "p-tuning": lambda: peft.PromptEncoderConfig(**PROMPTS, encoder_hidden_size=8),
}
PROMPT_KINDS = ("prompts", "prefix", "prefix by a network", "p-tuning")
some_kinds = pytest.mark.parametrize(
    "kind", [k if k == "lora" else pytest.param(k, marks=pytest.mark.slow) for k in KINDS]
)


@pytest.fixture(autouse=True)
def _small_and_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("lohan.train.trainer.saving.attach_with", attach_small)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def settings(out: pathlib.Path, **changes: Any) -> Any:
    short = {"gradient_accumulation_steps": 2, "max_steps": 3, "learning_rate": 1e-2}
    return trl_runs.sft_arguments(out, **{**short, **changes})


def tables() -> dict[str, Any]:
    return trl_runs.chat_tables(ROWS, num_to_evaluate=3)


def in_memory(out: pathlib.Path, kind: str, **changes: Any) -> trl.SFTTrainer:
    """TRL's own, with adapters in what the base computes in and an AdamW that keeps masters."""
    made = trl.SFTTrainer(
        tiny_chat.model(tie_word_embeddings=False),
        # PEFT's cache of a prefix grows once more where a layer runs again.
        settings(out, bf16=False, gradient_checkpointing="prefix" not in kind, **changes),
        peft_config=KINDS[kind](),
        **tables(),
    )
    made.optimizer = trl_runs.master_optimizer(made)
    for parameter in made.model.parameters():
        if parameter.requires_grad:  # PEFT draws prompts in fp32, which masters begin with
            made.optimizer.begin_with(parameter, parameter.detach().float())
        parameter.data = parameter.data.to(torch.bfloat16)
    made.model.forward = convert_outputs_to_fp32(made.model.forward)
    return made


def losses(trainer: Any) -> list[float]:
    entries = trainer.state.log_history
    return [entry[key] for entry in entries for key in ("loss", "eval_loss") if key in entry]


def trained(model: Any) -> dict[str, torch.Tensor]:
    return {name: one for name, one in model.named_parameters() if one.requires_grad}


@some_kinds
def test_an_adapter_has_the_losses_and_weights_of_trl(tmp_path: pathlib.Path, kind: str) -> None:
    # With gradient checkpointing, as is TRL's default, which the planner takes over.
    ours = SFTTrainer(
        tiny_chat.model(tie_word_embeddings=False),
        settings(tmp_path / "ours"),
        peft_config=KINDS[kind](),
        offload={"ssd": str(tmp_path / "ssd")},
        **tables(),
    )
    ours.train()
    plain = in_memory(tmp_path / "plain", kind)
    plain.train()
    assert losses(ours) == losses(plain)
    assert len(losses(ours)) == 5
    found = dict(ours.engine.weights())
    for name, parameter in plain.model.named_parameters():
        assert torch.equal(found[name].to(parameter.dtype), parameter), name
    ours.close()


def test_with_one_micro_batch_it_is_trl_as_it_is(tmp_path: pathlib.Path) -> None:
    """Autocast, fp32 adapters: the same products in bf16, the same updates in fp32."""
    changes = {"gradient_accumulation_steps": 1}
    base = tiny_chat.model()
    ours = SFTTrainer(
        base,
        settings(tmp_path / "ours", **changes),
        peft_config=KINDS["lora"](),
        offload={"ssd": str(tmp_path / "ssd")},
        **tables(),
    )
    ours.train()
    plain = trl.SFTTrainer(
        tiny_chat.model(),
        settings(tmp_path / "plain", **changes),
        peft_config=KINDS["lora"](),
        **tables(),
    )
    assert plain.args.bf16
    assert {one.dtype for one in trained(plain.model).values()} == {torch.float32}
    plain.optimizer = trl_runs.master_optimizer(plain)
    plain.train()
    assert losses(ours) == losses(plain)
    found = dict(ours.engine.weights(are_frozen_wanted=False))
    assert found.keys() == trained(plain.model).keys()
    for name, parameter in trained(plain.model).items():
        assert torch.equal(found[name], parameter), name
    ours.close()


def named(folder: pathlib.Path, out: str, kind: str, *, steps: int = 4) -> SFTTrainer:
    arguments = settings(
        folder / out, max_steps=steps, save_strategy="steps", save_steps=2, eval_strategy="no"
    )
    return SFTTrainer(
        str(folder / "model"),
        arguments,
        peft_config=KINDS[kind](),
        offload={"ssd": str(folder / "ssd"), "archive_steps": 2},
        **tables(),
    )


def adapter_in(folder: pathlib.Path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(folder / "adapter_model.safetensors")


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


def on_base(folder: pathlib.Path, adapter: pathlib.Path) -> Any:
    kind: Any = transformers.AutoModelForCausalLM
    base = kind.from_pretrained(folder / "model", dtype=torch.bfloat16)
    return peft.PeftModel.from_pretrained(base, adapter)


@pytest.mark.parametrize("kind", ["lora", pytest.param("modules to save", marks=pytest.mark.slow)])
def test_a_run_by_name_is_stopped_resumed_saved_and_merged(
    tmp_path: pathlib.Path, kind: str
) -> None:
    tiny_chat.save_model(tmp_path / "model", tie_word_embeddings=False)
    whole = named(tmp_path, "whole", kind)
    whole.train()
    # First values are those of a model in memory with the same seed.
    drawn = in_memory(tmp_path / "plain", kind, max_steps=4, eval_strategy="no")
    drawn.train()
    assert losses(whole) == losses(drawn)
    # What is trained has two slots of states; the base lies there once, in 16 bits.
    for block in whole.engine.store.layout.blocks:
        assert set(block.parts) <= {Part.P16, Part.LO16, Part.M32, Part.V32, Part.FROZEN16}
        assert block.num_trainable < block.num_frozen or kind != "lora"
    whole.save_model()
    whole.close()

    stopped = named(tmp_path, "stopped", kind)
    stopped.add_callback(_StopAfter(2))
    stopped.train()
    stopped.close()
    resumed = named(tmp_path, "stopped", kind)
    resumed.train(resume_from_checkpoint=True)
    resumed.save_model()
    resumed.close()
    moved = named(tmp_path, "moved", kind)
    moved.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    moved.save_model()
    moved.close()
    expected = adapter_in(tmp_path / "whole")
    assert same(adapter_in(tmp_path / "stopped"), expected)
    assert same(adapter_in(tmp_path / "moved"), expected)
    states = tmp_path / "whole" / "checkpoint-2" / "states"
    sizes = sum(path.stat().st_size for path in states.glob("*.safetensors"))
    assert sizes < 12 * sum(t.numel() for t in expected.values()) + 30_000

    (checked,) = check_directory(tmp_path / "whole", [], quick=False, trust_remote_code=False)
    assert not checked["problems"]
    run = find_run(str(tmp_path / "whole"))
    export_run(run, tmp_path / "adapter")
    assert same(adapter_in(tmp_path / "adapter"), expected)
    for folder in ("whole", "adapter"):
        fields = json.loads((tmp_path / folder / "adapter_config.json").read_text())
        assert fields["base_model_name_or_path"] == str(tmp_path / "model")
    loaded = on_base(tmp_path, tmp_path / "adapter")
    assert all(one.dtype is torch.float32 for n, one in trained(loaded).items() if "lora_" in n)
    export_run(run, tmp_path / "merged", should_merge_adapter=True)
    exported = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "merged", dtype=torch.bfloat16
    )
    merged = dict(loaded.merge_and_unload().named_parameters())
    before = dict(tiny_chat.model(tie_word_embeddings=False).named_parameters())
    for name, parameter in exported.named_parameters():
        assert torch.equal(parameter, merged[name].to(torch.bfloat16)), name
    # The adapter alone is in the states: without its base only the tokenizer is missing.
    (tmp_path / "model").rename(tmp_path / "elsewhere")
    alone = export_run(run, tmp_path / "alone")
    assert "without the tokenizer" in alone.remarks[-1]
    assert same(adapter_in(tmp_path / "alone"), expected)
    with pytest.raises(ConfigError):
        export_run(run, tmp_path / "not", should_merge_adapter=True)
    changed = [n for n, p in exported.named_parameters() if not torch.equal(p, before[n])]
    assert any("q_proj" in name for name in changed)
    assert not any("norm" in name for name in changed)


@pytest.mark.parametrize(
    "kind",
    ["p-tuning", *(pytest.param(k, marks=pytest.mark.slow) for k in PROMPT_KINDS[:3])],
)
def test_prompts_by_name_are_stopped_resumed_and_saved_as_peft_saves_them(
    tmp_path: pathlib.Path, kind: str
) -> None:
    tiny_chat.save_model(tmp_path / "model", tie_word_embeddings=False)
    whole = named(tmp_path, "whole", kind)
    whole.train()
    drawn = in_memory(tmp_path / "plain", kind, max_steps=4, eval_strategy="no")
    drawn.train()
    assert losses(whole) == losses(drawn)
    whole.save_model()
    masters = dict(whole.engine.weights(are_frozen_wanted=False))
    whole.close()
    # PEFT's own file of the same adapter in fp32.
    for name, parameter in trained(drawn.model).items():
        parameter.data = masters[name]
    expected = peft.get_peft_model_state_dict(drawn.model.eval())
    assert same(adapter_in(tmp_path / "whole"), expected)

    stopped = named(tmp_path, "stopped", kind)
    stopped.add_callback(_StopAfter(2))
    stopped.train()
    stopped.close()
    resumed = named(tmp_path, "stopped", kind)
    resumed.train(resume_from_checkpoint=True)
    resumed.save_model()
    resumed.close()
    assert same(adapter_in(tmp_path / "stopped"), expected)
    run = find_run(str(tmp_path / "whole"))
    export_run(run, tmp_path / "adapter")
    assert same(adapter_in(tmp_path / "adapter"), expected)
    loaded = on_base(tmp_path, tmp_path / "adapter")
    assert torch.equal(
        loaded.prompt_encoder["default"].embedding.weight, expected["prompt_embeddings"]
    )
    with pytest.raises(ConfigError, match="it is prompts"):
        export_run(run, tmp_path / "not", should_merge_adapter=True)


class _StopAfter(transformers.TrainerCallback):
    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step == self._step


def test_adapters_compute_in_the_type_of_the_base_and_start_from_fp32(
    tmp_path: pathlib.Path,
) -> None:
    tiny_chat.save_model(tmp_path / "model")
    trainer = SFTTrainer(
        str(tmp_path / "model"),
        settings(tmp_path / "out", bf16=False, fp16=True),
        peft_config=KINDS["lora"](),
        offload={"ssd": str(tmp_path / "ssd")},
        **tables(),
    )
    given = dict(trainer.first_weights() or ())
    assert {given[name].dtype for name in trained(trainer.model)} == {torch.float32}
    assert compute_format_of(trainer.model) is ComputeFormat.FP16


def test_another_adapter_is_another_run(tmp_path: pathlib.Path) -> None:
    tiny_chat.save_model(tmp_path / "model")
    first = named(tmp_path, "out", "lora", steps=1)
    first.train()
    first.close()
    other = named(tmp_path, "out", "lora", steps=1)
    other.model.peft_config["default"].lora_alpha = 9
    with pytest.raises(ConfigError, match=r"adapter\.lora_alpha: 8 -> 9"):
        other.train(resume_from_checkpoint=True)
    other.close()


def test_a_step_writes_the_states_of_the_adapter_and_reads_the_base_once_per_pass(
    tmp_path: pathlib.Path,
) -> None:
    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=4,
    )
    torch.manual_seed(0)
    base = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    model = peft.get_peft_model(base, peft.LoraConfig(r=8, target_modules="all-linear")).train()
    num_trained = sum(one.numel() for one in trained(model).values())
    num_frozen = sum(one.numel() for one in model.parameters()) - num_trained
    num_once = 2 * 512 * 256 + 256  # embedding, head and the last norm take part in one pass
    optimizer = lohan.AdamW(trained(model).values(), lr=1e-3, max_grad_norm=1.0)
    case = EngineCase(residents=False, device="emulated")
    tokens = torch.randint(0, 512, (1, 8))
    with attach(case, model, optimizer, tmp_path) as engine:
        first_bytes = engine.store.counters.written_bytes
        assert 0 <= first_bytes - 2 * num_frozen - 12 * num_trained < 64 << 10
        counted = []
        for _ in range(3):
            engine.step([{"input_ids": tokens, "labels": tokens}])
            engine.synchronize()
            counted.append(engine.traffic)
        engine.close(should_delete=True)
    _, before, after = counted
    assert after.written_bytes - before.written_bytes == 12 * num_trained
    # P16 of the adapter in both passes, its states once; what shares a page is read twice.
    expected = 2 * (2 * num_frozen - num_once) + (2 + 2 + 12) * num_trained
    assert 0 <= after.read_bytes - before.read_bytes - expected < 64 << 10


REFUSED = {
    "prompt_tuning_init=TEXT": lambda: peft.PromptTuningConfig(
        **PROMPTS,
        prompt_tuning_init="TEXT",
        prompt_tuning_init_text="a",
        tokenizer_name_or_path="a",
    ),
    "task_type=SEQ_CLS": lambda: peft.PromptTuningConfig(num_virtual_tokens=3, task_type="SEQ_CLS"),
    "LOHA": lambda: peft.LoHaConfig(task_type="CAUSAL_LM"),
    "layer_replication": lambda: peft.LoraConfig(**LORA, layer_replication=[(0, 2), (1, 2)]),
    "target_parameters": lambda: peft.LoraConfig(**LORA, target_parameters=["q_proj.weight"]),
    "alora_invocation_tokens": lambda: peft.LoraConfig(**LORA, alora_invocation_tokens=[1]),
    "use_dora": lambda: peft.LoraConfig(**LORA, use_dora=True),
    "pissa": lambda: peft.LoraConfig(**LORA, init_lora_weights="pissa"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_compared_is_refused_by_name_before_anything_is_written(
    tmp_path: pathlib.Path, name: str
) -> None:
    tiny_chat.save_model(tmp_path / "model")
    with pytest.raises(ConfigError, match=name):
        SFTTrainer(
            str(tmp_path / "model"),
            settings(tmp_path / "out"),
            peft_config=REFUSED[name](),
            offload={"ssd": str(tmp_path / "ssd")},
            **tables(),
        )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def test_an_adapter_may_be_given_by_its_place(tmp_path: pathlib.Path) -> None:
    tiny_chat.save_model(tmp_path / "model")
    names = list(inspect.signature(trl.SFTTrainer.__init__).parameters)[3:]
    given = {**dict.fromkeys(names), **tables(), "peft_config": KINDS["lora"]()}
    given["optimizers"] = (None, None)
    values = [given[name] for name in names[: names.index("peft_config") + 1]]
    trainer = SFTTrainer(
        str(tmp_path / "model"),
        settings(tmp_path / "out"),
        *values,
        offload={"ssd": str(tmp_path / "ssd")},
    )
    assert trainer.adapting.is_on
    trainer.close()


def test_a_base_that_is_one_file_is_called_by_its_whole_path(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.gguf").touch()
    model = tiny_chat.model()
    adapting = Adapting(model, KINDS["lora"](), is_named=True)
    adapting.finish(peft.get_peft_model(model, KINDS["lora"]()))
    fields = adapting.sealed("base.gguf")[ADAPTER]
    assert fields["base_model_name_or_path"] == str(tmp_path / "base.gguf")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # PEFT's, of a base that lies elsewhere
        adapted_skeleton(tiny_chat.model().to("meta"), fields)


def quantized() -> Any:
    model = tiny_chat.model()
    model.is_loaded_in_4bit = True
    return model


def with_two() -> Any:
    model = peft.get_peft_model(tiny_chat.model(), KINDS["lora"]())
    model.add_adapter("second", KINDS["lora"]())
    return model


def with_merged() -> Any:
    model = peft.get_peft_model(tiny_chat.model(), KINDS["lora"]())
    model.merge_adapter()
    return model


def by_transformers() -> Any:
    model = tiny_chat.model()
    model.add_adapter(KINDS["lora"]())
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (quantized, "are quantized"),
        (with_two, "2 adapters: default, second"),
        (with_merged, "merged into"),
        (by_transformers, "added to LlamaForCausalLM by transformers"),
    ],
)
def test_models_whose_adapter_could_not_be_saved_are_refused(
    tmp_path: pathlib.Path, make: Callable[[], Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        SFTTrainer(
            make(), settings(tmp_path / "out"), offload={"ssd": str(tmp_path / "ssd")}, **tables()
        )
    assert not any(tmp_path.iterdir())
