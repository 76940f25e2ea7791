"""`chv daemon list`, `chv daemon restart`."""

from __future__ import annotations

import argparse

from chv.cli import connect, output
from chv.common.wire import agent_leaks as wire
from chv.common.wire.types import Empty


def list_daemons(arguments: argparse.Namespace) -> int:
    """Show the daemons."""
    with connect.client(arguments.socket) as client:
        reply = client.call(wire.LIST_DAEMONS, Empty())
    if arguments.output:
        output.document(reply, arguments.output)
        return 0
    output.table(
        ["DAEMON", "STATE", "PID", "VERSION", "RESTARTS", "SINCE", "MESSAGE"],
        [
            [
                each.name,
                each.state,
                str(each.pid or "-"),
                each.version or "-",
                str(each.restarts),
                output.age(each.since),
                each.message,
            ]
            for each in reply.daemons
        ],
    )
    return 0


def restart(arguments: argparse.Namespace) -> int:
    """Start one anew."""
    request = wire.RestartDaemon(
        name=arguments.name, requester=connect.requester(), reason=arguments.reason
    )
    with connect.client(arguments.socket) as client:
        done = client.call(wire.RESTART_DAEMON, request)
    before, after = done.before, done.after
    versions = f"{before.version} -> {after.version}" if before.version != after.version else ""
    print(f"{after.name} restarted: pid {before.pid} -> {after.pid} {versions}".rstrip())
    return 0
