"""`chv node status|reset`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from chv.cli import connect, output
from chv.common.wire import agent
from chv.common.wire.agent_node import NodeHold
from chv.common.wire.types import Empty, Feature


def status(arguments: argparse.Namespace) -> int:
    """Show the node's state and what it rests on."""
    with connect.client(arguments.socket) as client:
        node = client.call(agent.NODE_STATUS, Empty())
    if arguments.output in ("json", "yaml"):
        output.document(node, arguments.output)
        return 0
    print(f"Node {node.name}, instance {node.instance}, chv {node.version}")
    print(f"  {node.state} for {output.age(node.since)}, agent pid {node.pid}")
    _held(node)
    print(f"  run {node.run_dir}, state {node.state_dir}")
    counts = ", ".join(f"{count} {kind}" for kind, count in node.counts.items())
    print(f"  {counts or 'no objects'}\n")
    output.table(
        ["DAEMON", "STATE", "PID", "RESTARTS", "SINCE", "MESSAGE"],
        [
            [
                entry.name,
                entry.state,
                str(entry.pid or "-"),
                str(entry.restarts),
                output.age(entry.since),
                entry.message,
            ]
            for entry in node.daemons
        ],
    )
    print()
    output.table(
        ["VMM", "USABLE", "ACCELERATOR", "VERSION", "REASON"],
        [
            [
                entry.name,
                "yes" if entry.usable else "no",
                entry.accelerator or "-",
                entry.version or "-",
                entry.reason,
            ]
            for entry in node.vmms
        ],
    )
    print()
    output.table(
        ["CONDITION", "STATUS", "REASON", "SINCE", "SEEN", "MESSAGE"],
        [
            [
                entry.type,
                entry.status,
                entry.reason,
                output.age(entry.since),
                output.age(entry.seen_at),
                entry.message,
            ]
            for entry in node.conditions
        ],
    )
    print()
    _features(node.features, with_detail=arguments.output == "wide")
    return 0


def _held(node: agent.NodeStatusReply) -> None:
    """Print who drains the node and how far that is, and who keeps new VMs away."""
    if node.hold is not None:
        what = "draining" if node.drain is not None else "maintenance"
        print(f"  {what} {_who(node.hold)}")
    if node.scheduling_paused is not None:
        print(f"  scheduling paused {_who(node.scheduling_paused)}")
    if node.drain is None:
        return
    print(f"  {node.drain.left} of {node.drain.total} VMs left to stop:")
    for vm in node.drain.blocking:
        name = f"{vm.namespace}/{vm.name}" if vm.namespace else vm.name
        print(f"    {name}  {vm.phase or '-'}  {vm.why}")


def _who(hold: NodeHold) -> str:
    reason = f": {hold.reason}" if hold.reason else ""
    return f"for {output.age(hold.since)} by {hold.requester}{reason}"


def _features(features: Sequence[Feature], *, with_detail: bool) -> None:
    """Print what this host can do; what an attempt said is for those who look closer."""
    rows = [[each.name, "yes" if each.present else "no", each.detail or "-"] for each in features]
    headers = ["FEATURE", "PRESENT", "DETAIL"]
    columns = 3 if with_detail else 2
    output.table(headers[:columns], [row[:columns] for row in rows])


def reset(arguments: argparse.Namespace) -> int:
    """Leave Failed: bootstrap again."""
    with connect.client(arguments.socket) as client:
        request = agent.ResetNode(requester=connect.requester(), reason=arguments.reason)
        client.call(agent.RESET_NODE, request)
    print("node reset")
    return 0
