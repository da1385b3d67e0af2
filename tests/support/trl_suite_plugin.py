"""A plugin for pytest: the tests of TRL or transformers, on lohan's trainers or on their own.

`scripts/trl_suite` starts pytest with it. LOHAN_SUITE_SIDE says whose trainers run, results go to
the file LOHAN_SUITE_RESULTS as JSON objects, two per test: one as it begins. With
LOHAN_SUITE_STAND_INS=1 the rows that the tests take from the hub are made here.
"""

import ast
import contextlib
import functools
import importlib
import json
import os
import pathlib
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
import torch

TRL_NAMES = ("SFTTrainer", "DPOTrainer", "KTOTrainer", "RewardTrainer")
# Within these a trainer works with its model; all else is a test that looks at it.
WORK = ("train", "evaluate", "predict", "save_model", "push_to_hub", "create_optimizer", "answers")
_trainers: list[Any] = []
"""Those of the test that runs."""
_done: set[str] = set()


def pytest_configure(config: pytest.Config) -> None:
    """Put the trainers in place before any test is imported."""
    if os.environ.get("LOHAN_SUITE_STAND_INS") == "1":
        from support import trl_stand_ins

        trl_stand_ins.install_rows()
    import transformers

    _put_in_gone_names(pathlib.Path(config.args[0]))
    _note_trainers(transformers.Trainer)
    if os.environ["LOHAN_SUITE_SIDE"] != "ours":
        return
    import trl

    import lohan

    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    from trl.experimental import cpo, orpo

    for name in TRL_NAMES:
        setattr(trl, name, _with_offload(getattr(lohan, name)))
    cpo.CPOTrainer = _with_offload(lohan.CPOTrainer)
    orpo.ORPOTrainer = _with_offload(lohan.ORPOTrainer)
    # Not the name above: transformers puts another module in its place while it is imported.
    sys.modules["transformers"].Trainer = _with_offload(lohan.Trainer)
    _have_bf16(transformers.TrainingArguments)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out what an earlier process, which a test ended, has run."""
    with open(os.environ["LOHAN_SUITE_RESULTS"], encoding="utf-8") as file:
        known = {json.loads(line)["test"] for line in file}
    items[:] = [item for item in items if _name(item) not in known]


def pytest_runtest_logstart(nodeid: str) -> None:
    """Write down what begins: the process may not live to see its end."""
    _write({"test": _short(nodeid), "outcome": "begun", "reason": "", "trainers": 0})


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Iterator[None]:
    """Write down what became of a test, and let its trainers go."""
    outcome: Any = yield
    report = outcome.get_result()
    if report.when == "setup" and report.outcome == "passed":
        return
    if _name(item) not in _done:
        _done.add(_name(item))
        found = {"test": _name(item), "outcome": report.outcome, "reason": ""}
        found["trainers"] = len(_trainers)
        if call.excinfo is not None and report.outcome == "failed":
            from lohan.errors import LohanError

            error = call.excinfo.value
            found["reason"] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            if isinstance(error, LohanError):
                found["outcome"] = "refused"
        _write(found)
    while _trainers:
        trainer = _trainers.pop()
        if "is_first" in vars(trainer):  # not where it was refused while it was made
            trainer.close()
            trainer._folder.cleanup()


def _name(item: pytest.Item) -> str:
    return _short(item.nodeid)


def _short(nodeid: str) -> str:
    file, _, test = nodeid.partition("::")
    return f"{pathlib.PurePath(file).name}::{test}"


def _write(found: dict[str, Any]) -> None:
    with open(os.environ["LOHAN_SUITE_RESULTS"], "a", encoding="utf-8") as file:
        file.write(json.dumps(found) + "\n")


def _put_in_gone_names(file: pathlib.Path) -> None:
    """Names that tests of another release import, and this one has no more: tests that call one
    fail, on both sides, and the others run."""
    for path in (file, *file.parent.glob("test*_utils.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ImportFrom) or node.level or not node.module:
                continue
            if not node.module.startswith(("trl", "transformers")):
                continue
            with contextlib.suppress(ModuleNotFoundError):
                module = importlib.import_module(node.module)
                for name in (one.name for one in node.names if not hasattr(module, one.name)):
                    is_question = name.startswith("is_")
                    setattr(module, name, functools.partial(_gone, name, is_question))


def _gone(name: str, is_question: bool, *_: Any, **__: Any) -> bool:
    if not is_question:
        raise NotImplementedError(f"{name} is not in the release that is installed")
    return False


def _note_trainers(kind: Any) -> None:
    make = kind.__init__

    @functools.wraps(make)
    def noted(self: Any, *given: Any, **kwargs: Any) -> None:
        _trainers.append(self)
        make(self, *given, **kwargs)

    kind.__init__ = noted


def _have_bf16(kind: Any) -> None:
    """What a script has to add where no 16-bit format is said."""
    prepare = kind.__post_init__

    @functools.wraps(prepare)
    def prepared(self: Any) -> None:
        prepare(self)
        self.bf16 = not self.fp16

    kind.__post_init__ = prepared


def _with_offload(kind: Any) -> Any:
    """A trainer that needs no argument more than the one it stands for.

    Tests look at weights: outside of its own work the model shows its masters, which are in fp32
    as the weights of the trainer in memory are.
    """
    from lohan.train.adapters.adapting import renamed
    from lohan.train.run.progress import step_numbers

    class Suited(kind):  # type: ignore[misc]
        _depth = 0
        _hidden: tuple[Any, ...] = ()

        def __init__(self, *given: Any, **kwargs: Any) -> None:
            self._folder = tempfile.TemporaryDirectory(prefix="lohan-suite-")
            offload: dict[str, Any] = {"ssd": self._folder.name, "ram": "1GiB", "device": "cpu"}
            offload["machine"] = "desktop-4090"
            args = kwargs.get("args") or next((one for one in given if _saves(one)), None)
            if _saves(args):  # tests go on from any checkpoint, and load its model
                offload["archive_steps"] = int(args.save_steps)
            kwargs.setdefault("offload", offload)
            super().__init__(*given, **kwargs)
            if self.source is not None or self.adapting.is_on:
                self._show(self._first_values())

        def log(self, logs: dict[str, float], *more: Any) -> None:
            """What two runs never have in common is left out of what they are compared by."""
            super().log(logs, *more)
            for name in step_numbers(self) if "loss" in logs else ():
                self.state.log_history[-1].pop(name, None)

        @contextlib.contextmanager
        def working(self) -> Iterator[None]:
            """Around what the trainer itself does with its model."""
            if self._depth == 0:
                for module, name, parameter in self._hidden:
                    module._parameters[name] = parameter
                self._hidden = ()
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1
            if self._depth == 0 and self._engine is not None:
                self._show(dict(self._engine.weights()))

        def _first_values(self) -> dict[str, Any]:
            found = dict(self.source.tensors() if self.source is not None else ())
            if self.adapting._names is not None:
                found = dict(renamed(iter(found.items()), self.adapting._names))
            made = self.model.named_parameters()
            return {**found, **{name: one.detach() for name, one in made if not one.is_meta}}

        def _show(self, values: dict[str, Any]) -> None:
            """Masters in place of the parameters they are of; what is frozen has 16 bits."""
            shown: dict[int, torch.nn.Parameter] = {}
            for name, parameter in self.model.named_parameters():
                value, is_trained = values[name], parameter.requires_grad
                value = value if is_trained else value.to(self.compute_dtype())
                shown[id(parameter)] = torch.nn.Parameter(value.float().clone(), is_trained)
            self._hidden = tuple(
                (module, name, parameter)
                for module in self.model.modules()
                for name, parameter in module._parameters.items()
                if parameter is not None
            )
            for module, name, parameter in self._hidden:
                module._parameters[name] = shown[id(parameter)]

    for name in WORK:
        setattr(Suited, name, _as_work(getattr(kind, name)))
    Suited.__name__ = Suited.__qualname__ = kind.__name__
    return Suited


def _saves(args: Any) -> bool:
    return getattr(args, "save_strategy", None) == "steps" and args.save_steps >= 1


def _as_work(method: Any) -> Any:
    @functools.wraps(method)
    def working(self: Any, *given: Any, **kwargs: Any) -> Any:
        with self.working():
            return method(self, *given, **kwargs)

    return working
