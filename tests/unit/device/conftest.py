"""The emulated device on a clock that tests turn by hand."""

from collections.abc import Iterator

import pytest

from lohan.device import EmulatedDevice
from support.clocks import ManualClock
from support.emulated_rates import RATES


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def device(clock: ManualClock) -> Iterator[EmulatedDevice]:
    with EmulatedDevice(rates=RATES, clock=clock) as device:
        yield device
