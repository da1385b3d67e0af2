"""A plugin for pytest: the tests of TRL or transformers, on lohan's trainers or on their own.

`scripts/trl_suite` starts pytest with it. LOHAN_SUITE_SIDE says whose trainers run, results go to
the file LOHAN_SUITE_RESULTS as one JSON object per test. With LOHAN_SUITE_STAND_INS=1 the rows that
the tests take from the hub are made here.
"""

import json
import os
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest

SHOWN = ("named_parameters", "get_parameter")
NAMES = ("SFTTrainer", "DPOTrainer", "KTOTrainer", "RewardTrainer")


def pytest_configure(config: pytest.Config) -> None:
    """Put the trainers in place before any test is imported."""
    if os.environ.get("LOHAN_SUITE_STAND_INS") == "1":
        from support import trl_stand_ins

        trl_stand_ins.install_rows()
    if os.environ["LOHAN_SUITE_SIDE"] != "ours":
        return
    import transformers
    import trl

    import lohan

    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    from trl.experimental import cpo, orpo

    for name in NAMES:
        setattr(trl, name, _with_offload(getattr(lohan, name)))
    cpo.CPOTrainer = _with_offload(lohan.CPOTrainer)
    orpo.ORPOTrainer = _with_offload(lohan.ORPOTrainer)
    transformers.Trainer = _with_offload(lohan.Trainer)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Iterator[None]:
    """Write down what became of a test."""
    outcome: Any = yield
    report = outcome.get_result()
    is_end = report.when == "call" or report.outcome != "passed"
    if not is_end or (report.when == "teardown" and report.outcome == "passed"):
        return
    found = {"test": item.nodeid.partition("::")[2], "outcome": report.outcome, "reason": ""}
    if call.excinfo is not None and report.outcome == "failed":
        from lohan.errors import LohanError

        error = call.excinfo.value
        found["reason"] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        if isinstance(error, LohanError):
            found["outcome"] = "refused"
    with open(os.environ["LOHAN_SUITE_RESULTS"], "a", encoding="utf-8") as file:
        file.write(json.dumps(found) + "\n")


def _with_offload(kind: Any) -> Any:
    """A trainer that needs no argument more than the one it stands for.

    Tests look at weights: outside of its own work the model shows its masters, which are in fp32
    as the weights of the trainer in memory are.
    """

    class Suited(kind):  # type: ignore[misc]
        def __init__(self, *given: Any, **kwargs: Any) -> None:
            self._folder = tempfile.TemporaryDirectory(prefix="lohan-suite-")
            kwargs.setdefault(
                "offload",
                {
                    "ssd": self._folder.name,
                    "ram": "1GiB",
                    "device": "cpu",
                    "machine": "desktop-4090",
                },
            )
            super().__init__(*given, **kwargs)
            if self.source is not None:
                self._show(dict(self.source.tensors()))

        def train(self, *given: Any, **kwargs: Any) -> Any:
            return self._without_weights(super().train, *given, **kwargs)

        def evaluate(self, *given: Any, **kwargs: Any) -> Any:
            return self._without_weights(super().evaluate, *given, **kwargs)

        def predict(self, *given: Any, **kwargs: Any) -> Any:
            return self._without_weights(super().predict, *given, **kwargs)

        def _without_weights(self, work: Any, *given: Any, **kwargs: Any) -> Any:
            for name in SHOWN:
                vars(self.model).pop(name, None)
            done = work(*given, **kwargs)
            if not self._is_training and self._engine is not None:
                self._show(dict(self._engine.weights()))
            return done

        def _show(self, values: dict[str, Any]) -> None:
            """Masters, by all names of the parameters they are of."""
            trained: dict[int, str] = {}
            shown = {
                name: values[trained.setdefault(id(parameter), name)]
                for name, parameter in self.model.named_parameters(remove_duplicate=False)
            }
            self.model.named_parameters = lambda *_, **__: iter(shown.items())
            self.model.get_parameter = shown.__getitem__

    Suited.__name__ = Suited.__qualname__ = kind.__name__
    return Suited
