"""The example scripts run as their first lines say, and show what they promise."""

import re
import runpy
from pathlib import Path

import pytest

from support.profiles import keep_quick_profile

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def ssd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An SSD directory on a machine that has been measured."""
    place = tmp_path / "ssd"
    place.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    keep_quick_profile(tmp_path / "cache", [place])
    return place


def run(
    name: str, *words: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> str:
    """Run a script in this process; return what it printed."""
    monkeypatch.setattr("sys.argv", [name, *map(str, words), "--device", "cpu"])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capsys.readouterr().out


@pytest.mark.slow
def test_a_diffusion_transformer_learns_with_a_loss_of_its_own(
    ssd: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = run("diffusers_dit.py", ssd, monkeypatch=monkeypatch, capsys=capsys)
    before, after = (
        float(found) for found in re.findall(r"^loss (?:before|after): (\S+)$", printed, re.M)
    )
    assert after < before
    assert len(re.findall(r"^step \d+: loss", printed, re.M)) == 10
    assert list(ssd.iterdir()) == []


def losses_of(printed: str) -> dict[int, str]:
    return {
        int(step): loss for step, loss in re.findall(r"^step (\d+): loss (\S+),", printed, re.M)
    }


@pytest.mark.slow
def test_a_loop_that_was_stopped_goes_on_with_the_same_bits(
    ssd: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def loop(*words: object) -> str:
        return run("training_loop.py", ssd, *words, monkeypatch=monkeypatch, capsys=capsys)

    whole = loop()
    # Stopped one step after a seal: that step is taken again.
    first = loop("--until", 7)
    found = re.search(r"^run (\S+)$", first, re.M)
    assert found is not None
    second = loop("--run", found[1])
    assert losses_of(whole) == losses_of(first) | losses_of(second)
    assert min(losses_of(second)) == 7
    assert whole.splitlines()[-2:] == second.splitlines()[-2:]
    losses = [float(loss) for loss in losses_of(whole).values()]
    assert losses[-1] < losses[0]
