"""The example scripts run as their first lines say, and show what they promise."""

import re
import runpy
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import lohan
from lohan.verify.plain_loop import train_in_memory
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
def test_a_denoiser_is_trained_and_shown(
    ssd: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out"
    printed = run(
        "diffusion.py", ssd, "--out", out, "--steps", 10, monkeypatch=monkeypatch, capsys=capsys
    )
    first, last = (float(loss) for loss in re.findall(r"^step \d+: loss (\S+),", printed, re.M))
    assert last < first
    for name in ("before", "after", "averaged"):
        with Image.open(out / f"{name}.png") as picture:
            assert picture.size == (864, 288)
    assert (out / "averaged" / "diffusion_pytorch_model.safetensors").exists()
    assert list(ssd.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param("sd3", marks=pytest.mark.long), "flux", "dit"])
def test_denoisers_of_the_example_have_the_bits_of_a_plain_loop(
    kind: str, ssd: Path, tmp_path: Path
) -> None:
    example = runpy.run_path(str(EXAMPLES / "diffusion.py"))
    data = load_file(example["drawn_data"](tmp_path))
    steps = [[example["make_batch"](data, 2 * s + n, size=2) for n in range(2)] for s in range(3)]

    def made() -> tuple[torch.nn.Module, lohan.AdamW]:
        torch.manual_seed(3)
        model = example["make_model"](kind, None)
        return model, lohan.AdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0)

    model, optimizer = made()
    torch.manual_seed(4)
    with lohan.attach(
        model,
        optimizer,
        ssd=[str(ssd)],
        ram="32MiB",
        device="cpu",
        example=steps[0][0],
        loss_fn=example["flow_loss"],
    ) as engine:
        torch.manual_seed(4)
        found = [engine.step(batches) for batches in steps]
        masters = {name: master.clone() for name, master in engine.weights()}
        layout = engine.store.layout
    plain, its_optimizer = made()
    torch.manual_seed(4)
    judged = train_in_memory(
        plain, its_optimizer, steps, layout=layout, loss_fn=example["flow_loss"]
    )
    assert [step.grad_norm for step in found] == [step.grad_norm for step in judged.steps]
    for name, states in judged.states[3].items():
        assert torch.equal(masters[name].view(-1), states.master.view(-1)), name


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
