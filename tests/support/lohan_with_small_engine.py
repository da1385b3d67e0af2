"""`lohan` as a program, on a small engine that measures no machine. Run by fault tests."""

import sys

import torch

sys.path.insert(0, __file__.rsplit("/support/", 1)[0])


def main() -> None:
    import lohan.train.saving
    from lohan.cli import main as lohan_main
    from support.trainer_engines import attach_small

    torch.set_num_threads(1)
    lohan.train.saving.attach_engine = attach_small
    lohan_main()


if __name__ == "__main__":
    main()
