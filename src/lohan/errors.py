"""Every exception lohan raises on purpose.

    LohanError
      ConfigError         what the user wrote is not valid
      DoesNotFit          a budget (GPU, RAM or SSD bytes) is too small for the plan
      HardwareError       the machine lacks something, or a device failed
      StorageError        bytes on an SSD: carries errno, path, offset, asked and got
        ShortTransfer     a transfer ended early for good (truncated file)
        OutOfSpace        no room on an SSD
        Corrupt           a checksum does not match
      ScheduleError       a schedule that cannot run: our own mistake, caught before the run
      CheckpointError     a checkpoint is missing, damaged or of another run
        OtherRanks        a run was made by another number of ranks; its states are whole
      RankLost            another rank of the run has failed or does not answer
      NonFiniteGradients  a step made infinities or NaNs; nothing was updated with them

Every message has three parts: what happened with the numbers, why it is a problem, what to do. Of
what only our own mistakes bring about, `bug` has the last two.
"""

import copy
import copyreg
import difflib
import os
from collections.abc import Iterable
from typing import Self


class LohanError(Exception):
    """Root of the tree. `what`, `why` and `remedy` are sentences without a final full stop."""

    def __init__(self, what: str, *, why: str, remedy: str) -> None:
        self.what, self.why, self.remedy = what, why, remedy
        super().__init__(f"{what}: {why}. To fix it: {remedy}.")

    def retold(
        self, *, what: str | None = None, why: str | None = None, remedy: str | None = None
    ) -> Self:
        """The same error in other words; whatever else it knows stays as it is."""
        told = copy.copy(self)
        told.what, told.why, told.remedy = what or self.what, why or self.why, remedy or self.remedy
        told.args = (f"{told.what}: {told.why}. To fix it: {told.remedy}.",)
        return told

    def __reduce__(self) -> tuple[object, ...]:
        # Keyword-only arguments do not survive the default pickling of exceptions.
        return (copyreg.__newobj__, (type(self), *self.args), self.__dict__.copy())  # type: ignore[attr-defined]


class ConfigError(LohanError):
    """What the user wrote is not valid."""


class DoesNotFit(LohanError):
    """A budget (GPU, RAM or SSD bytes) is too small for the plan."""


class HardwareError(LohanError):
    """The machine lacks something, or a device failed."""


class StorageError(LohanError):
    """A transfer to or from an SSD failed."""

    def __init__(
        self,
        what: str,
        *,
        why: str,
        remedy: str,
        path: str | None = None,
        offset_bytes: int | None = None,
        asked_bytes: int | None = None,
        got_bytes: int | None = None,
        errno: int | None = None,
    ) -> None:
        self.path, self.errno = path, errno
        self.offset_bytes, self.asked_bytes, self.got_bytes = offset_bytes, asked_bytes, got_bytes
        facts = [
            f"errno {errno} ({os.strerror(errno)})" if errno else None,
            f"file {path}" if path is not None else None,
            f"offset {offset_bytes}" if offset_bytes is not None else None,
            f"asked {asked_bytes} bytes" if asked_bytes is not None else None,
            f"got {got_bytes} bytes" if got_bytes is not None else None,
        ]
        known = ", ".join(fact for fact in facts if fact)
        super().__init__(f"{what} [{known}]" if known else what, why=why, remedy=remedy)


class ShortTransfer(StorageError):
    """A transfer ended early for good: the file is shorter than its layout says."""


class OutOfSpace(StorageError):
    """No room on an SSD for what is to be written."""


class Corrupt(StorageError):
    """Bytes read back are not the bytes that were written."""


class ScheduleError(LohanError):
    """A schedule that cannot run; found by its checks, before anything runs."""


class CheckpointError(LohanError):
    """A checkpoint is missing, damaged, or belongs to another run."""


class OtherRanks(CheckpointError):
    """A run was made by another number of ranks; its states are whole."""


class RankLost(LohanError):
    """Another rank of the run has failed or does not answer."""


class NonFiniteGradients(LohanError):
    """Gradients are infinite or NaN; they were not used."""


def bug(what: str, kind: type[LohanError] = ScheduleError) -> LohanError:
    """The error for what nobody but us can have done wrong; `what` says all there is to know."""
    return kind(
        what,
        why="that is a mistake in lohan itself",
        remedy="report this message with the output of `lohan doctor --report`",
    )


def missing_package(error: ModuleNotFoundError) -> ConfigError:
    """Say what to install where only the core is, which does without torch.

    Raises:
        ModuleNotFoundError: it is a part of lohan itself.
    """
    if (error.name or "").startswith("lohan"):
        raise error
    return ConfigError(
        f"the package {error.name or error} is not installed",
        why="plans for models known by name do without it; what reads, measures or trains does not",
        remedy='install what training needs: pip install "lohan[train]"',
    )


def nearest_names(word: str, known: Iterable[str]) -> str:
    """Say which known names are nearest to a wrong one, for a remedy: `write "a" or "b"`."""
    names = list(known)
    if not names:
        return "leave it out"
    by_folded = {name.casefold(): name for name in names}
    folded = word.casefold()
    nearest = difflib.get_close_matches(folded, by_folded, n=3, cutoff=0.6)
    if folded in by_folded:
        nearest = [folded]  # only its capitals are wrong
    if nearest:
        return "write " + " or ".join(f'"{by_folded[name]}"' for name in nearest)
    return "write one of " + ", ".join(f'"{name}"' for name in names)


class LohanWarning(UserWarning):
    """Something about a run that a user should know and that is no error."""
