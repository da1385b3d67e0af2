"""Programs in processes of their own that need not import everything again.

`run_forked` is `subprocess.run` for a program of `support`: a server, one for each process that
tests, imports once what takes seconds and forks for each call. The child has arguments, environment
and output of its own, and ends as any process does. What a child would read from the environment
while it imports must be in `ENVIRONMENT`.
"""

import functools
import importlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence

TESTS = pathlib.Path(__file__).parents[1]
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(TESTS)}
PRELOADED = (
    "lohan",  # before torch, which it keeps from what does not run here
    "torch._dynamo",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "trl",
    "trl.trainer.sft_trainer",
    "lohan.cli",
    "lohan.train.trainer.saving",
    "lohan.train.trainer.trainer",
    "support.lohan_with_small_engine",
    "support.trainer_engines",
)


def run_forked(
    program: str, words: Sequence[str], *, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `program.main()` with arguments; its output and errors together are `stdout`."""
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    with tempfile.NamedTemporaryFile() as output:
        wish = {"program": program, "words": list(words), "env": env or {}, "output": output.name}
        server.stdin.write(json.dumps(wish) + "\n")
        server.stdin.flush()
        told = server.stdout.readline()
        assert told, "the fork server has ended"
        return subprocess.CompletedProcess(
            [program, *words], int(told), pathlib.Path(output.name).read_text()
        )


@functools.cache
def _server() -> subprocess.Popen[str]:
    """Ends when this process does: its input ends then."""
    return subprocess.Popen(
        [sys.executable, "-m", "support.fork_server"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=TESTS,
        env=os.environ | ENVIRONMENT,
    )


def serve() -> dict[str, str] | None:
    """Fork for every line of input. Returns the wish in a child, and None in the server's end."""
    for name in PRELOADED:
        importlib.import_module(name)
    for line in sys.stdin:
        # A thread would not be there in the child, and what it holds would stay locked.
        assert not (others := _other_threads()), f"something imported started {others}"
        child = os.fork()
        if child == 0:
            wish: dict[str, str] = json.loads(line)
            return wish
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
    return None


def _other_threads() -> list[str]:
    """But for that of jemalloc (pyarrow's allocator), which takes its locks before a fork."""
    names = [path.read_text().strip() for path in pathlib.Path("/proc/self/task").glob("*/comm")]
    return [name for name in names if name != "jemalloc_bg_thd"][1:]


def become(wish: dict[str, str]) -> None:
    """Run what is wished for in place of the server."""
    output = os.open(wish["output"], os.O_WRONLY | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for ours, theirs in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(ours, theirs)
    os.environ.update(wish["env"])
    sys.argv = [wish["program"], *wish["words"]]
    importlib.import_module(wish["program"]).main()


if __name__ == "__main__":
    wished = serve()
    if wished is not None:
        become(wished)
