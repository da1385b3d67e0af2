"""Every request that is not valid: exit code 2, what / why / do on stderr, nothing written."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from lohan.errors import ConfigError
from lohan.hardware import machine_named
from support.command_line import run_lohan, run_plan_without_advice
from support.small_machines import desktop_with_drive_of

PLAN = ("plan", "gpt-1.55b", "--machine", "paper-4090")


def assert_refused(ran: object, *words: str) -> None:
    assert ran.exit_code == 2  # type: ignore[attr-defined]
    assert ran.stdout == ""  # type: ignore[attr-defined]
    stderr = ran.stderr  # type: ignore[attr-defined]
    lines = stderr.splitlines()
    assert lines[0].startswith("error: ")
    assert lines[1].startswith("  why: ")
    assert lines[2].startswith("  do:  ")
    for word in words:
        assert word in stderr


@pytest.mark.parametrize("command", ["plan", "simulate", "compare"])
def test_unknown_model_names_the_nearest_ones(command: str) -> None:
    assert_refused(run_lohan(command, "gpt-13", "--machine", "paper-4090"), "gpt-13", "gpt-13b")


@pytest.mark.parametrize("command", ["plan", "simulate", "compare"])
def test_unknown_machine_names_the_nearest_ones(command: str) -> None:
    assert_refused(
        run_lohan(command, "gpt-1.55b", "--machine", "paper-4091"), "paper-4090", ".json"
    )


@pytest.mark.parametrize("command", ["plan", "simulate", "compare"])
@pytest.mark.parametrize("batch", [0, -1])
def test_batch_below_one_is_refused(command: str, batch: int) -> None:
    ran = run_lohan(command, "gpt-1.55b", "--machine", "paper-4090", "--batch", batch)
    assert_refused(ran, f"batch is {batch}", "1 or more")


def test_absurd_batch_or_sequence_is_answered_at_once() -> None:
    assert run_lohan(*PLAN, "--batch", 999_999_937).exit_code == 1
    assert_refused(run_lohan(*PLAN, "--batch", 10**12), "batch is 1000000000000")
    assert_refused(run_lohan(*PLAN, "--seq", 10**30), "10**30"[:2])


def test_batch_that_does_not_divide_over_the_gpus_is_refused_with_batches_that_do() -> None:
    assert_refused(run_lohan(*PLAN, "--gpus", 3, "--batch", 8), "3 GPUs", "6 or 9")


def test_sequence_of_nothing_is_refused() -> None:
    assert_refused(run_lohan(*PLAN, "--seq", 0), "0 tokens")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"ram_byte": 5}, ("ram_byte", "unknown key", "ram_bytes")),
        ({"cpu_update_parameters_per_second": None}, ("cpu_update_parameters_per_second",)),
        ({"ram_to_gpu_bytes_per_second": -21e9}, ("ram_to_gpu_bytes_per_second", "-21")),
        ({"gpu_to_ram_bytes_per_second": 0}, ("gpu_to_ram_bytes_per_second",)),
        ({"gpu_to_ram_bytes_per_second": 21}, ("gpu_to_ram_bytes_per_second", "unit")),
        ({"cpu_update_parameters_per_second": 1e-300}, ("1e-300", "unit")),
        ({"ram_to_gpu_bytes_per_second": 1e300}, ("1e+300", "unit")),
        ({"host_price_dollars": 1e300}, ("host_price_dollars", "1e+300")),
    ],
)
def test_wrong_machine_file_is_refused_with_the_field(
    tmp_path: pathlib.Path, change: dict[str, object], words: tuple[str, ...]
) -> None:
    machine = json.loads(machine_named("desktop-4090").to_json())
    for key, value in change.items():
        machine.pop(key, None)
        if value is not None:
            machine[key] = value
    path = tmp_path / "box.json"
    path.write_text(json.dumps(machine))
    assert_refused(run_lohan("plan", "gpt-1.55b", "--machine", path), "box.json", *words)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"version": 1}', "\x00"])
def test_machine_file_that_is_no_machine_is_refused(tmp_path: pathlib.Path, text: str) -> None:
    path = tmp_path / "box.json"
    path.write_text(text)
    assert_refused(run_lohan("plan", "gpt-1.55b", "--machine", path), "box.json")


@pytest.mark.parametrize("policy", ["lohan+", "lohan", "zero-infinity"])
def test_ram_below_the_minimum_is_refused_with_what_is_needed_and_what_would_do(
    policy: str,
) -> None:
    ran = run_lohan(*PLAN, "--ram", "256MiB", "--policy", policy)
    assert_refused(ran, "below the minimum", "256.0 MiB", "short by", "--ram ")
    remedy = ran.stderr.split("give at least --ram ")[1].split(";")[0]
    words = (*PLAN[1:], "--batch", 1, "--ram", remedy, "--policy", policy)
    assert run_plan_without_advice(*words).exit_code == 0


@pytest.mark.parametrize(
    ("model", "machine", "ram"),
    [
        ("gpt2", "small-drive.json", "128MiB"),
        pytest.param("llama-3.1-405b", "desktop-4090", "8GiB", marks=pytest.mark.long),
    ],
)
def test_ram_below_the_minimum_with_too_few_drives_is_told_of_both(
    model: str,
    machine: str,
    ram: str,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small-drive.json").write_text(desktop_with_drive_of(500 * 10**6).to_json())
    words = ("plan", model, "--machine", machine, "--batch", 1)
    ran = run_lohan(*words, "--ram", ram)
    assert_refused(ran, "below the minimum", "--ram ", "--ssds ")
    remedy = ran.stderr.split("give at least ")[1].split(";")[0]
    assert run_plan_without_advice(*words[1:], *remedy.split()).exit_code == 0


@pytest.mark.parametrize("option", ["--ram", "--gpu"])
@pytest.mark.parametrize("size", ["64", "64.5", "0"])
def test_size_without_unit_is_refused_with_a_hint(option: str, size: str) -> None:
    assert_refused(run_lohan(*PLAN, option, size), f"{option} {size}", f"{size}GiB")


@pytest.mark.parametrize("size", ["64Gb", "-1GiB", "much", "", "0GiB"])
def test_size_that_is_none_is_refused(size: str) -> None:
    assert_refused(run_lohan(*PLAN, "--ram", size))


@pytest.mark.parametrize(
    "words",
    [
        ("--ssds", "0"),
        ("--ssds", "-1"),
        ("--gpus", "0"),
        ("--policy", "lohan++"),
        ("--policy", ""),
        ("--tokens", "lots"),
        ("--tokens", "0"),
        ("--tokens", "-5M"),
        ("--tokens", "1e99"),
    ],
)
def test_value_that_cannot_be_is_refused(words: tuple[str, str]) -> None:
    assert_refused(run_lohan(*PLAN, *words))


def test_clipping_asked_of_a_published_system_is_refused() -> None:
    assert_refused(run_lohan(*PLAN, "--policy", "lohan", "--clip"), "--clip", "lohan+")


def test_no_policies_to_compare_is_refused() -> None:
    words = ("compare", "gpt-1.55b", "--machine", "paper-4090", "--policies")
    assert_refused(run_lohan(*words, ","), "--policies")
    assert_refused(run_lohan(*words, "lohan,zero-infinty"), "zero-infinity")


@pytest.mark.parametrize(
    "words",
    [
        ("simulate",),
        ("plan", "gpt-1.55b", "--machine", "paper-4090", "--batch", "many"),
        ("simulate", "gpt-1.55b", "--machine", "paper-4090", "--bach", "8"),
        ("train-it",),
    ],
)
def test_wrong_usage_exits_with_2(words: tuple[str, ...]) -> None:
    ran = run_lohan(*words)
    assert ran.exit_code == 2
    assert ran.stdout == ""
    assert "Usage: " in ran.stderr


def test_a_plan_takes_settings_of_training_and_names_what_is_none() -> None:
    assert_refused(run_lohan("plan"), "no model is given", "lohan plan run.yaml")
    assert_refused(run_lohan(*PLAN, "--bach", "8"), 'unknown key "bach"')


@pytest.mark.parametrize("option", ["--trace", "--svg", "--schedule"])
class TestOutputs:
    SIMULATE = ("simulate", "gpt-1.55b", "--machine", "paper-4090", "--policy", "lohan")

    def test_existing_file_is_kept_without_force(self, tmp_path: pathlib.Path, option: str) -> None:
        path = tmp_path / "out"
        path.write_text("mine")
        assert_refused(run_lohan(*self.SIMULATE, option, path), "exists", "--force")
        assert path.read_text() == "mine"
        assert run_lohan(*self.SIMULATE, option, path, "--force").exit_code == 0
        assert path.read_text() != "mine"

    def test_missing_directory_is_refused(self, tmp_path: pathlib.Path, option: str) -> None:
        assert_refused(run_lohan(*self.SIMULATE, option, tmp_path / "no" / "out"), "no directory")
        assert list(tmp_path.iterdir()) == []

    def test_directory_in_its_place_is_refused(self, tmp_path: pathlib.Path, option: str) -> None:
        assert_refused(run_lohan(*self.SIMULATE, option, tmp_path, "--force"), "directory")

    def test_pipe_or_device_in_its_place_is_refused_and_kept(
        self, tmp_path: pathlib.Path, option: str
    ) -> None:
        os.mkfifo(tmp_path / "pipe")
        (tmp_path / "link").symlink_to("pipe")
        for name in ("pipe", "link"):
            ran = run_lohan(*self.SIMULATE, option, tmp_path / name, "--force")
            assert_refused(ran, "not a file")
        assert (tmp_path / "pipe").is_fifo()
        assert (tmp_path / "link").is_symlink()

    def test_link_stays_and_its_file_is_replaced(self, tmp_path: pathlib.Path, option: str) -> None:
        (tmp_path / "real").write_text("mine")
        (tmp_path / "link").symlink_to("real")
        assert run_lohan(*self.SIMULATE, option, tmp_path / "link", "--force").exit_code == 0
        assert (tmp_path / "link").is_symlink()
        assert (tmp_path / "real").read_text() != "mine"

    def test_refused_request_writes_nothing(self, tmp_path: pathlib.Path, option: str) -> None:
        ran = run_lohan(*self.SIMULATE, option, tmp_path / "out", "--batch", 0)
        assert_refused(ran)
        assert list(tmp_path.iterdir()) == []

    def test_plan_that_does_not_fit_writes_nothing(
        self, tmp_path: pathlib.Path, option: str
    ) -> None:
        ran = run_lohan(*self.SIMULATE, option, tmp_path / "out", "--batch", 4096)
        assert ran.exit_code == 1
        assert list(tmp_path.iterdir()) == []


def test_one_path_for_two_outputs_is_refused(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "out"
    words = ("simulate", "gpt-1.55b", "--machine", "paper-4090", "--svg", path, "--trace", path)
    assert_refused(run_lohan(*words), "twice")


@pytest.mark.parametrize("steps", [0, -1, 9])
def test_number_of_steps_that_cannot_be_shown_is_refused(steps: int) -> None:
    words = ("simulate", "gpt-1.55b", "--machine", "paper-4090", "--steps", steps)
    assert_refused(run_lohan(*words), f"--steps {steps}")


def test_mistake_of_our_own_is_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr("lohan.cli.reading.request.shape_of", broken)
    with pytest.raises(ZeroDivisionError, match="ours"):
        run_lohan(*PLAN)


def test_real_process_shows_an_error_on_stderr_and_exits_with_2() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from lohan.cli import main; main()", *PLAN, "--batch", "0"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: batch is 0\n  why: ")


def test_file_that_fails_while_written_leaves_the_old_one(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lohan.durable_files import replace_text

    path = tmp_path / "out"
    path.write_text("old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(ConfigError, match="No space left"):
        replace_text(path, "new")
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]
    assert path.read_text() == "old"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (PermissionError(13, "Permission denied", "/other/run.json"), ["/other/run.json", "own"]),
        (OSError(28, "No space left on device"), ["standard output", "space"]),
        (MemoryError(), ["no more memory (MemoryError)", "ulimit -v"]),
        (RuntimeError("could not create a primitive"), ["no more memory", "primitive"]),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), ["DefaultCPUAllocator"]),
    ],
)
def test_what_the_system_refuses_is_told_without_a_traceback(
    error: Exception, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("lohan.train.run.checking.check_directory", fail)
    assert_refused(run_lohan("check", "/other"), *words)


def test_a_mistake_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr("lohan.train.run.checking.check_directory", fail)
    with pytest.raises(RuntimeError, match="shapes do not match"):
        run_lohan("check", "/other")


def test_closed_streams_lead_nowhere_and_no_file_gets_their_number() -> None:
    code = (
        "import os, sys; from lohan.cli import main; sys.argv = ['lohan', 'machines']\n"
        "try: main()\n"
        "except SystemExit as ended: os._exit(ended.code or os.open(os.devnull, 0) <= 2)\n"
    )
    for closed in ("2>&-", ">&- 2>&-", "<&- >&- 2>&-"):
        ran = subprocess.run(["sh", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, code])
        assert ran.returncode == 0, closed
