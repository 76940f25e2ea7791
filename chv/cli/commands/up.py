"""`chv up` and `chv down`."""

from __future__ import annotations

import argparse
from pathlib import Path

import anyio

from chv.cli import connect, operations, output
from chv.cli.deletion import in_rounds
from chv.common.errors import ChvError, Conflict, Unavailable
from chv.common.pages import whole_blocking
from chv.common.process.foreground import run_foreground
from chv.common.rpc.blocking import BlockingClient
from chv.common.wire import agent
from chv.common.wire.resources import APPLY_ORDER
from chv.host import devnode

PURGE_READY_TIMEOUT_S = 30.0


def up(arguments: argparse.Namespace) -> int:
    """Start the node of this directory and wait until it can run VMs."""
    timeout_s = operations.seconds(arguments.timeout)
    node = devnode.make(Path(arguments.dir), sandboxed=arguments.network == "sandbox")
    if arguments.foreground:
        return _foreground(node)

    async def start() -> agent.NodeStatusReply:
        await devnode.start(node)
        return await devnode.await_ready(node, timeout_s)

    status = anyio.run(start)
    print(f"node {status.name} ({status.instance}) is {status.state}, agent pid {status.pid}")
    if status.hold is not None:
        reason = status.hold.reason or "no reason given"
        print(f"  as {status.hold.requester} has left it: {reason}")
    for vmm in status.vmms:
        if vmm.usable:
            print(f"  {vmm.name} {vmm.version} with {vmm.accelerator or 'no accelerator'}")
    print(f"  socket {node.socket}")
    if node.sandbox:
        print(f"  outside is: ip netns exec {node.sandbox.wan} COMMAND")
    return 0


def _foreground(node: devnode.DevNode) -> int:
    if running := devnode.agent_process(node):
        raise Conflict(f"the node runs already, agent pid {running.pid}", hint="`chv down` first")
    anyio.run(devnode.prepare, node)
    return run_foreground(devnode.agent_argv(node))


def down(arguments: argparse.Namespace) -> int:
    """Stop the daemons; with --purge delete everything of the node first."""
    timeout_s = operations.seconds(arguments.timeout)
    node = devnode.find(Path(arguments.dir))
    if arguments.purge:
        anyio.run(_ready_for_purge, node)
        try:
            delete_everything(node.socket, timeout_s)
        except ChvError as error:
            # Purging is asked for: what the agent cannot take down in order goes by force.
            output.note(f"not deleted in order: {error}; removing what is left")
    stopped = anyio.run(devnode.stop, node)
    if arguments.purge:
        for worker_id in anyio.run(devnode.remove, node):
            output.note(f"killed a leftover worker: {worker_id}")
        print(f"node {node.layout.instance} is removed")
    else:
        print(f"node {node.layout.instance} is down" if stopped else "the node was not running")
    return 0


async def _ready_for_purge(node: devnode.DevNode) -> None:
    """Deleting needs an agent: bring one up where none runs."""
    try:
        await devnode.start(node)
        await devnode.await_ready(node, PURGE_READY_TIMEOUT_S)
    except Unavailable as error:
        output.note(f"no agent to delete objects with ({error.message}); removing what is left")
    except ChvError as error:
        output.note(f"the node is not ready ({error.message}); deleting all the same")


def delete_everything(socket: Path, timeout_s: float) -> None:
    """Delete all objects in reverse order of creation and wait until they are gone."""
    with BlockingClient(socket) as client:
        items: list[tuple[str, bytes]] = []
        for kind in reversed(APPLY_ORDER):
            try:
                request = agent.ListObjects(kind=kind)
                found = whole_blocking(client.call, agent.LIST, request, "items").items
            except Unavailable as error:
                output.note(f"{kind} objects are not deleted: {error.message}")
                return
            items += [(kind, bytes(item)) for item in found]
        pending: list[str] = []
        # A VM goes before its volumes: what waits for another is accepted once that is going.
        in_rounds(items, lambda item: pending.append(_delete(client, *item)))
        for operation_id in pending:
            operations.wait(client, operation_id, timeout_s)


def _delete(client: BlockingClient, kind: str, item: bytes) -> str:
    import msgspec

    metadata = msgspec.json.decode(item)["metadata"]
    request = agent.DeleteObject(
        kind=kind,
        name=metadata["name"],
        namespace=metadata["namespace"],
        requester=connect.requester(),
        reason="node purged",
    )
    return client.call(agent.DELETE, request).operation.id
