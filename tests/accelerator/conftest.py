"""Tests on the test accelerator; collected only in processes that have loaded it.

`tests/test_accelerator.py` starts those. One file by hand:
`LOHAN_TEST_ACCELERATOR=1 python -m pytest tests/accelerator/test_engine_bits.py`
"""

from collections.abc import Iterator

import pytest

from support import accelerator

collect_ignore_glob = [] if accelerator.is_loaded() else ["test_*.py"]


@pytest.fixture(autouse=True)
def as_if_new() -> Iterator[None]:
    """What one test does to the accelerator is over before the next."""
    yield
    accelerator.reset()
