"""The engine under a trainer in tests: real states on disk, little memory, one thread."""

import pathlib
from dataclasses import replace
from typing import Any

from lohan.engine.attach import attach_engine
from lohan.engine.options import FirstStates, Options
from support.small_machines import small_machine

MIB = 1 << 20


def attach_small(model: Any, optimizer: Any, options: Options, first: FirstStates) -> Any:
    """In place of `lohan.attaching.attach_with`: no machine is measured."""
    for place in options.ssd:
        pathlib.Path(place).mkdir(parents=True, exist_ok=True)
    return attach_engine(
        model,
        optimizer,
        replace(
            options,
            ram_bytes=options.ram_bytes or 64 * MIB,
            gpu_bytes=options.gpu_bytes or 64 * MIB,
            machine=small_machine(len(options.ssd)),
            device=options.device or "cpu",
            num_threads=1,
            progress=None,
        ),
        first,
    )
