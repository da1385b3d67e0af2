"""Trains on a small filesystem that somebody else fills up. Run as root of a mount namespace.

    unshare --mount python -m support.full_drive_training DIRECTORY

Exits with 0 if a seal on the full drive failed as it should, could be made when there was room, and
was found again with the bits of an undisturbed run.
"""

import contextlib
import pathlib
import subprocess
import sys

import pytest
import torch

from lohan.errors import OutOfSpace
from support.engine_faults import Disturbed, everything_moves, go_on, undisturbed
from support.engine_runs import attach, batches_of, build, optimizer_for

NOT_PERMITTED = 77
"""Exit code where nothing can be mounted; 1 is what any error ends with."""


def fill(path: pathlib.Path) -> None:
    """Take all the room there is."""
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1 << 16))


def main(root: pathlib.Path) -> int:
    case = everything_moves("cpu")
    expected = undisturbed(case, root)
    place = root / "ssd0"
    mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "none", str(place)]
    if subprocess.run(mount, check=False).returncode:
        return NOT_PERMITTED
    steps = batches_of(case)
    model = build(case)
    with attach(case, model, optimizer_for(case, model), root) as engine:
        engine.step(steps[0])
        engine.seal()
        fill(place / "somebody-else")
        # What is reserved is there: a full drive does not disturb a step.
        engine.step(steps[1])
        # Attributes of this size need room that no reserved page has.
        for _ in range(2):
            with pytest.raises(OutOfSpace, match=str(place)):
                engine.seal(metadata={"note": "x" * (1 << 20)})
            assert engine.sealed is not None
            assert engine.sealed.step == 1
        (place / "somebody-else").unlink()
        engine.step(steps[2])
        engine.seal(metadata={"note": "y" * (1 << 20)})
        told = Disturbed(run_id=engine.run_id, sealed=3)
    go_on(case, root, told, expected)
    return 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main(pathlib.Path(sys.argv[1])))
