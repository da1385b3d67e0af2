"""What can be trained: each task with its trainer, its arguments and its forms of rows.

Owns the table, and reading the names of TRL's and transformers' training arguments from the
packages' sources: importing both takes seconds, and a misspelt key is named at once. Nothing of TRL
is imported before a task is used. Called by `config` and `fine_tune`.
"""

import ast
import functools
import importlib
import importlib.util
import pathlib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lohan.errors import ConfigError, nearest_names

_BASES = (
    ("trl", "trainer/base_config.py", "_BaseConfig"),
    ("transformers", "training_args.py", "TrainingArguments"),
)
"""Each is derived from the next: package, file, class."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One way to train."""

    name: str
    meaning: str
    arguments: tuple[str, str]
    """Module of trl, and the class of its arguments."""
    trainer: tuple[str, str] = ("lohan.train.tasks.preferences", "")
    rows: str = "pairs"
    """Which forms of rows (`row_formats.FORMS`)."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    head: str | None = None

    def arguments_class(self) -> Any:
        """TRL's class of arguments."""
        return getattr(trl_module(self.arguments[0]), self.arguments[1])

    def trainer_class(self) -> Any:
        """The trainer on the engine."""
        return getattr(importlib.import_module(self.trainer[0]), self.trainer[1])


def trl_module(name: str) -> Any:
    """A module of trl. That some are experimental is said in docs/training.md, and not again."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*TRL_EXPERIMENTAL_SILENCE.*")
        return importlib.import_module(f"trl.{name}")


_SFT = ("trainer.sft_config", "SFTConfig")
_OURS = "lohan.train.trainer.trainer"
_PREFERENCES = "lohan.train.tasks.preferences"
_CONCATENATED = "lohan.train.tasks.concatenated"
TASKS = {
    task.name: task
    for task in (
        Task(
            name="sft",
            meaning="supervised fine-tuning: conversations, prompts with completions, texts",
            arguments=_SFT,
            trainer=(_OURS, "SFTTrainer"),
            rows="sft",
        ),
        Task(
            name="pretrain",
            meaning="plain text, packed into rows of max_length",
            arguments=_SFT,
            trainer=(_OURS, "SFTTrainer"),
            rows="text",
            defaults={"packing": True, "packing_strategy": "wrapped"},
        ),
        Task(
            name="dpo",
            meaning="pairs of answers, against the model as it was",
            arguments=("trainer.dpo_config", "DPOConfig"),
            trainer=(_PREFERENCES, "DPOTrainer"),
        ),
        Task(
            name="reward",
            meaning="a reward model from pairs of answers",
            arguments=("trainer.reward_config", "RewardConfig"),
            trainer=(_PREFERENCES, "RewardTrainer"),
            head="MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING",
        ),
        Task(
            name="kto",
            meaning="answers that are liked or not, one at a time",
            arguments=("trainer.kto_config", "KTOConfig"),
            trainer=(_PREFERENCES, "KTOTrainer"),
            rows="judged",
        ),
        Task(
            name="orpo",
            meaning="pairs of answers, without a reference (experimental in TRL)",
            arguments=("experimental.orpo.orpo_config", "ORPOConfig"),
            trainer=(_CONCATENATED, "ORPOTrainer"),
        ),
        Task(
            name="cpo",
            meaning="pairs of answers, CPO or SimPO by loss_type (experimental in TRL)",
            arguments=("experimental.cpo.cpo_config", "CPOConfig"),
            trainer=(_CONCATENATED, "CPOTrainer"),
        ),
    )
}
_GENERATING = ("grpo", "rloo", "ppo", "online_dpo", "gkd", "distillation")


def task_named(name: Any, origin: str) -> Task:
    """The task of a name.

    Raises:
        ConfigError: there is none, with the reason where it is one that writes answers.
    """
    asked = str(name).lower().replace("-", "_")
    if asked in _GENERATING:
        raise ConfigError(
            f"task is {name} ({origin})",
            why="it trains on answers the model writes during training, and each token of them is "
            "a pass through weights that are on SSD",
            remedy="write the answers beforehand and train on them with task dpo or kto",
        )
    if asked not in TASKS:
        raise ConfigError(
            f"task is {name!r} ({origin})",
            why=f"known are {', '.join(TASKS)}",
            remedy=nearest_names(asked, TASKS),
        )
    return TASKS[asked]


@functools.cache
def argument_names(module: str, name: str) -> frozenset[str] | None:
    """Names of the arguments of a class of trl; None where its classes are not laid out as they
    are known."""
    names: set[str] = set()
    classes = (("trl", f"{module.replace('.', '/')}.py", name), *_BASES)
    bases = [base for _, _, base in _BASES]
    for (package, file, one), base in zip(classes, [*bases, None], strict=True):
        found = _class_in(package, file, one)
        expected = [] if base is None else [base]
        if found is None or [ast.unparse(one) for one in found.bases] != expected:
            return None
        names.update(_field_names(found))
    return frozenset(names)


def _class_in(package: str, file: str, name: str) -> ast.ClassDef | None:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    path = pathlib.Path(spec.submodule_search_locations[0], file)
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError):
        return None
    classes = (one for one in tree.body if isinstance(one, ast.ClassDef))
    return next((one for one in classes if one.name == name), None)


def _field_names(found: ast.ClassDef) -> set[str]:
    return {
        line.target.id
        for line in found.body
        if isinstance(line, ast.AnnAssign)
        and isinstance(line.target, ast.Name)
        and not ast.unparse(line.annotation).startswith("ClassVar")
        and not (line.value is not None and "init=False" in ast.unparse(line.value))
    }
