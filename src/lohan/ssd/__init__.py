"""Bytes on SSDs: engines, buffers, and files striped over several drives.

Owns requests, extents, checksums and the directories of runs. Imported by `store`, and by whoever
checks directories. Never knows tensors.
"""

from lohan.ssd.allocator import Extent, ExtentAllocator
from lohan.ssd.checksums import ChecksumTable, Stretch
from lohan.ssd.engines.buffers import Buffer, BufferPool
from lohan.ssd.engines.engine import (
    ALIGNMENT_BYTES,
    Access,
    DriveId,
    DriveSettings,
    IoEngine,
    IoFile,
    Mixing,
    Operation,
    Priority,
    Ticket,
    choose_engine,
    whole_pages,
)
from lohan.ssd.layout import CHUNK_BYTES, StripeLayout
from lohan.ssd.runs.directory_check import DirectoryReport, check_directories, check_directory
from lohan.ssd.runs.run_directory import RunDirectories, RunPart, find_run_parts
from lohan.ssd.stripe_files import add_drives
from lohan.ssd.striped_file import StripedFile
from lohan.ssd.striped_ticket import StripedTicket

__all__ = [
    "ALIGNMENT_BYTES",
    "CHUNK_BYTES",
    "Access",
    "Buffer",
    "BufferPool",
    "ChecksumTable",
    "DirectoryReport",
    "DriveId",
    "DriveSettings",
    "Extent",
    "ExtentAllocator",
    "IoEngine",
    "IoFile",
    "Mixing",
    "Operation",
    "Priority",
    "RunDirectories",
    "RunPart",
    "Stretch",
    "StripeLayout",
    "StripedFile",
    "StripedTicket",
    "Ticket",
    "add_drives",
    "check_directories",
    "check_directory",
    "choose_engine",
    "find_run_parts",
    "whole_pages",
]
