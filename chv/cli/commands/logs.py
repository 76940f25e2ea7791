"""`chv logs vm/NAME|daemon/NAME`."""

from __future__ import annotations

import argparse
import sys

from chv.cli import connect
from chv.common.errors import InvalidArgument
from chv.common.wire import agent


def logs(arguments: argparse.Namespace) -> int:
    """Print the end of a log and, with -f, what comes."""
    kind, _, name = arguments.target.partition("/")
    if kind not in ("vm", "daemon") or not name:
        raise InvalidArgument(
            f"{arguments.target!r} is not vm/NAME or daemon/NAME",
            field="TARGET",
            hint="daemons: agent, stord, nwd, console",
        )
    request = agent.ReadLogs(
        target=arguments.target,
        namespace=arguments.namespace,
        tail_lines=arguments.tail,
        follow=arguments.follow,
    )
    with connect.client(arguments.socket) as client:
        client.stream(agent.READ_LOGS, request, _print)
    return 0


def _print(chunk: agent.LogChunk) -> None:
    sys.stdout.write(chunk.text)
    sys.stdout.flush()
