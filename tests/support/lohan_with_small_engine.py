"""`lohan` as a program, on a small engine that measures no machine. Run by fault tests.

With `SIGNAL_WHEN` in the environment it sends itself a signal (see `support.signalled`): a parent
that waits for a line and then sends one comes too late on a busy machine, or on a fast one.
"""

import sys

if __name__ == "__main__":
    sys.path.insert(0, __file__.rsplit("/support/", 1)[0])
from support.signalled import signal_when_told
from support.watched_memory import tell_peak_at_end


def main() -> None:
    signal_when_told()  # before what takes long to import
    tell_peak_at_end()

    import torch

    import lohan.train.trainer.saving
    from lohan.cli import main as lohan_main
    from support.trainer_engines import attach_small

    torch.set_num_threads(1)
    lohan.train.trainer.saving.attach_with = attach_small
    lohan_main()


if __name__ == "__main__":
    main()
