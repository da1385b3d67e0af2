"""Runs `lohan` commands in forked processes, each with at most one fault.

Owns forking, the fault of a child (system calls by the shim, signals by the clock, a limit of file
sizes), and what is left of it when it ends. The parent has imported everything and has no thread,
so a child starts within milliseconds. A child has a process group of its own.
"""

import atexit
import contextlib
import ctypes
import importlib
import mmap
import os
import pathlib
import resource
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fcntl import ioctl

PRELOADED = (
    "lohan",  # before torch, which it keeps from what does not run here
    "torch._dynamo",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "transformers.models.auto.tokenization_auto",
    "trl",
    "trl.trainer.sft_trainer",
    "datasets.packaged_modules.generator.generator",
    "pydantic",
    "typer._adapters",
    "lohan.cli",
    "lohan.cli.tables.output",
    "lohan.device.accelerator",
    "lohan.train.fine_tune",
    "lohan.train.data.preview",
    "lohan.train.data.tokenizing",
    "lohan.train.run.checking",
    "lohan.train.trainer.saving",
    "lohan.train.trainer.trainer",
    "support.tiny_chat",
    "support.small_machines",
)
WRITES, SYNCS, NAMES, ROOM, READS = 1, 2, 4, 8, 16
"""Classes of system calls."""
CHANGES = WRITES | SYNCS | NAMES | ROOM
COUNT, SIGNAL, FAIL, SHORT, POWER_CUT = range(5)
"""What becomes of the n-th call."""
LIMIT_SECONDS = 180.0
"""A child that takes longer hangs."""
_SHUTDOWN = 0x8004587D
_SOURCE = pathlib.Path(__file__).with_name("system_calls.c")
_TOLD = struct.Struct("ll32s400s")


@dataclass(frozen=True, kw_only=True)
class AtCall:
    """A fault at the n-th system call of some classes within some folders."""

    nth: int
    classes: int = CHANGES
    action: int = COUNT
    number: int = 0
    """Of the signal, or the errno."""
    is_lasting: bool = False
    is_uring_refused: bool = False


@dataclass(frozen=True, kw_only=True)
class AtTime:
    """Something the parent does some seconds after a child began, once a condition holds."""

    seconds: float
    act: Callable[[int], None]
    """Gets the child's process id."""
    condition: Callable[[], bool] = lambda: True


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a child ended."""

    code: int
    output: str
    num_calls: int = 0
    is_disturbed: bool = False
    """Whether the fault came to pass."""
    where: str = ""
    num_left: int = 0
    """Processes of its group that outlived it."""
    is_late: bool = False
    temporary: list[str] = field(default_factory=list)
    """What it left in its folder for temporary files."""


def compile_shim(folder: pathlib.Path) -> pathlib.Path | None:
    """The shim as a library, or None where there is no C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return None
    library = folder / "system_calls.so"
    words = [compiler, "-O1", "-shared", "-fPIC", "-o", str(library), str(_SOURCE), "-ldl"]
    return library if subprocess.run(words, check=False).returncode == 0 else None


def is_shim_loaded() -> bool:
    """Whether system calls of this process can be disturbed."""
    return hasattr(ctypes.CDLL(None), "torture_arm")


def preload() -> None:
    """Import what takes seconds. Must leave no thread behind: it would not be there in a child."""
    for name in PRELOADED:
        importlib.import_module(name)
    # Compiles a thousand expressions, once in a process.
    importlib.import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("")
    tasks = pathlib.Path("/proc/self/task").glob("*/comm")
    others = [name for path in tasks if (name := path.read_text().strip()) != "jemalloc_bg_thd"]
    assert len(others) == 1, others


def cut_power(disks: Sequence[int]) -> None:
    """Nothing more reaches these filesystems, not even the journal."""
    for descriptor in disks:
        ioctl(descriptor, _SHUTDOWN, struct.pack("I", 2))


