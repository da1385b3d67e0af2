"""Settings, rows or the model changed between a stop and the resume.

Owns what is changed. What decides the weights must be refused, by name, with nothing of the run
changed; what does not must end with the bytes of the undisturbed run. So must a resume once
everything is put back.
"""

import hashlib
import json
import pathlib
from collections.abc import Callable

from torturing import judge
from torturing.lives import Life
from torturing.places import Run

DECIDING = {
    "learning_rate": ("2e-3", "1.0000001e-3"),
    "seed": ("7", "43"),
    "data_seed": ("5",),
    "weight_decay": ("0.1",),
    "adam_beta1": ("0.8",),
    "adam_epsilon": ("1e-7",),
    "max_grad_norm": ("0.5",),
    "lr_scheduler_type": ("cosine", "constant"),
    "warmup_steps": ("2",),
    "gradient_accumulation_steps": ("1", "3"),
    "per_device_train_batch_size": ("2",),
    "max_length": ("24",),
    "pad_to_multiple_of": ("8",),
    "max_steps": ("7", "12"),
    "assistant_only_loss": ("true",),
    "packing": ("true",),
}
HARMLESS = {
    "logging_steps": ("1",),
    "ram": ("64MiB", "1GiB"),
    "save_total_limit": ("1",),
    "run_name": ("other",),
    "dataloader_pin_memory": ("false",),
}


def changed(life: Life) -> None:
    """Resumes with something changed; then one without."""
    variant = life.draw.choice(("plain", "copies"))
    run = life.workshop.run_of(variant)
    life.run = run
    steps = life.draw.choice((2, 3, 4))
    life.workshop.bring(run, life.workshop.stopped(variant, steps))
    judge.undisturbed(life.workshop, variant)
    for _ in range(life.draw.randint(4, 8)):
        what, words, undo = life.draw.choices(
            (_other_setting, _other_rows, _other_model, _harmless), (5, 3, 3, 1)
        )[0](life, run)
        before = _content(run)
        ended = life.command(words)
        undo()
        wrong = judge.of_ending(ended)
        if what.startswith("harmless"):
            life.totals.count(life.kind, "harmless and accepted")
            if ended.code == judge.DONE:
                wrong += judge.of_numbers(run, judge.undisturbed(life.workshop, variant))
                life.tell(wrong, what)
                return
            wrong.append("refused: " + judge.last_lines(ended.output))
        else:
            life.totals.count(life.kind, "refused")
            if ended.code != judge.REFUSED:
                wrong.append(f"accepted with exit code {ended.code}")
            elif changed_files := _differing(before, _content(run)):
                wrong.append(f"a refused resume changed {changed_files[:4]}")
        life.tell(wrong, what)
        if ended.code != judge.REFUSED:
            return
    life.finish("after refused changes")


def _other_setting(life: Life, run: Run) -> tuple[str, list[str], Callable[[], None]]:
    key = life.draw.choice(list(DECIDING))
    value = life.draw.choice(DECIDING[key])
    return f"{key} {value}", [*run.words(**{key: value}), "--resume"], lambda: None


def _harmless(life: Life, run: Run) -> tuple[str, list[str], Callable[[], None]]:
    key = life.draw.choice(list(HARMLESS))
    value = life.draw.choice(HARMLESS[key])
    words = [*run.words(**{key: value}), "--resume"]
    return f"harmless {key} {value}", words, lambda: None


def _other_rows(life: Life, run: Run) -> tuple[str, list[str], Callable[[], None]]:
    path = run.given / "rows.jsonl"
    text = path.read_text()
    lines = text.splitlines(keepends=True)
    how = life.draw.choice(("letter", "removed", "added", "swapped"))
    number = life.draw.randrange(len(lines) - 1)
    if how == "letter":
        row = json.loads(lines[number])
        row["messages"][1]["content"] += " stone"
        lines[number] = json.dumps(row) + "\n"
    elif how == "removed":
        del lines[number]
    elif how == "added":
        lines.append(lines[number])
    else:
        lines[number], lines[number + 1] = lines[number + 1], lines[number]
    path.write_text("".join(lines))
    return f"rows: {how} at {number}", [*run.words(), "--resume"], lambda: _put(path, text)


def _other_model(life: Life, run: Run) -> tuple[str, list[str], Callable[[], None]]:
    folder = run.given / "small"
    path = folder / "config.json"
    key, value = life.draw.choice(
        (
            ("rms_norm_eps", 1e-5),
            ("attention_dropout", 0.2),
            ("hidden_act", "gelu"),
            ("num_hidden_layers", 3),
            ("chat_template", None),
            ("tie_word_embeddings", False),
        )
    )
    if key == "chat_template":
        path = folder / "chat_template.jinja"
        text = path.read_text()
        path.write_text(text.replace("<|end|>", "<|end|> "))
    else:
        text = path.read_text()
        path.write_text(json.dumps({**json.loads(text), key: value}))
    return f"model: {key} {value}", [*run.words(), "--resume"], lambda: _put(path, text)


def _put(path: pathlib.Path, text: str) -> None:
    path.write_text(text)


def _content(run: Run) -> dict[str, str]:
    """Hashes of all files that a resume relies on."""
    return {
        str(path.relative_to(run.folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for folder in (run.out, *run.ssd)
        for path in folder.rglob("*")
        if path.is_file() and path.name != "lock"
    }


def _differing(before: dict[str, str], after: dict[str, str]) -> list[str]:
    return sorted(name for name in before | after if before.get(name) != after.get(name))
