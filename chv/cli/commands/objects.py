"""`chv apply`, `get`, `describe`, `delete`."""

from __future__ import annotations

import argparse
from typing import Any

import msgspec

from chv.cli import ages, connect, manifests, operations, output, tables
from chv.cli.deletion import in_rounds
from chv.cli.last_events import last_events, print_events
from chv.common.errors import InvalidArgument, NotFound
from chv.common.pages import whole_blocking
from chv.common.rpc.blocking import BlockingClient
from chv.common.wire import agent
from chv.common.wire.resources import APPLY_ORDER, KIND_ALIASES


def kind_of(text: str) -> str:
    """Return the kind that a user means by `vm`, `VirtualMachine` or `virtualmachines`."""
    kind = KIND_ALIASES.get(text.lower())
    if kind is None:
        known = "vm, volume, snapshot, network, image"
        raise InvalidArgument(f"unknown kind {text[:64]!r}", field="KIND", hint=f"one of {known}")
    return kind


def apply(arguments: argparse.Namespace) -> int:
    """Apply manifests; everything is checked before anything is stored."""
    timeout_s = operations.seconds(arguments.timeout)
    documents = manifests.load(arguments.file)
    request = agent.Apply(
        objects=manifests.raw(documents),
        requester=connect.requester(),
        reason=arguments.reason,
        dry_run=arguments.dry_run,
    )
    with connect.client(arguments.socket) as client:
        reply = client.call(agent.APPLY, request)
        if arguments.output:
            output.document(reply.results, arguments.output)
        for result in reply.results:
            dry = " (dry run)" if arguments.dry_run else ""
            if not arguments.output:
                target = operations.label(result.kind, result.name, result.namespace)
                print(f"{target} {result.action}{dry}")
        if arguments.wait:
            for result in reply.results:
                if result.operation_id:
                    operations.announce(operations.wait(client, result.operation_id, timeout_s))
    return 0


def get(arguments: argparse.Namespace) -> int:
    """Show one object or list a kind."""
    kind = kind_of(arguments.kind)
    with connect.client(arguments.socket) as client:
        if arguments.name:
            reply_one = client.call(
                agent.GET,
                agent.ObjectRef(kind=kind, name=arguments.name, namespace=arguments.namespace),
            )
            items, ages_s = [msgspec.json.decode(reply_one.object)], [reply_one.age_s]
        else:
            namespace = "" if arguments.all_namespaces else arguments.namespace
            request = agent.ListObjects(kind=kind, namespace=namespace)
            reply = whole_blocking(client.call, agent.LIST, request, "items", "ages_s")
            items, ages_s = [msgspec.json.decode(item) for item in reply.items], reply.ages_s
    if arguments.output:
        ages.put(items, ages_s)
        output.document(items[0] if arguments.name else items, arguments.output)
    elif items:
        tables.objects(kind, items, all_namespaces=arguments.all_namespaces)
        ages.note(items, ages_s)
    else:
        output.note(f"no {kind} in namespace {arguments.namespace}")
    return 0


def _get(client: BlockingClient, kind: str, name: str, namespace: str) -> dict[str, Any]:
    reply = client.call(agent.GET, agent.ObjectRef(kind=kind, name=name, namespace=namespace))
    item: dict[str, Any] = msgspec.json.decode(reply.object)
    return item


def describe(arguments: argparse.Namespace) -> int:
    """Show spec, status and conditions with their evidence."""
    kind = kind_of(arguments.kind)
    with connect.client(arguments.socket) as client:
        item = _get(client, kind, arguments.name, arguments.namespace)
        recent = client.call(
            agent.LIST_OPERATIONS,
            agent.ListOperations(
                kind=kind, namespace=arguments.namespace, name=arguments.name, limit=5
            ),
        )
        newest = last_events(client, kind, arguments.namespace, arguments.name)
    tables.describe(item, recent.operations)
    print_events(newest)
    return 0


def delete(arguments: argparse.Namespace) -> int:
    """Delete one object, or what manifests name in reverse order of creation."""
    timeout_s = operations.seconds(arguments.timeout)
    targets = _targets(arguments)
    with connect.client(arguments.socket) as client:
        in_rounds(targets, lambda target: _delete(client, arguments, target, timeout_s))
    return 0


def _delete(
    client: BlockingClient,
    arguments: argparse.Namespace,
    target: tuple[str, str, str],
    timeout_s: float,
) -> None:
    kind, namespace, name = target
    words = operations.label(kind, name, namespace)
    request = agent.DeleteObject(
        kind=kind,
        name=name,
        namespace=namespace,
        requester=connect.requester(),
        reason=arguments.reason,
        force=arguments.force,
    )
    try:
        operation = client.call(agent.DELETE, request).operation
    except NotFound:
        # Deleting a manifest twice is fine; naming one object that is not there is not.
        if not (arguments.ignore_not_found or arguments.file):
            raise
        output.note(f"{words} not found")
        return
    if arguments.no_wait:
        print(f"{words} deleting ({operation.id})")
        return
    operations.wait(client, operation.id, timeout_s)
    print(f"{words} deleted")


def _targets(arguments: argparse.Namespace) -> list[tuple[str, str, str]]:
    """Return (kind, namespace, name) in the order of deletion."""
    if arguments.file and (arguments.kind or arguments.name):
        raise InvalidArgument("either -f or KIND NAME, not both")
    if arguments.file:
        named = dict.fromkeys(map(_target, manifests.load(arguments.file)))
        return sorted(named, key=lambda target: -APPLY_ORDER.index(target[0]))
    if not (arguments.kind and arguments.name):
        raise InvalidArgument("nothing to delete", hint="chv delete KIND NAME, or -f FILE")
    return [(kind_of(arguments.kind), arguments.namespace, arguments.name)]


def _target(document: dict[str, Any]) -> tuple[str, str, str]:
    metadata = document.get("metadata")
    name = metadata.get("name") if isinstance(metadata, dict) else None
    if not isinstance(metadata, dict) or not isinstance(name, str):
        raise InvalidArgument("a manifest without metadata.name", field="metadata.name")
    kind = kind_of(str(document.get("kind", "")))
    return kind, str(metadata.get("namespace", "default")), name
