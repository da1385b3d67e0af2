"""A few prompts answered before the first step and after the last, from the weights on the SSDs.

Owns greedy answers and when they are given. A token is one forward pass of the whole prompt through
the engine, so nothing of the model has to be in RAM, and nothing of the run is changed: generators
and the modes of modules are put back. Called by the trainers.
"""

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import TrainerCallback

from lohan.errors import ConfigError
from lohan.train.run.progress import append_log
from lohan.train.run.randomness_state import random_state, set_random_state
from lohan.train.settings.prompts import Prompt, shown_prompt
from lohan.units import format_seconds

MOST_NEW_TOKENS = 64
SAMPLES = "samples"
"""In log.jsonl: a list of objects with prompt and answer."""
_WEIGHT_BYTES = 2


class SamplePrompts(TrainerCallback):
    """Asks the prompts at both ends of a run; one that a signal stops is not asked."""

    def __init__(self, trainer: Any, prompts: Sequence[Prompt]) -> None:
        self._trainer, self._prompts = trainer, prompts
        self._first_step = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Ask the model as it was given; a run that goes on has been asked."""
        self._first_step = state.global_step
        if self._prompts and state.global_step == 0:
            self._ask(args, state, "before the first step")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Ask the trained model."""
        is_stopped = self._trainer.stop_request.is_set
        if self._prompts and not is_stopped and state.global_step > self._first_step:
            self._ask(args, state, f"after step {state.global_step}")

    def _ask(self, args: Any, state: Any, when: str) -> None:
        trainer = self._trainer
        tell = trainer.tell or (lambda sentence: None)
        asked = Asked(trainer, self._prompts)
        tell(f"asking {len(self._prompts)} prompt(s) {when}: {asked.cost()}")
        answers = asked.answers()
        for prompt, answer in zip(self._prompts, answers, strict=True):
            tell(f"  prompt: {shown_prompt(prompt)}")
            tell(f"  answer: {' '.join(answer.split())}")
        pairs = zip(self._prompts, answers, strict=True)
        samples = [{"prompt": shown_prompt(one), "answer": answer} for one, answer in pairs]
        if trainer.is_first:
            append_log(args, {"step": state.global_step, SAMPLES: samples})


class Asked:
    """Prompts as tokens, in rows of one length, so that every pass is of the same shape.

    Raises:
        ConfigError: a prompt leaves no room for an answer, or rows cannot be looked at beforehand.
    """

    def __init__(self, trainer: Any, prompts: Sequence[Prompt]) -> None:
        self._trainer = trainer
        if trainer.model.get_output_embeddings() is None:
            raise ConfigError(
                f"{type(trainer.model).__name__} cannot be asked prompts",
                why="it has no head that gives tokens",
                remedy="leave sample_prompts out",
            )
        self._processor = trainer.processing_class
        self._tokenizer = getattr(self._processor, "tokenizer", self._processor)
        self._prompts = [self._tokens_of(prompt) for prompt in prompts]
        batches = trainer.largest_step()
        if batches is None:
            raise ConfigError(
                "sample_prompts needs rows that can be looked at beforehand",
                why="answers are computed within the memory planned for the longest row",
                remedy="leave sample_prompts out, or use a collator of TRL or transformers",
            )
        longest = int(batches[0]["input_ids"].shape[1])
        self._num_new = min(MOST_NEW_TOKENS, longest - max(map(len, self._prompts)))
        if self._num_new < 1:
            raise ConfigError(
                f"a prompt of sample_prompts has {max(map(len, self._prompts))} tokens, and the "
                f"longest row {longest}",
                why="answers are computed within the memory planned for the longest row",
                remedy="shorten the prompt",
            )
        parameters = inspect.signature(trainer.model.forward).parameters
        self._can_keep = "logits_to_keep" in parameters

    def _tokens_of(self, prompt: Prompt) -> list[int]:
        if getattr(self._processor, "chat_template", None) is None:
            if not isinstance(prompt, str):
                raise ConfigError(
                    "sample_prompts has a conversation, and the tokenizer no chat template",
                    why="how its messages become a text is not known",
                    remedy="write the prompt as one text",
                )
            return list(self._tokenizer(prompt)["input_ids"])
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        text = self._processor.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def cost(self) -> str:
        """How long it takes, in words: every token is a pass through all weights."""
        engine = self._trainer.engine
        said = f"at most {self._num_new} tokens each, and as many passes through the model"
        if engine.plan is None:
            return said
        num_parameters = sum(one.numel() for one in self._trainer.model.parameters())
        rate = engine.machine.ssd_read_bytes_per_second
        seconds = self._num_new * _WEIGHT_BYTES * num_parameters / rate
        return f"{said}, {format_seconds(seconds)} if all weights come from the SSDs each time"

    def answers(self) -> list[str]:
        """The greedy answers. May block: yes, long."""
        found = [self._tokenizer.decode(one, skip_special_tokens=True) for one in self.tokens()]
        return [str(text).strip() for text in found]

    def tokens(self) -> list[list[int]]:
        """The tokens of the answers, the one that ends an answer included."""
        ends = self._ends()
        length = max(map(len, self._prompts)) + self._num_new
        rows = [list(prompt) for prompt in self._prompts]
        going = list(range(len(rows)))
        with self._without_trace():
            for _ in range(self._num_new):
                batches = [self._batch(rows[index], length) for index in going]
                found = self._trainer.engine.evaluate(batches, self._next_token)
                for index, token in zip(going, found, strict=True):
                    rows[index].append(int(token))
                going = [index for index in going if rows[index][-1] not in ends]
                if not going:
                    break
        return [row[len(prompt) :] for row, prompt in zip(rows, self._prompts, strict=True)]

    def _batch(self, row: list[int], length: int) -> dict[str, torch.Tensor]:
        # What stands behind the last token does not reach it: attention looks back only.
        filled = row + [row[-1]] * (length - len(row))
        device = self._trainer.args.device
        return {
            "input_ids": torch.tensor([filled], device=device),
            "last": torch.tensor([len(row) - 1], device=device),
        }

    def _next_token(self, model: Any, batch: Any) -> torch.Tensor:
        """In place of a loss: the most likely token; a float of 32 bits has room for it."""
        settings = {"logits_to_keep": batch["last"]} if self._can_keep else {}
        logits = model(input_ids=batch["input_ids"], use_cache=False, **settings).logits[0]
        kept = logits[0] if self._can_keep else logits[batch["last"][0]]
        token: torch.Tensor = kept.argmax().to(torch.float32)
        return token

    def _ends(self) -> set[int]:
        settings = getattr(self._trainer.model, "generation_config", None)
        ends: set[int] = set()
        for found in (getattr(settings, "eos_token_id", None), self._tokenizer.eos_token_id):
            ends |= set(found if isinstance(found, list) else [] if found is None else [found])
        return ends

    @contextlib.contextmanager
    def _without_trace(self) -> Iterator[None]:
        before = random_state()
        modes = [(part, part.training) for part in self._trainer.model.modules()]
        self._trainer.model.eval()
        try:
            yield
        finally:
            for part, is_training in modes:
                part.training = is_training
            set_random_state(before)
