"""A child that is forked holds no lock of its parent."""

import fcntl
import os
import pathlib

from lohan.held_locks import hold, let_go


def _open(path: pathlib.Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY)


def test_a_forked_child_does_not_hold_the_lock(tmp_path: pathlib.Path) -> None:
    held = hold(_open(tmp_path))
    fcntl.flock(held, fcntl.LOCK_EX)
    child = os.fork()
    if child == 0:  # as a worker that is left behind: it has no copy, and letting go is harmless
        code = 0
        try:
            os.fstat(held)
            code = 1
        except OSError:
            let_go(held)
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    other = _open(tmp_path)
    try:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        raise AssertionError("the child unlocked its parent's folder")
    except BlockingIOError:
        pass
    let_go(held)
    let_go(held)
    fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(other)
