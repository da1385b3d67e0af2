"""The arguments and options that several commands share, each said once.

Owns names and help texts. What they mean is worked out in `request`.
"""

import pathlib
from typing import Annotated

import typer


def known_models() -> list[str]:
    """Names a shell may complete."""
    from lohan.model.names import known_names

    return list(known_names())


def _machines() -> list[str]:
    from lohan.hardware.presets import MACHINE_NAMES

    return list(MACHINE_NAMES)


def _policies() -> list[str]:
    from lohan.paper import POLICY_NAMES

    return list(POLICY_NAMES)


ModelArgument = Annotated[
    str,
    typer.Argument(
        help="A known name (lohan models), a transformers config.json or its folder, or a hub id.",
        autocompletion=known_models,
    ),
]
MachineOption = Annotated[
    str | None,
    typer.Option(
        "--machine",
        "-m",
        help="A preset (lohan machines) or a machine file (.json). [default: this machine, as "
        "lohan profile or a run measured it]",
        autocompletion=_machines,
    ),
]
BATCH_HELP = "Sequences per optimizer step, all GPUs together."
BatchOption = Annotated[int, typer.Option("--batch", "-b", help=BATCH_HELP)]
SequenceOption = Annotated[
    int | None,
    typer.Option(
        "--seq", "-s", help="Tokens per sequence. [default: 1024, or what the model fixes]"
    ),
]
RamOption = Annotated[
    str | None, typer.Option("--ram", help="Another RAM size, with its unit: 256GiB.")
]
GpuOption = Annotated[
    str | None, typer.Option("--gpu", help="Another memory size of each GPU: 16GiB.")
]
SsdsOption = Annotated[int | None, typer.Option("--ssds", help="Another number of drives.")]
GpusOption = Annotated[int | None, typer.Option("--gpus", help="Another number of GPUs.")]
PolicyOption = Annotated[
    str,
    typer.Option(
        "--policy",
        "-p",
        help="Whose plan: lohan+, or a published system's.",
        autocompletion=_policies,
    ),
]
TokensOption = Annotated[
    str, typer.Option("--tokens", help="Tokens of the whole run, such as 50M or 1.2B.")
]
ClipOption = Annotated[
    bool | None,
    typer.Option(
        "--clip/--no-clip",
        help="Gradient clipping by global norm. [default: on for lohan+; the others have none]",
    ),
]
RunArgument = Annotated[
    str,
    typer.Argument(
        metavar="RUN", help="A run's output folder, its directory on an SSD, or its id with --ssd."
    ),
]
RunSsdOption = Annotated[
    list[pathlib.Path] | None,
    typer.Option(
        "--ssd",
        help="The run's SSD directories, all of them; needed with an id, and if they have moved.",
    ),
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON object instead of tables.")
]
DeviceOption = Annotated[
    str | None,
    typer.Option("--device", help="cuda, cuda:1, cpu or emulated. [default: a GPU if any]"),
]
TrustOption = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")
]
ForceOption = Annotated[bool, typer.Option("--force", help="Overwrite files that exist.")]
