"""What one optimizer step must do: how many sequences, how long, clipped or not.

Owns the user's request; knows nothing of machines or models.
"""

from dataclasses import dataclass

from lohan.errors import ConfigError

MOST = 10**9
"""Sequences or tokens per sequence beyond which a request is a slip of the finger."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One optimizer step over `batch` sequences (of all GPUs together) of `sequence` tokens."""

    batch: int
    sequence: int
    clips_gradients: bool = False
    num_micro_batches: int | None = None
    """Parts in which the batch comes; None: as many as the plan finds best."""
    num_ranks: int = 1
    """Processes that take a step together, each with `batch` sequences of its own and a slice of
    every block's states."""
    should_chunk_loss: bool = False
    """Whether the loss may be computed in chunks, so that no logits exist as a whole."""
    reduction_groups: int = 1
    """Groups whose gradients are added in fp32, in their order; the ranks have equally many."""

    def __post_init__(self) -> None:
        counts = [("batch", self.batch), ("sequence", self.sequence)]
        if self.num_micro_batches is not None:
            counts.append(("num_micro_batches", self.num_micro_batches))
        for name, value in counts:
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(
                    f"{name} is {value!r}",
                    why="a step needs at least one sequence of at least one token",
                    remedy=f"give a whole {name} of 1 or more",
                )
            if value > MOST:
                raise ConfigError(
                    f"{name} is {value}",
                    why=f"no step has more than {MOST}",
                    remedy=f"give a smaller {name}",
                )

    @property
    def num_tokens(self) -> int:
        """Tokens of one step, of all ranks."""
        return self.num_ranks * self.batch * self.sequence

    @property
    def groups_per_rank(self) -> int:
        """Reduction groups of one rank: so many gradients of a block are there at once."""
        return self.reduction_groups // self.num_ranks

    @property
    def gradient_bytes(self) -> int:
        """Bytes per parameter of a gradient that waits for its update: a sum of groups is fp32."""
        return 2 if self.reduction_groups == 1 else 4

    def slice_of(self, count: int) -> int:
        """One rank's part of something of a block, rounded up."""
        return -(-count // self.num_ranks)

    def batch_per_gpu(self, num_gpus: int) -> int:
        """Sequences each GPU computes in a step.

        Raises:
            ConfigError: if the batch cannot be dealt out evenly.
        """
        if self.batch % num_gpus:
            raise ConfigError(
                f"a batch of {self.batch} does not divide over {num_gpus} GPUs",
                why="every GPU must compute the same number of sequences",
                remedy=f"use a batch of {self.batch // num_gpus * num_gpus or num_gpus} or "
                f"{(self.batch // num_gpus + 1) * num_gpus}",
            )
        return self.batch // num_gpus