def run(
    words: Sequence[str],
    *,
    scratch: pathlib.Path,
    watched: Sequence[pathlib.Path] = (),
    fault: AtCall | AtTime | None = None,
    disks: Sequence[int] = (),
    most_file_bytes: int | None = None,
    program: Callable[[], None] | None = None,
) -> Ended:
    """Run `lohan` with these words (or a function) in a child, and wait for its end.

    Args:
        scratch: for its output and temporary files.
        watched: folders whose system calls are counted and disturbed.
        disks: descriptors of the filesystems that lose power.
    """
    output = scratch / "output"
    output.write_bytes(b"")
    temporary = scratch / "temporary"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        child = os.fork()
        if child == 0:
            _become(words, output, temporary, watched, fault, disks, most_file_bytes, page, program)
        status, is_late, is_acted = _wait(child, fault if isinstance(fault, AtTime) else None)
        num_calls, num_done, call, path = _TOLD.unpack(page[: _TOLD.size])
    where = f"{_text(call)} {_text(path)}".strip()
    num_left = _end_group(child)
    return Ended(
        code=os.waitstatus_to_exitcode(status),
        output=output.read_text(encoding="utf-8", errors="replace"),
        num_calls=num_calls,
        is_disturbed=is_acted or num_done > 0 or most_file_bytes is not None,
        where=where,
        num_left=num_left,
        is_late=is_late,
        temporary=sorted(path.name for path in temporary.iterdir()),
    )


def _text(field_bytes: bytes) -> str:
    return field_bytes.split(b"\0")[0].decode(errors="replace")


def _wait(child: int, fault: AtTime | None) -> tuple[int, bool, bool]:
    started, is_acted, is_late = time.monotonic(), False, False
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status, is_late, is_acted
        lasted = time.monotonic() - started
        if fault is not None and not is_acted and lasted >= fault.seconds and fault.condition():
            is_acted = True
            fault.act(child)
        if lasted > LIMIT_SECONDS and not is_late:
            is_late = True
            os.kill(child, signal.SIGKILL)
        time.sleep(0.002)


def _end_group(group: int) -> int:
    """End what a child left running; returns how many that were."""
    num_left = 0
    for status in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):
            fields = status.read_text().rpartition(")")[2].split()
            num_left += int(fields[2]) == group and fields[0] != "Z"
    if num_left:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
    return num_left


def _become(
    words: Sequence[str],
    output: pathlib.Path,
    temporary: pathlib.Path,
    watched: Sequence[pathlib.Path],
    fault: AtCall | AtTime | None,
    disks: Sequence[int],
    most_file_bytes: int | None,
    page: mmap.mmap,
    program: Callable[[], None] | None,
) -> None:
    """Runs in the child, and ends it."""
    os.setpgid(0, 0)
    descriptor = os.open(output, os.O_WRONLY | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for ours, theirs in ((nothing, 0), (descriptor, 1), (descriptor, 2)):
        os.dup2(ours, theirs)
    os.environ["TMPDIR"] = str(temporary)
    if not isinstance(fault, AtCall):
        fault = AtCall(nth=0)
    if is_shim_loaded():
        ctypes.CDLL(None).torture_arm(
            "".join(f"{folder}\n" for folder in watched).encode(),
            ctypes.c_long(fault.nth),
            *(fault.classes, fault.action, fault.number),
            *(int(fault.is_lasting), int(fault.is_uring_refused)),
            *([*disks, -1, -1][:2]),
            ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(page))),
        )
    if most_file_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most_file_bytes, resource.RLIM_INFINITY))
    code = 1
    try:
        sys.argv = ["lohan", *words]
        (program or importlib.import_module("lohan.cli").main)()
        code = 0
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
        if isinstance(ending.code, str):
            print(ending.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        # As at the end of any program, but for taking every object apart, which takes seconds.
        try:
            threading._shutdown()
            atexit._run_exitfuncs()
            sys.stdout.flush()
        finally:
            os._exit(code)
