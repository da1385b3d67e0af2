"""How far a measurement has come: lines, and in a terminal a bar below them.

Owns the counting of stages and the bar. Used by `machine` and by whoever starts a measurement.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator

Report = Callable[[str], None]
"""Is told what is being done, in lines for the user."""
OnShare = Callable[[float], None]
"""Is told how much of a measurement is done, from 0 to 1."""


class Stages:
    """Told of the beginning of each stage, all of which take about as long."""

    def __init__(self, num_stages: int, report: Report, on_share: OnShare) -> None:
        self._num_stages, self._num_begun = num_stages, 0
        self.report, self._on_share = report, on_share

    def begin(self, line: str) -> None:
        """The next stage begins."""
        self.report(line)
        self._on_share(self._num_begun / self._num_stages)
        self._num_begun += 1


@contextlib.contextmanager
def measuring_bar() -> Iterator[OnShare]:
    """A bar on stderr while a measurement runs; nothing where that is no terminal."""
    if not sys.stderr.isatty():
        yield lambda share: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    columns = (TextColumn("measuring this machine"), BarColumn(), TaskProgressColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=1.0, visible=False)
        yield lambda share: bar.update(task, completed=share, visible=True)
