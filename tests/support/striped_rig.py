"""A striped file over a few directories, on any engine, with buffers to move it through."""

import pathlib
from typing import Any

from lohan.ssd import (
    Buffer,
    BufferPool,
    Extent,
    IoEngine,
    RunDirectories,
    StripedFile,
)
from support.memory_engine import MemoryEngine
from support.ssd_engines import PAGE, random_bytes

CHUNK = 4 * PAGE


class Rig:
    """A run over some directories with one striped file and a buffer for it."""

    def __init__(
        self, engine: IoEngine, directories: list[pathlib.Path], **options: object
    ) -> None:
        self.engine = engine
        self.directories = directories
        self.run = RunDirectories.create(directories, "unit")
        options = {"capacity_bytes": 16 * CHUNK, "chunk_bytes": CHUNK, **options}
        self.file = StripedFile.create(self.run, name="f", engine=engine, **options)  # type: ignore[arg-type]
        self.pool = BufferPool("rig")
        self.source: Buffer = self.pool.allocate(32 * CHUNK)
        self.target: Buffer = self.pool.allocate(32 * CHUNK)
        self.source.array()[:] = random_bytes(32 * CHUNK)

    def write(self, extent: Extent, nbytes: int, offset_bytes: int = 0, seed: int = 0) -> None:
        self.source.array()[:nbytes] = random_bytes(nbytes, seed)
        self.file.start_write(
            extent, address=self.source.address, nbytes=nbytes, offset_bytes=offset_bytes
        ).wait()

    def read(
        self, extent: Extent, nbytes: int, offset_bytes: int = 0, should_verify: bool = False
    ) -> bytes:
        self.target.array()[:] = 0
        self.file.start_read(
            extent,
            address=self.target.address,
            nbytes=nbytes,
            offset_bytes=offset_bytes,
            should_verify=should_verify,
        ).wait()
        return self.target.array()[:nbytes].tobytes()

    def verify(self, extent: Extent, nbytes: int = 8 * PAGE) -> None:
        self.file.verify(extent, address=self.target.address, nbytes=nbytes)

    def damage(self, drive: int, offset_bytes: int) -> None:
        """Flip a bit of a drive's file, as a bad drive would."""
        path = self.file.paths[drive]
        if isinstance(self.engine, MemoryEngine):
            self.engine._contents[path][offset_bytes] ^= 1
            return
        with open(path, "r+b") as file:
            file.seek(offset_bytes)
            byte = file.read(1)[0]
            file.seek(offset_bytes)
            file.write(bytes([byte ^ 1]))

    def close(self) -> None:
        self.file.close(should_delete=True)
        self.run.close(should_delete=True)
        self.pool.take_back(self.source)
        self.pool.take_back(self.target)
        self.pool.close()
        self.engine.close()
        assert [list(directory.iterdir()) for directory in self.directories] == [
            [] for _ in self.directories
        ]


def saved_of(file: StripedFile) -> dict[str, Any]:
    """What `StripedFile.attach` needs, as it is now."""
    return {
        "name": file.name,
        "layout": file.layout,
        "extents": file.extents,
        "checksums": file.checksums.stretches(),
    }


def make_directories(root: pathlib.Path, count: int) -> list[pathlib.Path]:
    directories = [root / f"ssd{n}" for n in range(count)]
    for directory in directories:
        directory.mkdir()
    return directories
