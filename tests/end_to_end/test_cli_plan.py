"""`lohan plan` as a user sees it: the answer, its JSON, and a plain no where it does not fit."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

import lohan
from support.command_line import run_lohan, run_plan_without_advice

LANES = {"gpu", "gpu_to_ram", "ram_to_gpu", "ssd_read", "ssd_write", "cpu", "peer"}


def test_answer_says_everything_a_user_asks_first() -> None:
    ran = run_lohan("plan", "gpt-13b", "--machine", "desktop-4090", "--batch", 32)
    assert ran.exit_code == 0
    assert ran.stderr == ""
    for words in (
        "It fits.",
        "One step (simulated)",
        "tokens per second",
        "bottleneck",
        "share of the roofline",
        "A run of 50M tokens (simulated)",
        "endurance used",
        "What if (simulated)",
        "one more drive (1 -> 2)",
        "twice the RAM (64.0 GiB -> 128.0 GiB)",
        "twice the batch (32 -> 64)",
        "no gradient clipping",
        "largest batch of this model",
        "largest known model",
    ):
        assert words in ran.stdout


def test_json_is_one_object_whose_parts_agree() -> None:
    fields = run_lohan(
        "plan", "gpt-13b", "--machine", "desktop-4090", "--batch", 32, "--tokens", "1M", "--json"
    ).fields
    assert fields["fits"] is True
    assert fields["simulated"] is True
    assert fields["shortages"] == {}
    assert fields["clips_gradients"] is True
    assert fields["tokens_per_second"] == pytest.approx(32 * 1024 / fields["step_seconds"])
    assert set(fields["busy_share"]) <= LANES
    for tier in fields["ledger"].values():
        assert tier["needed_bytes"] == sum(line["bytes"] for line in tier["lines"])
        assert tier["spare_bytes"] == tier["budget_bytes"] - tier["needed_bytes"] >= 0
    run = fields["run"]
    assert run["num_steps"] == 31  # 1e6 tokens of 32768 a step
    assert run["hours"] == pytest.approx(31 * fields["step_seconds"] / 3600)
    assert run["written_bytes"] == 31 * fields["written_bytes_per_step"]
    assert run["endurance_share"] == pytest.approx(run["written_bytes"] / 1200e12)
    factors = [one["factor"] for one in fields["what_ifs"] if one["fits"]]
    assert factors == sorted(factors, reverse=True)
    assert fields["largest_batch"] >= 32
    assert fields["largest_model"]


@pytest.mark.slow
def test_what_ifs_are_what_planning_them_says() -> None:
    words = ("plan", "gpt-6b", "--machine", "desktop-4090", "--batch", 16, "--json")
    now = run_lohan(*words).fields
    for one in now["what_ifs"]:
        then = run_plan_without_advice(*words[1:], *one["option"].split()).fields
        assert then["step_seconds"] == pytest.approx(one["step_seconds"], rel=1e-6), one
        factor = then["tokens_per_second"] / now["tokens_per_second"]
        assert one["factor"] == pytest.approx(factor, rel=1e-6)


def test_options_replace_parts_of_the_machine() -> None:
    fields = run_lohan(
        *("plan", "gpt-6b", "--machine", "paper-4090", "--json", "--batch", 8),
        *("--ram", "256GiB", "--gpu", "16GiB", "--ssds", 6, "--gpus", 2, "--policy", "lohan"),
    ).fields
    assert fields["machine_description"].startswith("2x RTX 4090 (16.0 GiB), 256.0 GiB RAM, 6x ")
    assert fields["num_gpus"] == 2


def test_clipping_is_on_for_ours_unless_declined_and_off_for_the_published() -> None:
    words = ("plan", "gpt-6b", "--machine", "paper-4090", "--json")
    assert run_lohan(*words).fields["clips_gradients"] is True
    assert run_lohan(*words, "--no-clip").fields["clips_gradients"] is False
    assert run_lohan(*words, "--policy", "lohan").fields["clips_gradients"] is False
    assert run_lohan(*words, "--policy", "lohan", "--no-clip").exit_code == 0


def test_diffusion_model_brings_its_own_sequence() -> None:
    fields = run_lohan("plan", "dit-0.67b", "--machine", "desktop-4090", "--json").fields
    assert fields["sequence"] == 1024
    assert fields["largest_model"].startswith("dit-")


def test_a_write_budget_is_kept_or_the_plan_is_refused_with_the_numbers() -> None:
    """Swapping activations writes: with a budget a slower plan writes less, as in a run."""
    words = ("plan", "gpt-13b", "--machine", "paper-4090", "--batch", 32, "--max_steps", 100)
    free = run_plan_without_advice(*words[1:], "--json").fields
    first = 12 * free["num_parameters"]
    budget = int(first + 99 * free["written_bytes_per_step"])
    kept = run_plan_without_advice(*words[1:], "--json", "--offload.write_budget", f"{budget}B")
    fields = kept.fields
    assert fields["written_bytes_per_step"] < free["written_bytes_per_step"]
    assert fields["step_seconds"] >= free["step_seconds"]
    assert first < fields["write_budget"]["run_bytes"] <= budget
    refused = run_lohan(*words, "--offload.write_budget", "100GB")
    assert refused.exit_code == 2
    assert "100.0 GB are allowed (write_budget)" in refused.stderr


class TestDoesNotFit:
    WORDS = ("plan", "gpt-135b", "--machine", "desktop-4090", "--policy", "lohan", "--batch", 4)

    def test_plain_answer_says_what_is_short_and_what_does_fit(self) -> None:
        ran = run_lohan(*self.WORDS)
        assert ran.exit_code == 1
        assert "It does not fit." in ran.stdout
        assert "RAM is short by" in ran.stdout
        assert "What does fit" in ran.stdout
        assert "simulated" not in ran.stdout

    def test_json_says_no_with_the_shortages(self) -> None:
        ran = run_lohan(*self.WORDS, "--json")
        assert ran.exit_code == 1
        assert ran.fields["fits"] is False
        assert ran.fields["shortages"]["RAM"] > 0
        assert "step_seconds" not in ran.fields

    @pytest.mark.slow
    def test_every_offer_fits(self) -> None:
        offers = run_lohan(*self.WORDS, "--json").fields["nearest"]
        assert len(offers) >= 2
        for offer in offers:
            option = offer["option"]
            words = list(self.WORDS)
            if option.startswith("--"):
                words += option.split()
            else:
                words[1] = option
            assert run_plan_without_advice(*words[1:]).exit_code == 0, offer

    @pytest.mark.slow
    def test_several_short_tiers_are_offered_together(self) -> None:
        words = ("plan", "llama-3.1-405b", "--machine", "desktop-4090", "--batch", 4)
        words += ("--policy", "lohan")
        offers = [one["option"] for one in run_lohan(*words, "--json").fields["nearest"]]
        both = next(option for option in offers if "--ram" in option and "--ssds" in option)
        assert run_plan_without_advice(*words[1:], *both.split()).exit_code == 0


@pytest.mark.slow
def test_transformers_configuration_is_planned(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "own"
    folder.mkdir()
    config = {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_layer": 2,
        "n_head": 2,
        "n_embd": 64,
        "n_positions": 128,
        "vocab_size": 1000,
    }
    (folder / "config.json").write_text(json.dumps(config))
    words = ("plan", folder, "--machine", "desktop-4090")
    assert run_lohan(*words, "--seq", 128).exit_code == 0
    # The default of 1024 tokens is more than this model has positions.
    ran = run_lohan(*words)
    assert ran.exit_code == 2
    assert "128" in ran.stderr


def test_lists_and_version() -> None:
    assert run_lohan("--version").stdout == f"lohan {lohan.__version__}\n"
    assert "desktop-4090" in run_lohan("machines").stdout
    assert "gpt-175b" in run_lohan("models").stdout
    assert {one["name"] for one in run_lohan("machines", "--json").fields["machines"]} >= {
        "paper-4090",
        "dgx-a100",
    }
    assert len(run_lohan("models", "--json").fields["models"]) >= 20


def test_help_lists_every_command_and_loads_no_torch() -> None:
    code = (
        "import sys\nfrom lohan.cli import main\nsys.argv[0] = 'lohan'\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'numpy', 'lohan.simulate', 'transformers'} & set(sys.modules)\n"
        "sys.exit(f'loaded {heavy}' if heavy else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "--help"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for command in ("plan", "simulate", "compare", "reproduce", "machines", "models"):
        assert f"\n  {command} " in done.stdout


def test_named_model_is_planned_without_torch() -> None:
    code = (
        "import sys\nfrom lohan.cli import main\n"
        "try:\n    main()\nexcept SystemExit as done:\n    assert done.code == 0\n"
        "sys.exit('torch' in sys.modules)"
    )
    words = ["plan", "gpt2", "--machine", "desktop-4090"]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, check=False)
    assert done.returncode == 0


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("lohan pl", "plan"),
        ("lohan plan gpt-13", "gpt-13b"),
        ("lohan plan gpt-13b --machine paper-40", "paper-4090"),
        ("lohan plan gpt-13b --policy zero-inf", "zero-infinity"),
    ],
)
def test_a_shell_completes_commands_and_names(typed: str, offered: str) -> None:
    words = {"COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split()) - 1)}
    code = "import sys; sys.argv[0] = 'lohan'; from lohan.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **words, "_LOHAN_COMPLETE": "complete_bash"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert offered in done.stdout.split(), done.stderr


@pytest.mark.slow
def test_a_plan_says_which_batch_to_take_what_it_costs_and_warns_of_wear() -> None:
    words = ("plan", "gpt-1.55b", "--machine", "desktop-4090", "--ram", "16GiB", "--batch", 1)
    ran = run_lohan(*words, "--tokens", "1B")
    assert "Which batch (simulated)" in ran.stdout
    assert "Take " in ran.stdout
    assert "cost of a step" in ran.stdout
    assert "Warning: the run writes" in ran.stdout
    assert ran.stdout.index("Warning") < ran.stdout.index("Memory")
    fields = run_lohan(*words, "--tokens", "1B", "--json").fields
    assert fields["advised_batch"] > 1
    assert fields["warnings"]
    assert fields["run"]["dollars"] > 0
