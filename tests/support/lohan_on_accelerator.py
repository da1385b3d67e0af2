"""`lohan` as a program on the test accelerator, with a small engine. Run by tests of its end.

With `END_AT` in the environment ("kill 2 forward", "fail 2 backward") something happens in that
step of this process, once two blocks were launched in that direction and while kernels that come
late are queued: the process is killed, or one more kernel is queued, which fails.
"""

import os
import signal
from typing import Any

from support import accelerator, lohan_with_small_engine

LATE_KERNEL_MICROSECONDS = 200


def main() -> None:
    accelerator.load()
    import transformers.training_args

    from lohan.drive import Phase
    from lohan.engine.driver import StepDriver

    # transformers knows by name which devices can do bf16.
    transformers.training_args.is_torch_bf16_gpu_available = lambda: True
    accelerator.calls().set_delay(0, LATE_KERNEL_MICROSECONDS)
    begin, after = StepDriver.begin, StepDriver.after
    num_steps, launched = 0, list[Phase]()

    def begins(self: Any, tasks: Any, step: int, record: Any) -> None:
        nonlocal num_steps
        num_steps += record is not None
        launched.clear()
        begin(self, tasks, step, record)

    def ends(self: Any, segment: Any, phase: Phase, gradients: Any) -> None:
        after(self, segment, phase, gradients)
        launched.append(phase)
        how, number, direction = os.environ["END_AT"].split()
        if num_steps == int(number) and [one.name.lower() for one in launched].count(direction) > 1:
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            accelerator.calls().fail("an illegal memory access")

    if os.environ.get("END_AT"):
        StepDriver.begin, StepDriver.after = begins, ends  # type: ignore[method-assign]
    lohan_with_small_engine.main()
