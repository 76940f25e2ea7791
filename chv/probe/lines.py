"""From the bytes of a serial port to the probe's events; sans I/O.

`@` begins a line of the guest and occurs nowhere else in it, so what a firmware printed in front of
it, or a line that was cut short, costs that much and no more. Nothing here raises: what is no event
comes out as `Noise`.
"""

from __future__ import annotations

import re

import msgspec

from chv.probe import device_events, events
from chv.probe.events import Event, Noise

LINE_BYTES_MAX = 4096
_LINE = re.compile(r"@([0-9]{1,18}) ([a-z][a-z-]*)((?: [a-z][a-z0-9_]*=(?:\"[^\"]*\"|[^ \"]*))*)")
_FIELD = re.compile(r" ([a-z][a-z0-9_]*)=(?:\"([^\"]*)\"|([^ \"]*))")

_CAPITAL = re.compile(r"(?<=[a-z])(?=[A-Z])")


def _by_name() -> dict[str, type[Event]]:
    """Return every event by the name that the guest gives it: `DiskDone` is `disk-done`."""
    found = [*vars(events).values(), *vars(device_events).values()]
    kinds = [kind for kind in found if isinstance(kind, type) and issubclass(kind, Event)]
    named = {_CAPITAL.sub("-", kind.__name__).lower(): kind for kind in kinds}
    return {name: kind for name, kind in named.items() if kind not in (Event, Noise)}


BY_NAME = _by_name()


def parse_line(text: str) -> Event:
    """Return the event of one line, or its text as `Noise`."""
    line = text[max(text.rfind("@"), 0) :].rstrip()
    matched = _LINE.fullmatch(line)
    kind = BY_NAME.get(matched[2]) if matched else None
    if matched is None or kind is None:
        return Noise(at_us=0, text=text.strip())
    fields: dict[str, object] = {"at_us": int(matched[1])}
    for name, quoted, bare in _FIELD.findall(matched[3]):
        fields.setdefault(name, quoted or bare)
    try:
        return msgspec.convert(fields, kind, strict=False)
    except (msgspec.ValidationError, ValueError):
        return Noise(at_us=0, text=text.strip())


class LineReader:
    """Takes bytes as they come and gives the events of all lines that are complete."""

    def __init__(self) -> None:
        self._pending = b""

    def feed(self, data: bytes) -> list[Event]:
        """Return the events that these bytes complete."""
        *complete, self._pending = (self._pending + data).split(b"\n")
        if len(self._pending) > LINE_BYTES_MAX:
            complete.append(self._pending)
            self._pending = b""
        texts = (line.decode("ascii", "replace") for line in complete)
        return [parse_line(text) for text in texts if text.strip()]
