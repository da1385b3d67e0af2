import errno
import os
import pathlib

import pytest

from lohan import _native
from lohan.ssd import choose_engine
from lohan.ssd.engines import engine as choose


def refuse_with(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "probe_uring", lambda: number)


def test_the_reason_is_given_with_the_engine() -> None:
    engine, reason = choose_engine()
    assert reason.startswith(engine.name)
    engine.close()


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSYS, "the kernel has no io_uring"),
        (errno.ENOMEM, "locked-memory limit"),
        (errno.EINVAL, os.strerror(errno.EINVAL)),
    ],
)
def test_threads_are_taken_where_io_uring_is_refused(
    number: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_with(number, monkeypatch)
    engine, reason = choose_engine()
    assert engine.name == "threads"
    assert words in reason
    engine.close()


@pytest.mark.parametrize(
    ("switch", "words"),
    [("2", "kernel.io_uring_disabled is 2"), ("0", "a sandbox"), (None, "a sandbox")],
)
def test_a_refusal_by_permission_names_the_switch_or_the_sandbox(
    switch: str | None, words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "io_uring_disabled"
    if switch is not None:
        path.write_text(f"{switch}\n")
    monkeypatch.setattr(choose, "_DISABLED_SWITCH", path)
    refuse_with(errno.EPERM, monkeypatch)
    engine, reason = choose_engine()
    assert words in reason
    engine.close()


def test_a_build_without_io_uring_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_with(errno.ENOSYS, monkeypatch)
    monkeypatch.setattr(_native, "is_uring_compiled_in", lambda: False)
    _, reason = choose_engine()
    assert "this build has no io_uring" in reason
