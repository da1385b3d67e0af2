"""`examples/demo.py` as a program that is forked, and sends itself a signal when it is told to."""

import pathlib
import runpy

from support.signalled import signal_when_told

PROGRAM = pathlib.Path(__file__).parents[2] / "examples" / "demo.py"


def main() -> None:
    signal_when_told()
    runpy.run_path(str(PROGRAM), run_name="__main__")
