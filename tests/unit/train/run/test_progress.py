"""What a run shows: the plan in words, one line per step, a bar in a terminal."""

import io
import json
import pathlib
import types
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from lohan.hardware.presets import machine_named
from lohan.model.names import shape_of
from lohan.plan import make_plan
from lohan.plan.plan import Plan
from lohan.plan.workload import Workload
from lohan.simulate import SimulatedStep, simulate_plan
from lohan.simulate.answers.advice import advice_for
from lohan.simulate.bottleneck import lane_words
from lohan.train.run.plan_summary import cautions, plan_in_words
from lohan.train.run.progress import ConsoleProgress, append_log, step_numbers


@pytest.fixture(scope="module")
def planned() -> tuple[Plan, SimulatedStep]:
    machine = machine_named("paper-4090")
    workload = Workload(batch=8, sequence=1024, num_micro_batches=2)
    plan = make_plan("lohan+", machine, shape_of("gpt-6b"), workload)
    return plan, simulate_plan(plan, machine, num_steps=3)


def trainer(planned: tuple[Plan, SimulatedStep] | None, **changes: Any) -> Any:
    result = types.SimpleNamespace(
        seconds=2.0,
        tokens=100,
        read_bytes=5,
        written_bytes=7_000_000,
        busy={"ssd_read": 0.5, "gpu": 0.75},  # as lanes came to work
        bottleneck="gpu",
        is_skipped=False,
        loss_scale=None,
        predicted_seconds=2.5 if planned else None,
        **changes,
    )
    plan, prediction = planned or (None, None)
    engine = types.SimpleNamespace(
        machine=machine_named("paper-4090"),
        run_id="abc",
        plan=plan,
        prediction=prediction,
        rates_note="at a burst rate",
    )
    args = types.SimpleNamespace(
        save_strategy="steps", save_steps=5, max_steps=10, num_train_epochs=3
    )
    offload = types.SimpleNamespace(archive_steps=None, save_model_steps=None, write_budget=None)
    return types.SimpleNamespace(
        last_step=result,
        engine=engine,
        args=args,
        offload=offload,
        written_bytes=4 * 10**9,
        rooms=[],
        is_loss_of_tokens=True,
    )


def shown(made: Any, *, is_terminal: bool = False) -> tuple[ConsoleProgress, io.StringIO]:
    text = io.StringIO()
    console = Console(file=text, force_terminal=is_terminal, width=200, highlight=False)
    return ConsoleProgress(made, console), text


STATE = types.SimpleNamespace(global_step=0, max_steps=10, epoch=None)
ARGS = types.SimpleNamespace(gradient_accumulation_steps=2, per_device_train_batch_size=4)


def test_a_plan_in_words_says_fit_time_bytes_wear_and_bottleneck(
    planned: tuple[Plan, SimulatedStep],
) -> None:
    text = "\n".join(plan_in_words(*planned, num_steps=100))
    for words in (
        "fits: GPU",
        "RAM",
        "SSD",
        "limit (what the step waits for)",
        "a step",
        "rated life",
        "activations",
    ):
        assert words in text
    assert "predicted" not in "\n".join(plan_in_words(planned[0], None, num_steps=100))


def test_the_plan_is_shown_once_before_the_first_step(planned: Any) -> None:
    progress, text = shown(trainer(planned))
    progress.on_train_begin(ARGS, STATE, None)
    progress.on_step_end(ARGS, STATE, None)
    assert text.getvalue().count("predicted for 10 steps") == 1
    assert "beside 4.0 GB so far" in text.getvalue()
    assert "; at a burst rate" in text.getvalue()
    assert "training begins at step 0 of 10 (2 micro-batches of 4 rows" in text.getvalue()


def test_a_step_is_one_line_of_100_columns(planned: Any) -> None:
    made = trainer(planned)
    made.last_step.bottleneck = "SSD writes (97% of the step)"
    progress, text = shown(made)
    state = types.SimpleNamespace(global_step=1234, max_steps=9999, epoch=2.345)
    logs = {"loss": 1.25, "learning_rate": 1e-5, "grad_norm": 0.5, **step_numbers(made)}
    logs["tokens_per_second"] = 1234.5
    progress.on_log(ARGS, state, None, logs)
    progress.on_log(ARGS, state, None, {**logs, "loss": 2.25})
    first, second = text.getvalue().splitlines()
    assert len(first) <= 100
    for words in (
        "step 1234/9999",
        "epoch 2.35",
        "loss 1.25 (~1.25)",
        "1,234 tok/s",
        "left",
        "limit: SSD writes",
    ):
        assert words in first, words
    # 0.9 of one step's weight of 0.1, and 0.1 of the next.
    assert f"loss 2.25 (~{(0.09 * 1.25 + 0.1 * 2.25) / 0.19:.4g})" in second


@pytest.mark.parametrize("machine_name", ["paper-4090", "a processor"])
def test_a_step_that_any_lane_limits_fits_100_columns(planned: Any, machine_name: str) -> None:
    machine = machine_named("paper-4090")
    if machine_name == "a processor":
        machine = replace(machine, gpu=replace(machine.gpu, is_processor=True))
    state = types.SimpleNamespace(global_step=1234, max_steps=9999, epoch=2.345)
    for words in lane_words(machine).values():
        made = trainer(planned)
        made.last_step.bottleneck = f"{words} (97% of the step)"
        progress, text = shown(made)
        logs = {"loss": 1.253, **step_numbers(made), "tokens_per_second": 12345.6}
        progress.on_log(ARGS, state, None, logs)
        assert text.getvalue().endswith(f"limit: {words}\n")
        assert len(text.getvalue().rstrip()) <= 100


