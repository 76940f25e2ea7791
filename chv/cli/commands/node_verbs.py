"""`chv node drain|maintenance|resume|pause-scheduling|resume-scheduling`."""

from __future__ import annotations

import argparse
import time

from chv.cli import connect, operations
from chv.cli.output import note
from chv.common.errors import DeadlineExceeded, FailedPrecondition
from chv.common.rpc.blocking import BlockingClient
from chv.common.wire import agent
from chv.common.wire.agent_node import ACT_ON_NODE, ActOnNode, NodeVerb, NodeVerbReply
from chv.common.wire.types import Empty

LOOK_S = 0.2
HERE = frozenset({"TenantReady"})
HOLDING = (NodeVerb.DRAIN, NodeVerb.MAINTENANCE)
STUCK = frozenset({"Failed", "Draining", "Maintenance"})


def drain(arguments: argparse.Namespace) -> int:
    """Drain the node and wait until no VM is left; with `--cancel`, take that back."""
    if not arguments.cancel:
        return _stop_all(arguments, NodeVerb.DRAIN)
    return _serve(arguments, NodeVerb.CANCEL_DRAIN)


def maintenance(arguments: argparse.Namespace) -> int:
    """Drain the node, with a reason."""
    return _stop_all(arguments, NodeVerb.MAINTENANCE)


def resume(arguments: argparse.Namespace) -> int:
    """Leave Maintenance and wait until VMs may run again."""
    return _serve(arguments, NodeVerb.RESUME)


def pause_scheduling(arguments: argparse.Namespace) -> int:
    """Keep new VMs away."""
    return _scheduling(arguments, NodeVerb.PAUSE_SCHEDULING, "scheduling is paused")


def resume_scheduling(arguments: argparse.Namespace) -> int:
    """Let new VMs come again."""
    return _scheduling(arguments, NodeVerb.RESUME_SCHEDULING, "scheduling goes on")


def _ask(client: BlockingClient, arguments: argparse.Namespace, verb: NodeVerb) -> NodeVerbReply:
    request = ActOnNode(
        verb=verb,
        requester=connect.requester(),
        reason=arguments.reason,
        until_boot=getattr(arguments, "until_boot", False) and verb in HOLDING,
    )
    return client.call(ACT_ON_NODE, request)


def _stop_all(arguments: argparse.Namespace, verb: NodeVerb) -> int:
    timeout_s = operations.seconds(arguments.timeout)
    with connect.client(arguments.socket) as client:
        reply = _ask(client, arguments, verb)
        if reply.joined:
            note(f"the node is {reply.state} already, as `chv node status` says")
        if arguments.no_wait or reply.state == "Maintenance":
            note(f"node {reply.state}")
            return 0
        ended = operations.final(client, reply.operation_id, timeout_s)
        if ended.state is not agent.OperationState.SUCCEEDED:
            raise FailedPrecondition(f"{ended.id} is {ended.state.lower()}: {ended.message}")
        note(f"node {_state(client)}: {ended.message}")
    return 0


def _serve(arguments: argparse.Namespace, verb: NodeVerb) -> int:
    timeout_s = operations.seconds(arguments.timeout)
    with connect.client(arguments.socket) as client:
        reply = _ask(client, arguments, verb)
        if arguments.no_wait:
            note(f"node {reply.state}")
        else:
            note(f"node {_until_here(client, timeout_s)}")
    return 0


def _until_here(client: BlockingClient, timeout_s: float) -> str:
    """Wait until VMs may run; raises where the node does not get there by itself or in time."""
    deadline = time.monotonic() + timeout_s
    while (state := _state(client)) not in HERE:
        if state in STUCK:
            raise FailedPrecondition(f"the node is {state}", hint="see `chv node status`")
        if time.monotonic() > deadline:
            raise DeadlineExceeded(
                f"the node is {state} after {timeout_s:g} s", hint="see `chv node status`"
            )
        time.sleep(LOOK_S)
    return state


def _state(client: BlockingClient) -> str:
    return client.call(agent.NODE_STATUS, Empty()).state


def _scheduling(arguments: argparse.Namespace, verb: NodeVerb, words: str) -> int:
    with connect.client(arguments.socket) as client:
        reply = _ask(client, arguments, verb)
    note(f"{words}{' already' if reply.joined else ''}")
    return 0
