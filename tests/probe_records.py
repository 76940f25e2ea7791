"""What the probe's writer has put on a disk, as the host reads it; what the guest says of it."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, TypeVar

from chv.agent.console.recording import FILE_NAME
from chv.probe.device_events import (
    Acked,
    DiskBogus,
    DiskError,
    DiskReset,
    DiskResumed,
    DiskStall,
)
from chv.probe.events import Boot, Event
from chv.probe.lines import parse_line
from tests.integration.live_node import wait_for

E = TypeVar("E", bound=Event)

SECTOR = 512
FIRST = 64
WINDOW = 65536
_MAGIC = 0x43455245424F5250
_STAMP = re.compile(rb"^\S+Z ")


class Record(NamedTuple):
    """A sound record."""

    seq: int
    seed: int


def record(image: bytes, seq: int, window: int = WINDOW) -> Record | None:
    """Return what is at the place of a record; None where that is no whole record."""
    at = (FIRST + seq % window) * SECTOR
    quads = struct.unpack("<64Q", image[at : at + SECTOR])
    if quads[0] != _MAGIC or sum(quads[:63]) % 2**64 != quads[63]:
        return None
    return Record(quads[2], quads[1])


def missing(image: bytes, acked: Iterable[int], seed: int, window: int = WINDOW) -> list[int]:
    """Return the records that are neither there nor overwritten by a later one."""

    def there(seq: int) -> bool:
        found = record(image, seq, window)
        return found is not None and found.seed == seed and found.seq >= seq

    return [seq for seq in acked if not there(seq)]


class GuestLog:
    """What a guest has said since its console was attached; needs no agent to be read."""

    def __init__(self, state_dir: Path) -> None:
        self.directory = state_dir
        self._path = state_dir / FILE_NAME
        self._offset = 0
        self._said: list[Event] = []

    def said(self) -> list[Event]:
        """Return all events so far."""
        with self._path.open("rb") as file:
            file.seek(self._offset)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._offset += len(whole + newline)
        for line in whole.split(b"\n") if newline else []:
            if event := parse_line(_STAMP.sub(b"", line).decode("utf-8", "replace")):
                self._said.append(event)
        return self._said

    def all(self, *kinds: type[E]) -> list[E]:
        """Return the events of some kinds."""
        return [event for event in self.said() if isinstance(event, kinds)]

    def boots(self) -> int:
        """Return how often it has booted."""
        return len(self.all(Boot))

    def acked(self) -> int:
        """Return the newest acknowledged record of the present boot."""
        newest = 0
        for event in self.all(Boot, Acked):
            newest = event.seq if isinstance(event, Acked) else 0
        return newest

    def await_progress(self, records: int, timeout_s: float = 30.0) -> None:
        """Wait until so many more records are acknowledged."""
        goal = self.acked() + records
        wait_for(lambda: self.acked() >= goal, timeout_s, f"record {goal}; {self.trouble()}")

    def trouble(self) -> list[Event]:
        """Return what a guest with a sound disk never says."""
        return self.all(DiskError, DiskReset, DiskBogus)

    def hung(self) -> int:
        """Return how many requests were not answered in two seconds and not since either."""
        return len(self.all(DiskStall)) - len(self.all(DiskResumed))
