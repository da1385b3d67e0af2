"""A striped file of two directories on each engine."""

import pathlib
from collections.abc import Iterator

import pytest

from support.ssd_engines import MAKERS, make_engine, nothing_leaks
from support.striped_rig import Rig, make_directories


@pytest.fixture(params=MAKERS)
def rig(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> Iterator[Rig]:
    with nothing_leaks():
        rig = Rig(make_engine(request.param), make_directories(tmp_path, 2))
        yield rig
        rig.close()
