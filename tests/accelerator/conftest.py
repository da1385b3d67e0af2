"""Tests on the test accelerator; collected only in processes that have loaded it.

`tests/test_accelerator.py` starts those. One file by hand:
`LOHAN_TEST_ACCELERATOR=1 python -m pytest tests/accelerator/test_engine_bits.py`
"""

from support import accelerator

collect_ignore_glob = [] if accelerator.is_loaded() else ["test_*.py"]
