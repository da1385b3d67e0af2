"""Everything is closed, and the first failure is the one that is told."""

import pytest

from lohan.closing import Closing


class _Thing:
    def __init__(self) -> None:
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True
        raise OSError(5, "the drive is gone")


def test_closing_never_masks_the_first_failure() -> None:
    one, other = _Thing(), _Thing()

    def fail() -> None:
        with Closing() as closing:
            closing.callback(one.close)
            closing.callback(other.close)
            raise ValueError("what happened")

    with pytest.raises(ValueError, match="what happened") as caught:
        fail()
    assert one.is_closed
    assert other.is_closed
    assert len(caught.value.__notes__) == 2
    assert "the drive is gone" in caught.value.__notes__[0]


def test_a_failure_to_close_is_told_where_it_is_the_first() -> None:
    one = _Thing()
    with pytest.raises(OSError, match="the drive is gone"), Closing() as closing:
        closing.callback(one.close)
