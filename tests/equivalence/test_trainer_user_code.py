"""What a user's code sees and does in `lohan.Trainer`, against transformers' own in memory."""

import copy
import functools
import pathlib
import pickle
import random
from collections.abc import Callable, Iterator
from typing import Any

import datasets
import numpy as np
import pytest
import safetensors.torch
import torch
import transformers
import trl
from transformers import TrainerCallback

from lohan.errors import ConfigError
from lohan.train.trainer.trainer import OffloadMixin, SFTTrainer, Trainer
from support import tiny_chat, trl_runs
from support.trainer_engines import attach_small

ENDED = tiny_chat.tokenizer().eos_token_id


@pytest.fixture(autouse=True)
def _small_and_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("lohan.train.trainer.saving.attach_with", attach_small)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def rows(num_rows: int = 8) -> list[dict[str, Any]]:
    generator = random.Random(0)
    made = []
    for number in range(num_rows):
        tokens = [generator.randrange(5, 300) for _ in range(6 + number % 4)]
        made.append({"input_ids": tokens, "labels": tokens, "weight": number % 3})
    return made


def padded(found: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    length = max(len(row["input_ids"]) for row in found)
    return {
        name: torch.tensor([[*row[name], *[fill] * (length - len(row[name]))] for row in found])
        for name, fill in (("input_ids", ENDED), ("labels", -100))
    }


def randomly_masked(found: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Draws from every generator there is."""
    batch = padded(found)
    batch["labels"][torch.rand(batch["labels"].shape) < 0.2] = -100
    batch["input_ids"][0, 0] = random.randrange(5, 300)
    batch["input_ids"][0, 1] = np.random.randint(5, 300)
    return batch


class WithWeights:
    """A collator that reads a column the model does not know, and counts its calls."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, found: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        self.num_calls += 1
        batch = padded(found)
        batch["labels"][torch.tensor([row["weight"] == 0 for row in found])] = -100
        batch["labels"][:, 1] = batch["input_ids"][:, 1]
        return batch


def settings(out: pathlib.Path, **changes: Any) -> Any:
    given: dict[str, Any] = {
        "use_cpu": True,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "per_device_eval_batch_size": 4,
        "max_steps": 3,
        "learning_rate": 1e-3,
        "max_grad_norm": 0.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    return transformers.TrainingArguments(output_dir=str(out), **{**given, **changes})


def pair(
    place: pathlib.Path, make: Callable[[], dict[str, Any]], **changes: Any
) -> Iterator[tuple[str, Any]]:
    """Ours on the engine, then the plain one with fp32 masters; each made when it is its turn,
    because making a trainer sets the seed."""
    given = {"train_dataset": datasets.Dataset.from_list(rows()), "data_collator": padded}
    ours = Trainer(
        tiny_chat.model(),
        settings(place / "ours", bf16=True, **changes),
        offload={"ssd": str(place / "ssd")},
        **{**given, **make()},
    )
    yield "ours", ours
    ours.close()
    plain = transformers.Trainer(
        tiny_chat.model(), settings(place / "plain", **changes), **{**given, **make()}
    )
    plain.optimizer = trl_runs.master_optimizer(plain)
    yield "plain", plain


def losses(trainer: Any, name: str = "loss") -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


@pytest.mark.parametrize("num_accumulated", [1, 2, 3])
def test_a_streamed_evaluation_counts_each_row_once(
    tmp_path: pathlib.Path, num_accumulated: int
) -> None:
    stream = datasets.Dataset.from_list(rows(6)).to_iterable_dataset()
    found = {
        name: trainer.evaluate(stream)["eval_loss"]
        for name, trainer in pair(tmp_path, dict, gradient_accumulation_steps=num_accumulated)
    }
    assert found["ours"] == found["plain"]


def test_a_stream_that_ends_within_a_step_is_refused_before_a_step_nobody_counts(
    tmp_path: pathlib.Path,
) -> None:
    stream = datasets.Dataset.from_list(rows(10)).to_iterable_dataset()
    _, ours = next(pair(tmp_path, lambda: {"train_dataset": stream}))
    with pytest.raises(ConfigError, match="1 of the 2 micro-batches"):
        ours.train()
    assert ours.engine.num_steps == ours.state.global_step == 2
    ours.close()


def test_what_a_loss_gathers_of_the_batches_before_the_last_is_not_cut(
    tmp_path: pathlib.Path,
) -> None:
    """accelerate cuts what is gathered to the rows of the last batch, once that was fetched."""

    def gather(trainer: Any, seen: list[int], model: Any, inputs: Any, **more: Any) -> Any:
        seen.append(len(trainer.accelerator.gather_for_metrics(inputs["input_ids"])))
        return type(trainer).compute_loss(trainer, model, inputs, **more)

    for name, trainer in pair(tmp_path, dict, gradient_accumulation_steps=3):
        seen: list[int] = []
        trainer.compute_loss = functools.partial(gather, trainer, seen)
        trainer.evaluate(datasets.Dataset.from_list(rows(10)))
        assert seen[-3:] == [4, 4, 2], name


@pytest.mark.parametrize(
    "make", [lambda: randomly_masked, WithWeights], ids=["drawing", "counting"]
)
def test_a_collator_of_ones_own_is_called_as_often_as_in_memory(
    tmp_path: pathlib.Path, make: Callable[[], Any]
) -> None:
    found = {}
    for name, trainer in pair(
        tmp_path, lambda: {"data_collator": make()}, remove_unused_columns=False
    ):
        trainer.train()
        found[name] = (losses(trainer), getattr(trainer.data_collator, "num_calls", None))
    assert len(found["ours"][0]) == 3
    assert found["ours"] == found["plain"]


def test_masks_drawn_by_a_collator_of_transformers_are_those_in_memory(
    tmp_path: pathlib.Path,
) -> None:
    tokenizer = tiny_chat.tokenizer()
    tokenizer.mask_token = "<|system|>"
    table = datasets.Dataset.from_list([{"input_ids": row["input_ids"]} for row in rows()])
    found = {}
    for name, trainer in pair(
        tmp_path,
        lambda: {
            "train_dataset": table,
            "data_collator": transformers.DataCollatorForLanguageModeling(
                tokenizer, mlm=True, mlm_probability=0.4
            ),
        },
    ):
        trainer.train()
        found[name] = losses(trainer)
    assert found["ours"] == found["plain"]


def test_a_loss_of_ones_own_with_a_memory_is_called_as_often_as_in_memory(
    tmp_path: pathlib.Path,
) -> None:
    num_calls = {"ours": 0, "plain": 0}
    found = {}

    def loss_of(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        num_calls[turn[0]] += 1
        logits = outputs.logits[:, :-1].float().flatten(0, 1)
        total = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
        return total * num_calls[turn[0]] / num_items_in_batch

    turn = ["ours"]
    for name, trainer in pair(tmp_path, lambda: {"compute_loss_func": loss_of}):
        turn[0] = name
        trainer.train()
        found[name] = losses(trainer)
    assert num_calls == {"ours": 6, "plain": 6}
    assert found["ours"] == found["plain"]


def test_the_tokens_of_a_reward_model_are_counted_once(tmp_path: pathlib.Path) -> None:
    class RewardTrainer(OffloadMixin, trl.RewardTrainer):
        pass

    def model() -> Any:
        torch.manual_seed(0)
        made = transformers.LlamaForSequenceClassification(tiny_chat.config(num_labels=1))
        return made.to(torch.bfloat16)

    table = datasets.Dataset.from_list(
        [
            {"chosen": "red sea " * (2 + number % 3), "rejected": "moon " * (3 + number % 2)}
            for number in range(8)
        ]
    )
    found = {}
    for name, kind, more in (
        ("ours", RewardTrainer, {"offload": {"ssd": str(tmp_path / "ssd")}}),
        ("plain", trl.RewardTrainer, {}),
    ):
        trainer = kind(
            model(),
            trl.RewardConfig(
                **{
                    **settings(tmp_path / name).to_dict(),
                    "bf16": False,
                    "gradient_checkpointing": False,
                }
            ),
            train_dataset=table,
            processing_class=tiny_chat.tokenizer(),
            **more,
        )
        if name == "plain":
            trainer.optimizer = trl_runs.master_optimizer(trainer)
        trainer.train()
        found[name] = {
            key: losses(trainer, key) for key in ("num_tokens", "mean_reward", "accuracy", "loss")
        }
        if name == "ours":
            trainer.close()
    assert found["ours"] == found["plain"]


def test_keys_to_ignore_are_left_out_of_predictions(tmp_path: pathlib.Path) -> None:
    table = datasets.Dataset.from_list(rows(4))
    found: dict[str, Any] = {}
    for name, trainer in pair(tmp_path, dict):
        trainer.model.config.output_hidden_states = True
        found[name] = trainer.predict(
            table, ignore_keys=["hidden_states", "past_key_values"]
        ).predictions
    assert isinstance(found["plain"], np.ndarray)
    assert np.array_equal(found["ours"], found["plain"])


class RateBeforeTheStep(TrainerCallback):
    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any
    ) -> None:
        if state.global_step == 1:
            for group in optimizer.param_groups:
                group["lr"] = 1e-2


def test_a_rate_set_after_the_engine_took_the_step_is_refused(tmp_path: pathlib.Path) -> None:
    _, ours = next(pair(tmp_path, lambda: {"callbacks": [RateBeforeTheStep()]}))
    with pytest.raises(ConfigError, match=r"lr .*on_step_begin"):
        ours.train()
    assert ours.engine.num_steps == 2
    ours.close()


class Reading(TrainerCallback):
    """Calls functions with the model at moments of a step, and keeps what they give or raise."""

    def __init__(self, moments: list[str], reads: dict[str, Callable[[Any], Any]]) -> None:
        self.found: dict[tuple[str, str], Any] = {}
        for moment in moments:
            setattr(self, moment, functools.partial(self._read_all, moment, reads))

    def _read_all(
        self, moment: str, reads: dict[str, Callable[[Any], Any]], *_: Any, **given: Any
    ) -> None:
        for name, read in reads.items():
            try:
                self.found[moment, name] = read(given["model"])
            except ConfigError as error:
                self.found[moment, name] = error


def first(model: Any) -> torch.nn.Parameter:
    found: torch.nn.Parameter = model.model.layers[0].mlp.up_proj.weight
    return found


@torch.no_grad()
def doubled(model: Any) -> Any:
    return first(model).mul_(2)


def replaced(model: Any) -> None:
    first(model).data = torch.ones(first(model).shape, dtype=torch.bfloat16)


READS: dict[str, Callable[[Any], Any]] = {
    "a norm": lambda model: first(model).norm().item(),
    "data": lambda model: first(model).data,
    "a copy": lambda model: first(model).detach().clone(),
    "an element": lambda model: first(model)[0, 0],
    "numpy": lambda model: first(model).numpy(),
    "a list": lambda model: first(model).tolist(),
    "another format": lambda model: model.float(),
    "comparing": lambda model: torch.equal(first(model), first(model)),
    "a product": lambda model: torch.zeros(1, 64).bfloat16() @ first(model),
    "state_dict": lambda model: model.state_dict(),
    "another model": copy.deepcopy,
    "a pickle": pickle.dumps,
    "writing": doubled,
    "other values": replaced,
    "a plain tensor": lambda model: first(model).as_subclass(torch.Tensor),
}


def test_reading_weights_that_are_offloaded_is_refused(tmp_path: pathlib.Path) -> None:
    callback = Reading(["on_train_begin", "on_step_end"], READS)
    _, ours = next(pair(tmp_path, lambda: {"callbacks": [callback]}, max_steps=1))
    ours.train()
    for place, found in callback.found.items():
        assert isinstance(found, ConfigError), (place, found)
        assert "offloaded" in str(found), place
    assert len(callback.found) == 2 * len(READS)
    ours.close()


GRADIENT_READS: dict[str, Callable[[Any], Any]] = {
    "each norm": lambda model: [p.grad.norm() for p in model.parameters() if p.grad is not None],
    "clipping": lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
}


def test_reading_gradients_that_were_used_is_refused(tmp_path: pathlib.Path) -> None:
    moments = ["on_substep_end", "on_pre_optimizer_step", "on_optimizer_step"]
    callback = Reading(moments, GRADIENT_READS)
    _, ours = next(pair(tmp_path, lambda: {"callbacks": [callback]}, max_steps=2))
    ours.train()
    for place, found in callback.found.items():
        assert isinstance(found, ConfigError), (place, found)
        assert "gradient" in str(found), place
    assert len(callback.found) == len(moments) * len(GRADIENT_READS)
    ours.close()


def known(model: Any) -> list[Any]:
    """What needs no values; gradients are none at the end of a step, as in memory."""
    model.zero_grad()
    return [
        (name, one.shape, one.dtype, one.numel(), one.requires_grad, one.grad, one.device.type)
        for name, one in model.named_parameters()
    ] + [
        model.num_parameters(),
        model.dtype,
        model.device.type,
        isinstance(repr(first(model)), str),
        isinstance(f"{first(model)}", str),
        first(model).type(),
        model.to("cpu") is model,
        model.bfloat16() is model,
    ]


def test_what_needs_no_values_is_as_in_memory(tmp_path: pathlib.Path) -> None:
    found = {}
    for name, trainer in pair(tmp_path, dict, max_steps=1):
        callback = Reading(["on_step_begin", "on_step_end"], {"known": known})
        trainer.add_callback(callback)
        trainer.train()
        found[name] = callback.found
    assert found["ours"] == found["plain"]
    assert len(found["ours"]) == 2


@pytest.mark.parametrize("is_sft", [False, True])
def test_a_model_given_by_name_is_not_computed_in_bf16_unless_asked(
    tmp_path: pathlib.Path, is_sft: bool
) -> None:
    tiny_chat.save_model(tmp_path / "model")
    args = settings(tmp_path / "out")
    if is_sft:
        args = trl_runs.sft_arguments(tmp_path / "out", bf16=False, eval_strategy="no")
    with pytest.raises(ConfigError, match="given by its name and neither bf16 nor fp16 is on"):
        (SFTTrainer if is_sft else Trainer)(
            str(tmp_path / "model"),
            args,
            train_dataset=datasets.Dataset.from_list(rows()),
            offload={"ssd": str(tmp_path / "ssd")},
        )
    assert not (tmp_path / "ssd").exists()
    assert not (tmp_path / "out").exists()


class Line(torch.nn.Module):
    """A model of one's own: no blocks, no configuration, no tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = torch.nn.Parameter(torch.tensor(0.5, dtype=torch.bfloat16))
        self.offset = torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        y = x * self.slope * self.scale + self.offset
        return (y,) if labels is None else ((y - labels).float().square().mean(), y)


class Points(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Rows that are no table."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        x = torch.tensor([float(index), 1.0, -2.0])
        return {"x": x, "labels": 3 * x + 1}


# Told, or a warning where another test has turned logs down.
@pytest.mark.filterwarnings("ignore:run .* has ended:lohan.errors.LohanWarning")
def test_a_model_of_ones_own_without_blocks_is_evaluated_trained_and_saved(
    tmp_path: pathlib.Path,
) -> None:
    def made(kind: Any, out: str, **more: Any) -> Any:
        args = settings(tmp_path / out, num_train_epochs=1, max_steps=-1)
        args.bf16 = kind is Trainer  # in memory that would be autocast
        rows = {"train_dataset": Points(), "eval_dataset": Points()}
        return kind(Line(), args, **rows, **more)

    offload = {"ssd": str(tmp_path / "ssd")}
    plain = made(transformers.Trainer, "plain")
    plain.optimizer = trl_runs.master_optimizer(plain)
    first = plain.evaluate()["eval_loss"]
    plain.train()
    asked = made(Trainer, "ours", offload=offload)
    assert {type(one).__name__ for one in asked.callback_handler.callbacks} == {
        type(one).__name__ for one in plain.callback_handler.callbacks
    }
    assert asked.evaluate()["eval_loss"] == first
    asked.close()
    ours = made(Trainer, "ours", offload=offload)  # in a folder that was only evaluated into
    ours.train()
    assert losses(ours) == losses(plain)
    ours.save_model(str(tmp_path / "saved"))
    saved = safetensors.torch.load_file(tmp_path / "saved" / "model.safetensors")
    assert saved.keys() == plain.model.state_dict().keys()
    for name, value in plain.model.state_dict().items():
        assert torch.equal(saved[name], value), name
    ours.close()


class _OfFloats(torch.nn.Module):
    """A model of one's own: no configuration, floats go in."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))
        self.head = torch.nn.Linear(8, 2)

    def forward(self, features: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        for layer in self.layers:
            features = features + torch.tanh(layer(features))
        logits = self.head(features)
        loss = None if labels is None else torch.nn.functional.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits}


def test_a_model_of_floats_has_the_losses_of_autocast(tmp_path: pathlib.Path) -> None:
    """As transformers' trainer with bf16=True: layers narrow what they are given."""
    torch.manual_seed(3)
    rows = [{"features": torch.randn(8), "labels": index % 2} for index in range(24)]
    found = {}
    for name, kind in (("ours", Trainer), ("plain", transformers.Trainer)):
        torch.manual_seed(4)
        model = _OfFloats()
        for parameter in model.parameters():  # so that masters begin with what computes
            parameter.data = parameter.data.bfloat16().float()
        args = transformers.TrainingArguments(
            output_dir=str(tmp_path / name),
            use_cpu=True,
            bf16=True,
            max_grad_norm=0.0,
            learning_rate=1e-2,
            max_steps=5,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        more: dict[str, Any] = {"offload": {"ssd": str(tmp_path)}} if name == "ours" else {}
        trainer = kind(model, args, train_dataset=rows, **more)
        if name == "plain":
            trainer.optimizer = trl_runs.master_optimizer(trainer)
        trainer.train()
        history = trainer.state.log_history
        found[name] = [entry["loss"] for entry in history if "loss" in entry]
        if name == "ours":
            trainer.close()
    assert len(found["ours"]) == 5
    assert found["ours"] == found["plain"]
