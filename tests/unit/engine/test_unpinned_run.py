"""A run on a machine that refuses to pin memory says so, once, and goes on."""

from pathlib import Path

from lohan.device import CpuDevice
from lohan.errors import HardwareError
from support.engine_runs import EngineCase, attach, batches_of, build, optimizer_for


class UnpinnableDevice(CpuDevice):
    """The system pins nothing."""

    def pin(self, address: int, nbytes: int) -> None:
        raise HardwareError(
            f"{nbytes} bytes could not be pinned", why="a limit", remedy="raise ulimit -l"
        )


def test_a_run_without_pinned_memory_says_so_once(tmp_path: Path) -> None:
    case = EngineCase(num_steps=2)
    model, told = build(case), list[str]()
    with attach(
        case,
        model,
        optimizer_for(case, model),
        tmp_path,
        device=UnpinnableDevice(),
        progress=told.append,
    ) as engine:
        for batches in batches_of(case):
            engine.step(batches)
        engine.close(should_delete=True)
    slower = [sentence for sentence in told if "slower" in sentence]
    assert len(slower) == 1
    assert "raise ulimit -l" in slower[0]
