"""Leaves out the processor's matrix tiles (AMX) where the machine does not let them run.

Some virtual machines show tiles that end whoever uses them with SIGILL, and torch's libraries
believe what is shown: the first bf16 product is the end of the process. Every way into `lohan`
imports this module before torch computes. A try takes a millisecond and is made only where the
processor shows tiles, so nothing is remembered between processes.
"""

import os
from collections.abc import Callable, MutableMapping

from lohan import _native

# What a library that torch computes with may use, by the variable it reads at its first product:
# the values without tiles, of which the last is the most.
WITHOUT_TILES = {
    "ONEDNN_MAX_CPU_ISA": (
        *("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE"),
        *("AVX512_CORE_VNNI", "AVX512_CORE_BF16", "AVX512_CORE_FP16"),
    ),
    "MKL_ENABLE_INSTRUCTIONS": (
        *("SSE4_2", "AVX", "AVX2", "AVX2_E1"),
        *("AVX512", "AVX512_E1", "AVX512_E2", "AVX512_E3"),
    ),
}


def leave_out_broken_tiles(
    environ: MutableMapping[str, str] = os.environ, probe: Callable[[], str] = _native.probe_tiles
) -> str:
    """Limit this process and its children where tiles do not run; what was done, or nothing.

    Limits of the user's that leave the tiles out stay as they are.
    """
    allowing = [
        name
        for name, values in WITHOUT_TILES.items()
        if environ.get(name, "").upper() not in values
    ]
    found = probe() if allowing else "none"
    if found in ("none", "run"):
        return ""
    done = []
    for name in allowing:
        before, limit = environ.get(name), WITHOUT_TILES[name][-1]
        environ[name] = limit
        done.append(f"{name}={limit}" + (f" in place of {before}" if before else ""))
    return f"matrix tiles (AMX) do not run here ({found}) and are left out: {', '.join(done)}"


NOTE = leave_out_broken_tiles()
"""What was done when `lohan` was imported, in words; empty where nothing had to be."""
