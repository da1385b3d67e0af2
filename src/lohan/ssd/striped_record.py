"""What has to be kept of a striped file so that it can be opened again.

Owns the saved form and its version. Made and read by `striped_file`; written to disk by whoever
keeps a manifest.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lohan.errors import ScheduleError
from lohan.ssd.allocator import Extent, ExtentAllocator
from lohan.ssd.checksums import ChecksumTable
from lohan.ssd.layout import StripeLayout, damaged_fields, refuse_other_version

STRIPED_RECORD_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StripedRecord:
    """A striped file without its bytes."""

    name: str
    should_checksum: bool
    layout: StripeLayout
    extents: tuple[Extent, ...]
    checksums: ChecksumTable

    def allocator(self) -> ExtentAllocator:
        """The books of its extents."""
        return ExtentAllocator(self.layout.capacity_bytes, taken=self.extents)

    def to_json(self) -> dict[str, Any]:
        """As plain values: one checksum per extent that is whole."""
        ranges = tuple((extent.offset_bytes, extent.nbytes) for extent in self.extents)
        return {
            "version": STRIPED_RECORD_VERSION,
            "name": self.name,
            "should_checksum": self.should_checksum,
            "layout": self.layout.to_json(),
            "extents": [list(entry) for entry in ranges],
            "checksums": self.checksums.to_json(ranges),
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "StripedRecord":
        """Rebuild what `to_json` gave.

        Raises:
            CheckpointError: the fields are of another version or contradict each other.
        """
        refuse_other_version("striped file", fields, STRIPED_RECORD_VERSION)
        try:
            record = cls(
                name=str(fields["name"]),
                should_checksum=bool(fields["should_checksum"]),
                layout=StripeLayout.from_json(fields["layout"]),
                extents=tuple(
                    Extent(offset_bytes=int(offset), nbytes=int(nbytes))
                    for offset, nbytes in fields["extents"]
                ),
                checksums=ChecksumTable.from_json(fields["checksums"]),
            )
            record.allocator()
        except (KeyError, TypeError, ValueError, ScheduleError) as error:
            raise damaged_fields("striped file", error) from None
        return record
