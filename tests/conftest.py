"""Settings of all tests: random inputs are the same in every run, so a verdict can be repeated.

`--hypothesis-profile=explore` draws new ones; `--long` runs the tests marked long too.
"""

import gc
import itertools
import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

if "PYTEST_XDIST_WORKER" in os.environ:
    # Processes that share the cores: threads of torch that wait for each other would keep them
    # busy with waiting. Tests about several threads ask for them.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import lohan  # noqa: F401  # before torch, which it keeps from what does not run here
from support import accelerator

if accelerator.LOADS in os.environ:
    accelerator.load()

settings.register_profile("fixed", derandomize=True)
settings.register_profile("explore", derandomize=False)
settings.load_profile("fixed")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of this project's tests."""
    parser.addoption("--long", action="store_true", help="also run what takes many minutes")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the long tests out unless they are asked for; files with slow ones come first."""
    long = [item for item in items if item.get_closest_marker("long")]
    if long and not config.getoption("--long"):
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if not item.get_closest_marker("long")]
    items[:] = _slow_first(items, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))


def _slow_first(items: list[pytest.Item], num_workers: int) -> list[pytest.Item]:
    """So that no worker has a minute left when the others are done. Each begins with its part of
    the row; files stay whole, as fixtures are made once for a file."""
    files = [list(found) for _, found in itertools.groupby(items, key=lambda item: item.path)]
    kinds: dict[bool, list[pytest.Item]] = {True: [], False: []}
    for found in files:
        kinds[any(item.get_closest_marker("slow") for item in found)] += found
    return [
        item
        for worker in range(num_workers)
        for kind in (kinds[True], kinds[False])
        for item in kind[
            worker * len(kind) // num_workers : (worker + 1) * len(kind) // num_workers
        ]
    ]


@pytest.fixture(autouse=accelerator.is_loaded())
def accelerator_as_if_new() -> Iterator[None]:
    """What one test does to the test accelerator is over before the next."""
    yield
    accelerator.reset()


def pytest_collection_finish() -> None:
    """What is imported stays: tests that collect garbage need not look through it each time."""
    gc.collect()
    gc.freeze()
