"""`chv logs vm/NAME|daemon/NAME`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta

import msgspec

from chv.cli import connect
from chv.common.clock import SystemClock
from chv.common.errors import InvalidArgument, NotFound
from chv.common.quantity import parse_duration_s
from chv.common.rpc.blocking import BlockingClient
from chv.common.wire import agent

TAIL_LINES = 200
DAEMONS = ("agent", "stord", "nwd")


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
    if arguments.operation and kind != "daemon":
        raise InvalidArgument("a serial console knows of no operation", field="--operation")
    since = parse_since(arguments.since, SystemClock().now())
    tail = arguments.tail
    if tail is None:
        tail = agent.LOG_LINES_MAX if since or arguments.operation else TAIL_LINES
    request = agent.ReadLogs(
        target=arguments.target,
        namespace=arguments.namespace,
        tail_lines=tail,
        follow=arguments.follow,
        since=since,
    )
    printer: Printer | OperationLines = Printer(timestamps=arguments.timestamps)
    if arguments.operation:
        printer = OperationLines(arguments.operation, sys.stdout.write)
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


def of_operation(client: BlockingClient, operation_id: str, since: str) -> list[str]:
    """Return the lines of an operation from the logs of all three daemons, by their time."""
    found: list[str] = []
    for name in DAEMONS:
        request = agent.ReadLogs(
            target=f"daemon/{name}", tail_lines=agent.LOG_LINES_MAX, since=since
        )
        with suppress(NotFound):  # it has written nothing yet
            client.stream(agent.READ_LOGS, request, OperationLines(operation_id, found.append).show)
    return sorted(found, key=lambda line: str(msgspec.json.decode(line)["time"]))


class OperationLines:
    """Hands over the whole lines that belong to one operation."""

    def __init__(self, operation_id: str, take: Callable[[str], object]) -> None:
        self._mark = f'"operation_id":"{operation_id}"'
        self._take = take
        self._partial = ""

    def show(self, chunk: agent.LogChunk) -> None:
        """Look at what came."""
        *lines, self._partial = (self._partial + chunk.text).split("\n")
        for line in lines:
            if self._mark in line:
                self._take(f"{line}\n")
        sys.stdout.flush()


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
