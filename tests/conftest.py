"""Settings of all tests: random inputs are the same in every run, so a verdict can be repeated.

`--hypothesis-profile=explore` draws new ones; `--every-combination` leaves nothing to sampling.
"""

import pytest
from hypothesis import settings

import lohan  # noqa: F401  # before torch, which it keeps from what does not run here

settings.register_profile("fixed", derandomize=True)
settings.register_profile("explore", derandomize=False)
settings.load_profile("fixed")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of this project's tests."""
    parser.addoption(
        "--every-combination",
        action="store_true",
        help="compare the engine with a plain loop in all combinations, an hour of one core",
    )
