"""The event stream: pretty-printed records, an empty line after each, written a little late.

The real program has a thread for it, so an answer may be there before its events are. A full pipe
loses events, as there.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from typing import Any


class Events:
    def __init__(self, fd: int | None) -> None:
        self._fd = fd
        self._start_s = time.monotonic()
        self._waiting: list[bytes] = []
        if fd is not None:
            os.set_blocking(fd, False)

    def say(self, source: str, event: str, properties: dict[str, Any] | None = None) -> None:
        seconds, fraction = divmod(time.monotonic() - self._start_s, 1)
        record = {
            "timestamp": {"secs": int(seconds), "nanos": int(fraction * 1e9)},
            "source": source,
            "event": event,
            "properties": properties,
        }
        self._waiting.append(json.dumps(record, indent=2).encode() + b"\n\n")

    def vm(self, *events: str) -> None:
        for event in events:
            self.say("vm", event)

    def flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        if self._fd is None:
            return
        for record in waiting:
            with contextlib.suppress(BlockingIOError, BrokenPipeError):
                os.write(self._fd, record)
