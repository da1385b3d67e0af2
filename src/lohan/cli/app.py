"""The application: which commands there are, and how an error reaches the user.

Owns exit codes: 0 done, 1 the plain answer is no (a plan does not fit), 2 the request cannot be
meant or met (every LohanError, and wrong usage). Commands import what they compute with when they
run, so that help answers at once.
"""

import errno
import gc
import os
import sys
from collections.abc import Callable
from typing import Annotated

import typer
from typer.core import TyperGroup

import lohan
from lohan.cli.check import check
from lohan.cli.clean import clean
from lohan.cli.data_preview import data_commands
from lohan.cli.doctor import doctor
from lohan.cli.export import export
from lohan.cli.known_names import machines, models
from lohan.cli.paper import compare, reproduce
from lohan.cli.plan import plan
from lohan.cli.profile import profile
from lohan.cli.reading.extra_args import FREE_OPTIONS
from lohan.cli.report import report
from lohan.cli.simulate import simulate
from lohan.cli.train import train
from lohan.cli.verify import verify
from lohan.errors import HardwareError, LohanError, missing_package

EXIT_ERROR = 2
# How torch and oneDNN say it.
_WITHOUT_MEMORY = ("allocate memory", "could not create a primitive", "can't start new thread")
# Plans and schedules are many small objects that live until the command ends.
_GC_THRESHOLD = 500_000


class _Commands(TyperGroup):
    """A group whose commands show a LohanError instead of a traceback."""

    def invoke(self, ctx: typer.Context) -> object:  # type: ignore[override]
        try:
            return super().invoke(ctx)
        except (LohanError, ModuleNotFoundError, OSError, MemoryError, RuntimeError) as error:
            told = _as_told(error)
            if told is None:
                raise
            show_error(told)
            raise typer.Exit(EXIT_ERROR) from error


def _as_told(error: Exception) -> LohanError | None:
    """What a command failed with in our words, where the system refused it; None: a mistake."""
    if isinstance(error, LohanError):
        return error
    if isinstance(error, ModuleNotFoundError):
        return missing_package(error)
    if isinstance(error, OSError):
        from lohan.ssd.engines.storage_errors import storage_error

        # Of a network, or of names of hosts; of a reader that has enough.
        if error.errno is None or error.errno < 0 or error.errno == errno.EPIPE:
            return None
        path = str(error.filename or "standard output")
        return storage_error("a file cannot be used", error.errno, path=path)
    said = " ".join(str(error).split())[:300]
    if not isinstance(error, MemoryError) and not any(words in said for words in _WITHOUT_MEMORY):
        return None
    where = "".join(f"; {note}" for note in getattr(error, "__notes__", ())[:1])
    return HardwareError(
        f"the system gave no more memory ({said or type(error).__name__}{where})",
        why="a limit of this process (`ulimit -v`, a container's) or of the machine is reached",
        remedy="raise the limit, or lower what is used: --ram, --gpu, a smaller micro-batch or a "
        "shorter max_length; what was sealed stays",
    )


def show_error(error: LohanError) -> None:
    """Print what happened, why it is a problem, where and what to do, to stderr."""
    print(f"error: {error.what}", file=sys.stderr)
    print(f"  why: {error.why}", file=sys.stderr)
    for note in getattr(error, "__notes__", ()):
        print(f"  at:  {note.splitlines()[0].removeprefix('lohan: ')}", file=sys.stderr)
    print(f"  do:  {error.remedy}", file=sys.stderr)


app = typer.Typer(
    name="lohan",
    cls=_Commands,
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Fine-tune models far larger than the GPU, and larger than main memory, on one machine.",
)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        print(f"lohan {lohan.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    pass


# In the order of use: train, look at what came of it, then plan and compare. The words are those
# of the list of commands, short enough for a terminal of 80 columns.
app.command(
    short_help="Fine-tune a model and write it for from_pretrained.",
    options_metavar="[CONFIG.yaml] [OPTIONS] [--key value]...",
    context_settings=FREE_OPTIONS,
)(train)
app.add_typer(data_commands, short_help="Look at training rows, with the loss mask.")
_OTHERS: dict[Callable[..., None], str] = {
    export: "Write the model of a run's last seal.",
    check: "Find damage in a model, an archive or a run's states.",
    report: "Write report.html about a run.",
    clean: "List the runs left on SSDs; remove those named.",
    doctor: "Is this machine ready to train, and what is to be fixed?",
    verify: "Does offloading change a bit? Train a small copy and compare.",
    profile: "Measure drives, copies, compute and updates.",
    plan: "Does a fine-tune fit, how long does it take, what does it wear?",
    simulate: "Run a plan on a virtual clock: timeline and picture.",
    compare: "Put the plans of published systems side by side.",
    reproduce: "Compare every published figure with the simulator.",
    models: "List the models known by name.",
    machines: "List the machines known by name.",
}
for _command, _words in _OTHERS.items():
    # A plan takes the words of a run.
    _settings = FREE_OPTIONS if _command is plan else None
    app.command(short_help=_words, context_settings=_settings)(_command)


def _fill_closed_streams() -> None:
    """Standard streams that are closed lead nowhere.

    Else a file of the run gets their number, and what a library prints is written into it.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))  # noqa: SIM115


def main() -> None:
    """Run the command line; the process ends here."""
    _fill_closed_streams()
    gc.set_threshold(_GC_THRESHOLD)
    if not sys.stderr.isatty():
        # Bars of the libraries are for terminals; tqdm looks here when it is imported.
        os.environ.setdefault("TQDM_DISABLE", "1")
    app()
