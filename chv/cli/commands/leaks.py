"""`chv leaks`, `chv leaks reap`, `chv leaks adopt`."""

from __future__ import annotations

import argparse
import sys

from chv.cli import connect, output
from chv.common.wire import agent_leaks as wire

UNUSED = {"image artifact": "chv image gc", "key": "chv key ls -A"}


def list_leaks(arguments: argparse.Namespace) -> int:
    """Show every leak with its evidence and what can be done about it."""
    with connect.client(arguments.socket) as client:
        reply = client.call(wire.LIST_LEAKS, wire.ListLeaks(look=arguments.now))
    if arguments.output:
        output.document(reply, arguments.output)
        return 0
    if reply.leaks:
        output.table(
            ["ID", "KIND", "OWNER", "DAEMON", "SINCE", "ACTIONS", "NAME AND EVIDENCE"],
            [_row(leak) for leak in reply.leaks],
        )
    else:
        print("no leaks" if reply.looked_at else "nothing was looked at yet")
    for name, why in reply.unread.items():
        print(f"{name} was not asked: {why}", file=sys.stderr)
    if reply.watching:
        print(
            f"{reply.watching} more seen, not certain yet; `chv leaks --now` looks", file=sys.stderr
        )
    for what, count in reply.unused.items():
        if count:
            print(f"no leak, but unused: {count} {what}s ({UNUSED[what]})", file=sys.stderr)
    return 0


def _row(leak: wire.Leak) -> list[str]:
    actions = [f"{each} --data" if leak.data and each == "reap" else each for each in leak.actions]
    lines = [leak.name, *(f"{key}: {value}" for key, value in leak.evidence.items())]
    if leak.note:
        lines.append(f"({leak.note})")
    return [
        leak.id,
        leak.kind,
        leak.title or leak.owner or "-",
        leak.daemon,
        output.age(leak.since),
        ", ".join(actions) or "-",
        "\n".join(lines),
    ]


def reap(arguments: argparse.Namespace) -> int:
    """Remove one."""
    with connect.client(arguments.socket) as client:
        done = client.call(wire.REAP_LEAK, _reference(arguments, data=arguments.data))
    print(f"{done.leak.kind} {done.leak.name} removed")
    return 0


def adopt(arguments: argparse.Namespace) -> int:
    """Take one up."""
    with connect.client(arguments.socket) as client:
        done = client.call(wire.ADOPT_LEAK, _reference(arguments))
    print(f"{done.leak.kind} {done.leak.name} taken up by {done.leak.title}")
    return 0


def _reference(arguments: argparse.Namespace, *, data: bool = False) -> wire.LeakRef:
    return wire.LeakRef(
        id=arguments.id, requester=connect.requester(), reason=arguments.reason, data=data
    )
