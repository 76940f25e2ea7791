"""The file to which a VMM appends its events, and we our marks: what happened, in one order.

Pure text in here: records are read from bytes and folded into a `History`; `journal` does the
I/O. The VMM announces a change some time after it made it, and does not say who asked for it: so
a mark of ours precedes each stop and each reboot that we ask for, and the next such event is
taken for ours. A record that was cut short is left out, what follows it is read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

SOURCE = "chv"
SUMMARY = f"{SOURCE}/summary"  # for whoever begins to read: it stands for what went before
SEPARATOR = b"\n\n"
_START = '{\n  "timestamp"'


@dataclass(frozen=True, slots=True)
class Event:
    """One record. `name`: `<source>/<event>`."""

    name: str
    properties: dict[str, Any] = field(default_factory=dict)


def mark(event: str, properties: dict[str, Any] | None = None) -> bytes:
    """Return a record of ours, to be appended in one write."""
    record = {"source": SOURCE, "event": event, "properties": properties}
    return SEPARATOR + json.dumps(record, separators=(",", ":")).encode() + SEPARATOR


def complete(data: bytes) -> int:
    """Return how many bytes of `data` are whole records."""
    end = data.rfind(SEPARATOR)
    return 0 if end < 0 else end + len(SEPARATOR)


def parse(data: bytes) -> Iterator[Event]:
    """Yield the records in `data`; what a punched hole left, or cannot be read, is passed over."""
    for part in data.replace(b"\0", b"").split(SEPARATOR):
        text = part.decode(errors="replace").strip()
        if text and (event := _event(text)) is not None:
            yield event


def _event(text: str) -> Event | None:
    restart = text.rfind(_START)
    for candidate in (text, text[restart:] if restart > 0 else ""):
        try:
            record = json.loads(candidate)
            return Event(f"{record['source']}/{record['event']}", record.get("properties") or {})
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue
    return None


@dataclass(slots=True)
class History:
    """What the records of one VMM amount to."""

    made: bool = False  # `create` came to its end
    guest_off: bool = False  # the guest powered itself off, and was not reset since
    panicked: bool = False
    up: bool = False  # it was booted and nothing stopped it since
    boot_begun: bool = False  # and not ended: where no VM runs, it failed and ate the device lists
    reboots: int = 0  # by the guest
    stops_due: int = 0  # asked for by us and not announced yet
    reboots_due: int = 0
    migration: str = ""  # of the last one: started | finished | failed
    limits: dict[str, int] = field(default_factory=dict)  # what `create` promised
    kept_taps: list[str] = field(default_factory=list)  # of NICs that were refused

    def fold(self, event: Event) -> None:
        """Take in one record."""
        match event.name:
            case "vm/booting":
                self.guest_off = self.panicked = False
                self.stops_due = self.reboots_due = 0
                self.boot_begun = True
            case "vm/booted" | "vm/rebooted" | "vm/restored" | "vm/migration-receive-finished":
                self.up, self.boot_begun, self.made = True, False, True
            case "vm/shutdown":
                self.guest_off = self.stops_due == 0
                self.stops_due = 0
                self.up = False
            case "vm/rebooting":
                self.panicked = False
                self.reboots += self.reboots_due == 0
                self.reboots_due = 0
                self.boot_begun = True
            case "vm/deleted":
                self.up = self.boot_begun = self.made = False
            case "guest/panic":
                self.panicked = True
            case "vm/migration-started" | "vm/migration-finished" | "vm/migration-failed":
                self.migration = event.name.rpartition("-")[2]
            case _ if event.name.startswith(f"{SOURCE}/"):
                self._fold_mark(event)

    def _fold_mark(self, event: Event) -> None:
        match event.name.removeprefix(f"{SOURCE}/"):
            case "stop":
                self.stops_due = 1
            case "reboot":
                self.reboots_due = 1
            case "undone":
                self.stops_due = self.reboots_due = 0
            case "reset":
                self.guest_off = self.panicked = self.up = False
            case "sending":
                self.migration = ""
            case "making":
                self.made = self.guest_off = self.panicked = self.up = self.boot_begun = False
            case "tap-kept":
                self.kept_taps = [*self.kept_taps, str(event.properties["nic"])]
            case "made":
                self.made = True
                self.limits = {str(k): int(v) for k, v in event.properties.items()}

    def summary(self) -> dict[str, Any]:
        """Return everything, for a record that stands for all that came before."""
        return {name: getattr(self, name) for name in self.__slots__}

    def restore(self, summary: dict[str, Any]) -> None:
        """Become what `summary` says."""
        for name in self.__slots__:
            setattr(self, name, summary.get(name, getattr(self, name)))
