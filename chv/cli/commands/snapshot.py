"""`chv snapshot create|ls|rm|restore`."""

from __future__ import annotations

import argparse

import msgspec

from chv.cli import connect, manifests, operations
from chv.cli.commands import objects, volume
from chv.common.errors import FailedPrecondition, InvalidArgument
from chv.common.rpc.blocking import BlockingClient
from chv.common.wire import agent
from chv.common.wire.types import API_VERSION


def create(arguments: argparse.Namespace) -> int:
    """Define a snapshot and wait until it is taken."""
    timeout_s = operations.seconds(arguments.timeout)
    spec = {"volume": arguments.volume} if arguments.volume else {"virtualMachine": arguments.vm}
    if arguments.freeze:
        spec["freeze"] = arguments.freeze
    if arguments.memory:
        _refuse_with_memory(arguments)
    document = {
        "apiVersion": API_VERSION,
        "kind": "VirtualMachineSnapshot" if arguments.memory else "VolumeSnapshot",
        "metadata": {"name": arguments.name, "namespace": arguments.namespace},
        "spec": spec,
    }
    request = agent.Apply(
        objects=manifests.raw([document]),
        requester=connect.requester(),
        reason=arguments.reason,
    )
    with connect.client(arguments.socket) as client:
        result = client.call(agent.APPLY, request).results[0]
        print(f"{operations.label(result.kind, result.name, result.namespace)} {result.action}")
        if result.operation_id and not arguments.no_wait:
            operations.announce(operations.wait(client, result.operation_id, timeout_s))
    return 0


def _refuse_with_memory(arguments: argparse.Namespace) -> None:
    if not arguments.vm or arguments.freeze:
        raise InvalidArgument(
            "memory is of a VM that stands still by itself",
            field="--memory",
            hint="chv snapshot create NAME --vm VM --memory, without --freeze",
        )


def ls(arguments: argparse.Namespace) -> int:
    """List snapshots."""
    arguments.kind, arguments.name = "snapshot", None
    return objects.get(arguments)


def rm(arguments: argparse.Namespace) -> int:
    """Delete a snapshot; its layers are merged, which may take a while."""
    arguments.kind, arguments.file, arguments.ignore_not_found = "snapshot", None, False
    arguments.force = False
    return objects.delete(arguments)


def restore(arguments: argparse.Namespace) -> int:
    """Bring volumes back to a snapshot: the one that is named, else all that it has."""
    reference = agent.ObjectRef(
        kind="VolumeSnapshot", name=arguments.name, namespace=arguments.namespace
    )
    with connect.client(arguments.socket) as client:
        found = msgspec.json.decode(client.call(agent.GET, reference).object)
        parts = (found.get("status") or {}).get("volumes") or []
        names = [arguments.volume] if arguments.volume else [part["volume"] for part in parts]
        if not names:
            raise FailedPrecondition(f"snapshot {arguments.name} is not taken yet")
        for name in names:  # all of them or none
            _refuse_later(client, name, arguments)
        for name in names:
            request = agent.ActOnVolume(
                verb=agent.VolumeVerb.RESTORE,
                name=name,
                namespace=arguments.namespace,
                requester=connect.requester(),
                reason=arguments.reason,
                snapshot=arguments.name,
            )
            volume.run(client, request, arguments)
    return 0


def _refuse_later(client: BlockingClient, volume_name: str, arguments: argparse.Namespace) -> None:
    """Raise where a volume has snapshots that the restore would lose."""
    reference = agent.ObjectRef(kind="Volume", name=volume_name, namespace=arguments.namespace)
    found = msgspec.json.decode(client.call(agent.GET, reference).object)
    parts = (found.get("status") or {}).get("snapshots") or []
    names = [part["snapshot"] for part in parts]
    later = names[names.index(arguments.name) + 1 :] if arguments.name in names else []
    if later:
        raise FailedPrecondition(
            f"volume {volume_name} has later snapshots: {', '.join(later)}; nothing was restored",
            hint=f"they would be lost: delete them first, the newest first: {later[-1]}",
        )