def test_at_the_end_it_is_said_how_far_off_predictions_were(planned: Any) -> None:
    progress, text = shown(trainer(planned))
    progress.on_train_begin(ARGS, STATE, None)
    for step, error in enumerate([9.0, 9.0, 9.0, 9.0, 0.04, -0.02, 0.5], start=1):
        state = types.SimpleNamespace(global_step=step, max_steps=10, epoch=None)
        progress.on_log(ARGS, state, None, {"loss": 1.0, "prediction_error": error})
    progress.on_train_end(ARGS, STATE, None)
    assert "from step 5 on the median step was 4% off its prediction" in text.getvalue()


def test_a_limit_names_the_lanes_without_their_shares(planned: Any) -> None:
    made = trainer(planned)
    made.last_step.bottleneck = "waiting of the processor (70%) and SSD writes (60%) for each other"
    progress, text = shown(made)
    progress.on_log(ARGS, STATE, None, {"loss": 1.0})
    assert "limit: the processor and SSD writes\n" in text.getvalue()


def test_the_mean_loss_leaves_out_what_is_not_finite(planned: Any) -> None:
    progress, text = shown(trainer(planned))
    for loss in (2.0, float("nan"), 2.0):
        progress.on_log(ARGS, STATE, None, {"loss": loss})
    assert text.getvalue().count("(~2)") == 3


def test_a_seal_says_once_what_it_is(planned: Any) -> None:
    progress, text = shown(trainer(planned))
    progress.on_save(ARGS, STATE, None)
    progress.on_save(ARGS, STATE, None)
    assert text.getvalue().count("a resume goes on from here") == 1


def test_a_loss_that_is_no_number_is_shown(planned: Any) -> None:
    progress, text = shown(trainer(planned))
    progress.on_log(ARGS, STATE, None, {"loss": float("nan")})
    assert "loss nan" in text.getvalue()


def test_an_evaluation_shows_loss_perplexity_and_accuracy(planned: Any) -> None:
    progress, text = shown(trainer(planned))
    progress.on_log(ARGS, STATE, None, {"eval_loss": 1.0, "eval_mean_token_accuracy": 0.25})
    assert "eval_loss 1.0000, perplexity 2.72, token accuracy 25.0%" in text.getvalue()


def test_a_loss_of_pairs_has_no_perplexity(planned: Any) -> None:
    of_pairs = trainer(planned)
    of_pairs.is_loss_of_tokens = False
    progress, text = shown(of_pairs)
    progress.on_log(ARGS, STATE, None, {"eval_loss": 0.7, "eval_nll_loss": 1.0})
    assert "eval_loss 0.7000" in text.getvalue()
    assert "perplexity" not in text.getvalue()


def test_in_a_terminal_a_bar_shows_the_time_left(planned: Any) -> None:
    progress, text = shown(trainer(planned), is_terminal=True)
    progress.on_train_begin(ARGS, STATE, None)
    assert "left (predicted)" in text.getvalue()
    progress.on_step_end(ARGS, types.SimpleNamespace(global_step=1, max_steps=10), None)
    progress.close()
    progress.close()
    assert "1/10" in text.getvalue()


def test_without_a_step_there_are_no_numbers() -> None:
    assert step_numbers(types.SimpleNamespace(last_step=None)) == {}


def test_a_batch_that_costs_much_and_worn_drives_are_said_before_the_first_step() -> None:
    machine = machine_named("desktop-4090").with_ram(16 << 30)
    workload = Workload(batch=1, sequence=1024, num_micro_batches=1)
    plan = make_plan("lohan+", machine, shape_of("gpt-1.55b"), workload)
    step = simulate_plan(plan, machine, num_steps=3)
    worn, larger = cautions(plan, step, machine, num_steps=10**6)
    assert "of the drives' rated life" in worn
    assert "rows a step instead of 1 (gradient_accumulation_steps)" in larger
    assert cautions(plan, None, machine, num_steps=10) == []


@pytest.mark.slow
def test_the_larger_batch_is_that_of_the_advice_at_the_end() -> None:
    """On the machine as the budgets leave it: a run given less RAM has other larger batches."""
    machine = machine_named("desktop-4090")
    workload = Workload(batch=1, sequence=1024, num_micro_batches=1)
    plan = make_plan("lohan+", machine.with_ram(16 << 30), shape_of("gpt-1.55b"), workload)
    step = simulate_plan(plan, machine, num_steps=3)
    advice = advice_for(plan, machine)
    assert advice is not None
    (end,) = [one for one in advice if "a batch of" in one.change]
    (start,) = [one for one in cautions(plan, step, machine, num_steps=1) if "rows a step" in one]
    batch = int(end.change.split()[3].replace(",", ""))
    assert start.startswith(f"{batch} rows a step instead of 1")
    assert f"would be {end.factor:.1f}x as fast" in start


@pytest.mark.parametrize("left", [b"", b"\0" * 700, b'{"step": 2, "lo'])
def test_a_log_goes_on_behind_its_last_whole_line(left: bytes, tmp_path: pathlib.Path) -> None:
    """A power cut leaves zeros where lines were not flushed, a full drive half a line."""
    args = types.SimpleNamespace(output_dir=str(tmp_path))
    append_log(args, {"step": 1})
    path = tmp_path / "_lohan" / "log.jsonl"
    with open(path, "ab") as file:
        file.write(left)
    append_log(args, {"step": 2})
    append_log(args, {"step": 3})
    lines = path.read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]
