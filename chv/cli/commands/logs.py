"""`chv logs vm/NAME|daemon/NAME`."""

from __future__ import annotations

import argparse
import sys
from datetime import UTC, datetime, timedelta

from chv.cli import connect
from chv.common.clock import SystemClock
from chv.common.errors import InvalidArgument
from chv.common.quantity import parse_duration_s
from chv.common.wire import agent

TAIL_LINES = 200


def logs(arguments: argparse.Namespace) -> int:
    """Print the end of a log and, with -f, what comes."""
    kind, _, name = arguments.target.partition("/")
    if kind not in ("vm", "daemon") or not name:
        raise InvalidArgument(
            f"{arguments.target!r} is not vm/NAME or daemon/NAME",
            field="TARGET",
            hint="daemons: agent, stord, nwd, console",
        )
    if kind == "daemon" and not arguments.timestamps:
        raise InvalidArgument("a daemon's lines carry their time", field="--no-timestamps")
    since = parse_since(arguments.since, SystemClock().now())
    tail = arguments.tail
    if tail is None:
        tail = agent.LOG_LINES_MAX if since else TAIL_LINES
    request = agent.ReadLogs(
        target=arguments.target,
        namespace=arguments.namespace,
        tail_lines=tail,
        follow=arguments.follow,
        since=since,
    )
    printer = Printer(timestamps=arguments.timestamps)
    with connect.client(arguments.socket) as client:
        client.stream(agent.READ_LOGS, request, printer.show)
    return 0


def parse_since(text: str, now: datetime) -> str:
    """Return `10m` or an RFC 3339 time as one in UTC, empty as empty; raises InvalidArgument."""
    if not text:
        return ""
    try:
        then = datetime.fromisoformat(text)
    except ValueError:
        then = now - timedelta(seconds=parse_duration_s(text, field="--since"))
    if then.tzinfo is None:
        raise InvalidArgument(
            f"{text!r} has no zone", field="--since", hint="write 2026-01-31T12:00:00Z, or 10m"
        )
    return then.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


class Printer:
    """Prints chunks; without timestamps, whole lines less what stands before their first space."""

    def __init__(self, *, timestamps: bool) -> None:
        self._timestamps = timestamps
        self._partial = ""

    def show(self, chunk: agent.LogChunk) -> None:
        """Print what came."""
        text = chunk.text
        if not self._timestamps:
            *lines, self._partial = (self._partial + text).split("\n")
            text = "".join(f"{line.partition(' ')[2]}\n" for line in lines)
        sys.stdout.write(text)
        sys.stdout.flush()
