"""Where there is no step to finish, a signal ends a run at once and all is undone."""

import os
import signal

import pytest

from lohan.train.run.signals import stop_on_signals


@pytest.mark.parametrize(
    ("number", "kind"), [(signal.SIGTERM, SystemExit), (signal.SIGINT, KeyboardInterrupt)]
)
def test_a_signal_before_the_first_step_is_raised(
    number: signal.Signals, kind: type[BaseException]
) -> None:
    undone = []

    def start() -> None:
        with stop_on_signals(is_at_once=True):
            try:
                os.kill(os.getpid(), number)
                undone.append("not reached")
            finally:
                undone.append("undone")

    with pytest.raises(kind):
        start()
    assert undone == ["undone"]


def test_while_first_states_are_written_it_is_raised_between_two_tensors(
    capfd: pytest.CaptureFixture[str],
) -> None:
    taken = []

    def write() -> None:
        with stop_on_signals(is_at_once=True) as request:
            for item in request.between(range(5)):
                if item == 1:
                    os.kill(os.getpid(), signal.SIGTERM)
                taken.append(item)

    with pytest.raises(SystemExit) as caught:
        write()
    assert (caught.value.code, taken) == (143, [0, 1])
    assert "SIGTERM: what was written so far is taken back" in capfd.readouterr().err


def test_a_terminal_that_is_closed_stops_nothing() -> None:
    with stop_on_signals(is_at_once=True) as request:
        os.kill(os.getpid(), signal.SIGHUP)
        assert not request.is_set
