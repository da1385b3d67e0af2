"""What has to be kept of a striped file so that it can be opened again.

Owns the record and its checks. Made and read by `striped_file`; what of it is on disk is decided by
whoever keeps a manifest.
"""

import re
from dataclasses import dataclass

from lohan.errors import CheckpointError, ConfigError, ScheduleError
from lohan.ssd.allocator import Extent, ExtentAllocator
from lohan.ssd.checksums import ChecksumTable
from lohan.ssd.layout import StripeLayout, damaged_fields

_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def refuse_bad_name(name: str) -> None:
    """Refuse the name of a striped file that could lead out of the run directories.

    Raises:
        ConfigError: it is not letters, digits, dots, dashes and underscores.
    """
    if not _FILE_NAME.fullmatch(name):
        raise ConfigError(
            f"a striped file was given the name {name!r}",
            why="it becomes part of file names inside the run directories",
            remedy="use up to 64 letters, digits, dots, dashes and underscores, a letter or digit "
            "first",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StripedRecord:
    """A striped file without its bytes."""

    name: str
    should_checksum: bool
    layout: StripeLayout
    extents: tuple[Extent, ...]
    checksums: ChecksumTable

    def __post_init__(self) -> None:
        try:
            self.allocator()
            refuse_bad_name(self.name)
        except (ConfigError, ScheduleError) as error:
            raise damaged_fields("striped file", error) from None

    def allocator(self) -> ExtentAllocator:
        """The books of its extents."""
        return ExtentAllocator(self.layout.capacity_bytes, taken=self.extents)

    def refuse_other_count(self, num_directories: int) -> None:
        """Refuse to open it in more or fewer directories than it lies on.

        Raises:
            CheckpointError: the number is another one.
        """
        if self.layout.num_drives != num_directories:
            raise CheckpointError(
                f"striped file {self.name!r} lies on {self.layout.num_drives} SSD directories, "
                f"{num_directories} are given",
                why="every directory holds a part of every range",
                remedy="give the directories the run was made with, in any order",
            )
