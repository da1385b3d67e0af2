"""Settings of all tests: random inputs are the same in every run, so a verdict can be repeated.

`--hypothesis-profile=explore` draws new ones; `--long` runs the tests marked long too.
"""

import gc

import pytest
from hypothesis import settings

import lohan  # noqa: F401  # before torch, which it keeps from what does not run here

settings.register_profile("fixed", derandomize=True)
settings.register_profile("explore", derandomize=False)
settings.load_profile("fixed")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of this project's tests."""
    parser.addoption("--long", action="store_true", help="also run what takes many minutes")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the long tests out unless they are asked for."""
    if config.getoption("--long"):
        return
    long = [item for item in items if item.get_closest_marker("long")]
    if long:
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if not item.get_closest_marker("long")]


def pytest_collection_finish() -> None:
    """What is imported stays: tests that collect garbage need not look through it each time."""
    gc.collect()
    gc.freeze()
