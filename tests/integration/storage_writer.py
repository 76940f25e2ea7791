"""A guest's side of a disk that is backed up or moved: it writes on, and fails on an error."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.integration.vhost_client import VhostDisk

BLOCK = 65536
SIZE_BYTES = 16 << 20
READ_BYTES = 512 * 1024


def write(disk: VhostDisk, block: int, data: bytes) -> None:
    """Write one block, filled up with zeros."""
    assert disk.write(block * BLOCK // 512, data.ljust(BLOCK, b"\0")) == 0


def content(export: str) -> bytes:
    """Read the whole disk."""
    with VhostDisk(Path(export)) as disk:
        parts = [
            disk.read(n * READ_BYTES // 512, READ_BYTES) for n in range(SIZE_BYTES // READ_BYTES)
        ]
        return b"".join(parts)


@contextmanager
def writing(export: str) -> Iterator[VhostDisk]:
    """A guest that writes block after block in the upper half, and fails the test on an error."""
    stop, failures = threading.Event(), list[str]()
    with VhostDisk(Path(export)) as disk:

        def run() -> None:
            number = 0
            try:
                while not stop.is_set():
                    number += 1
                    sector = (128 + number % 128) * BLOCK // 512
                    assert disk.write(sector, number.to_bytes(8, "big") * 512) == 0
                    assert disk.read(sector, 512) == number.to_bytes(8, "big") * 64
            except AssertionError as error:
                failures.append(f"request {number}: {error}")

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield disk
        finally:
            stop.set()
            thread.join()
    assert failures == []
    assert not thread.is_alive()
