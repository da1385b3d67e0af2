"""Autograd's backward on a thread of its own, as torch has it for tensors on a GPU.

On a CPU the thread that calls `backward` runs it. On a GPU a thread of torch's does, to which torch
hands the caller's dispatch modes and the grad mode, and nothing of Python's own per-thread values.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import (
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)


def run_backward_elsewhere(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Until the end of a test; returns the threads that ran one, as they come."""
    threads: list[int] = []
    for name in ("backward", "grad"):
        plain = getattr(torch.autograd, name)
        monkeypatch.setattr(torch.autograd, name, _elsewhere(plain, threads))
    return threads


def _elsewhere(plain: Callable[..., Any], threads: list[int]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        modes = _get_current_dispatch_mode_stack()
        is_recording, num_threads = torch.is_grad_enabled(), torch.get_num_threads()
        result: Future[Any] = Future()

        def body() -> None:
            threads.append(threading.get_ident())
            # Counted per thread; on a GPU it has no say.
            torch.set_num_threads(num_threads)
            for mode in modes:
                _push_mode(mode)
            try:
                with torch.set_grad_enabled(is_recording):
                    result.set_result(plain(*args, **kwargs))
            except BaseException as error:
                result.set_exception(error)
            finally:
                for _ in modes:
                    _pop_mode()

        thread = threading.Thread(target=body)
        thread.start()
        thread.join()
        return result.result()

    return call
