"""A run does not depend on who reads what it says."""

import os
import sys

import pytest

from lohan.cli.tables.lasting_output import lasting_output
from lohan.cli.tables.output import console


@pytest.mark.parametrize("kind", ["a closed pipe", "a full disk"])
def test_output_that_takes_nothing_stops_nothing(
    kind: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    if kind == "a full disk":
        os.close(writer)
        writer = os.open("/dev/full", os.O_WRONLY)
    with open(writer, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        with lasting_output():
            for number in range(3):
                console().print(f"step {number}")
                print("sealed", flush=True)
    told = capfd.readouterr().err
    assert told.count("standard output cannot be written any more") == 1
