"""`lohan train`, `verify` and `doctor` on the test accelerator, and TRL's own loop on it."""

import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import trl
from accelerate.utils import convert_outputs_to_fp32
from safetensors.torch import load_file

import lohan.verify
from lohan.train.trainer.trainer import SFTTrainer
from lohan.verify import all_cases
from support import accelerator, tiny_chat, trl_runs
from support.command_line import run_lohan
from support.small_training import make_place, train
from support.trainer_engines import attach_small

DEVICE = f"{accelerator.NAME}:0"
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*deprecated.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    # transformers knows by name which devices can do bf16.
    monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: True)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def test_lohan_train_gives_the_model_it_gives_on_the_processor(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels are the processor's here, so that its bits are those of the device too."""
    place = make_place(tmp_path, monkeypatch)
    monkeypatch.setattr("lohan.train.trainer.saving.attach_with", attach_small)
    models = []
    for device in (DEVICE, "cpu"):
        done = train(place, device=device, out=str(place / device.partition(":")[0]))
        assert done.exit_code == 0, done.stderr
        assert "step 3/3" in done.stdout
        models.append(load_file(place / device.partition(":")[0] / "model.safetensors"))
    assert models[0].keys() == models[1].keys()
    for name, values in models[0].items():
        assert torch.equal(values, models[1][name]), name


def arguments(out: pathlib.Path, **changes: Any) -> Any:
    given = {"use_cpu": False, "gradient_accumulation_steps": 2, **changes}
    return trl_runs.sft_arguments(out, **given)


def test_a_trainer_gives_the_losses_and_weights_of_trl_on_the_same_device(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lohan.train.trainer.saving.attach_with", attach_small)
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", DEVICE)
    tables = trl_runs.chat_tables(tiny_chat.conversations(14), num_to_evaluate=5)
    ours = SFTTrainer(
        tiny_chat.model(),
        arguments(tmp_path / "ours"),
        offload={"ssd": str(tmp_path / "ssd"), "device": DEVICE},
        **tables,
    )
    ours.train()
    assert ours.engine.device.torch_device == ours.args.device == ours.accelerator.device
    model = tiny_chat.model().to(DEVICE)
    model.forward = convert_outputs_to_fp32(model.forward)
    plain = trl.SFTTrainer(
        model,
        arguments(tmp_path / "plain", bf16=False, gradient_checkpointing=False),
        **tables,
    )
    assert plain.args.device == torch.device(DEVICE)
    plain.optimizer = trl_runs.master_optimizer(plain)
    plain.train()
    losses = [
        [
            entry[key]
            for entry in one.state.log_history
            for key in ("loss", "eval_loss")
            if key in entry
        ]
        for one in (ours, plain)
    ]
    assert losses[0] == losses[1]
    assert len(losses[0]) > 3
    trained = dict(ours.engine.weights())
    for name, parameter in plain.model.named_parameters():
        assert torch.equal(trained[name].to(parameter.dtype), parameter.cpu()), name
    ours.engine.close(should_delete=True)


def few_cases(monkeypatch: pytest.MonkeyPatch, *numbers: int) -> None:
    whole: Any = lohan.verify.verify_copy
    cases = [all_cases()[number] for number in numbers]
    monkeypatch.setattr(
        lohan.verify, "verify_copy", lambda copy, **given: whole(copy, **given | {"cases": cases})
    )


@pytest.mark.parametrize("device", [DEVICE, "cpu", "emulated", None])
def test_a_trainer_computes_where_the_engine_does_however_many_gpus_there_are(
    device: str | None, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Defects D2 and D3: transformers takes all GPUs it sees, and the first of them."""
    monkeypatch.setattr("lohan.train.trainer.saving.attach_with", attach_small)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    args = arguments(tmp_path / "ours", max_steps=1, eval_strategy="no")
    assert args.n_gpu == 2
    tables = trl_runs.chat_tables(tiny_chat.conversations(4), num_to_evaluate=1)
    offload = {"ssd": str(tmp_path / "ssd"), "device": device}
    trainer = SFTTrainer(tiny_chat.model(), args, offload=offload, **tables)
    expected = torch.device("cpu" if device in ("cpu", "emulated") else DEVICE)
    assert trainer.args.device == trainer.accelerator.device == expected
    assert trainer.args.n_gpu == (expected.type != "cpu")
    assert trainer.args.train_batch_size == 2
    if device is not None:  # the engine under tests takes no GPU by itself
        trainer.train()
        assert trainer.engine.device.torch_device == expected
        trainer.engine.close(should_delete=True)


@pytest.mark.parametrize("model", ["gpt2", "llama-3.1-8b"])
def test_lohan_verify_compares_every_bit(
    model: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few_cases(monkeypatch, 0, 13)
    ran = run_lohan("verify", model, "--steps", 2, "--ssd", tmp_path, "--device", DEVICE)
    assert ran.exit_code == 0, ran.stdout + ran.stderr
    assert "EQUAL: losses, masters, m and v have the same bits in all 2 cases" in ran.stdout
    assert DEVICE in ran.stdout


def test_lohan_verify_judges_by_size_what_has_no_bits_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An operator without a deterministic form: the plain run differs from its own second run."""
    from lohan.verify import compare

    few_cases(monkeypatch, 0)
    first_difference = compare.first_difference
    asked: list[Any] = []

    def differs_by_bits(judge: Any, found: Any, *, tolerance: float | None) -> Any:
        asked.append(tolerance)
        if tolerance is None:
            return compare.Difference(step=1, what="loss", expected=1.0, found=1.001)
        return first_difference(judge, found, tolerance=tolerance)

    monkeypatch.setattr(compare, "first_difference", differs_by_bits)
    ran = run_lohan("verify", "gpt2", "--steps", 1, "--device", DEVICE)
    assert ran.exit_code == 0, ran.stdout + ran.stderr
    assert "EQUAL within 5%" in ran.stdout
    assert asked == [None, None, compare.TOLERANCE]


def test_lohan_doctor_tries_the_device(tmp_path: pathlib.Path) -> None:
    ran = run_lohan("doctor", "--ssd", tmp_path, "--device", DEVICE)
    assert DEVICE in ran.stdout, ran.stdout + ran.stderr
    assert "not as promised" not in ran.stdout
