"""`chv volume`: list, show, verbs, and changes of the spec one field at a time.

A change reads the object and applies it again with its resourceVersion, so that what somebody
else changed meanwhile is never undone: that is a CONFLICT.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import msgspec

from chv.cli import connect, manifests, operations
from chv.cli.commands import objects
from chv.common.errors import InvalidArgument
from chv.common.quantity import format_bytes, parse_bytes
from chv.common.rpc.blocking import BlockingClient
from chv.common.wire import agent

Spec = dict[str, Any]
NUMBERS = ("port", "lun")
PLACES = ("block", "lvm", "nbd", "iscsi", "rbd")


def ls(arguments: argparse.Namespace) -> int:
    """List volumes."""
    arguments.kind, arguments.name = "volume", None
    return objects.get(arguments)


def show(arguments: argparse.Namespace) -> int:
    """Show one volume with its conditions and snapshots."""
    arguments.kind = "volume"
    return objects.get(arguments) if arguments.output else objects.describe(arguments)


# --- verbs


def act(arguments: argparse.Namespace) -> int:
    """Check, repair, back up or restore; wait for the outcome unless told otherwise."""
    rate = getattr(arguments, "rate", "")
    request = agent.ActOnVolume(
        verb=agent.VolumeVerb(arguments.verb),
        name=arguments.name,
        namespace=arguments.namespace,
        requester=connect.requester(),
        reason=arguments.reason,
        snapshot=getattr(arguments, "snapshot", ""),
        target=getattr(arguments, "target", ""),
        incremental=getattr(arguments, "incremental", False),
        bps_max=parse_bytes(rate, field="--rate") if rate else 0,
    )
    with connect.client(arguments.socket) as client:
        run(client, request, arguments)
    return 0


def run(client: BlockingClient, request: agent.ActOnVolume, arguments: argparse.Namespace) -> None:
    """Ask for a verb and wait for it."""
    timeout_s = operations.seconds(arguments.timeout)
    operation = client.call(agent.ACT_ON_VOLUME, request).operation
    if arguments.no_wait:
        print(operation.id)
    else:
        operations.announce(operations.wait(client, operation.id, timeout_s))


# --- changes of the spec


def grow(arguments: argparse.Namespace) -> int:
    """Make a volume larger; `--now` unplugs the disk where the guest would not see it."""

    def change(spec: Spec) -> None:
        spec["size"] = arguments.size

    with connect.client(arguments.socket) as client:
        _edit(client, arguments, change)
        if not arguments.no_wait:
            _after_growth(client, arguments)
    return 0


def _after_growth(client: BlockingClient, arguments: argparse.Namespace) -> None:
    status = _get(client, arguments).get("status") or {}
    pending = status.get("pendingSizeBytes")
    if not pending:
        print(f"Volume/{arguments.name} has {format_bytes(status.get('sizeBytes', 0))}")
    elif arguments.now:
        request = agent.ActOnVolume(
            verb=agent.VolumeVerb.GROW_NOW,
            name=arguments.name,
            namespace=arguments.namespace,
            requester=connect.requester(),
            reason=arguments.reason,
        )
        run(client, request, arguments)
    else:
        print(
            f"Volume/{arguments.name} will have {format_bytes(pending)} at the VM's next start; "
            "with --now the disk is unplugged and plugged again"
        )


def move(arguments: argparse.Namespace) -> int:
    """Bring a volume to another place, also under a running VM."""

    def change(spec: Spec) -> None:
        if arguments.pool is not None:
            spec["pool"] = arguments.pool
        if arguments.format:
            spec["format"] = arguments.format
        if arguments.class_name:
            _place(spec, arguments.class_name, arguments.place)

    if arguments.place and not arguments.class_name:
        raise InvalidArgument("a place of which class?", field="--place", hint="give --class too")
    with connect.client(arguments.socket) as client:
        _edit(client, arguments, change)
    return 0


def _place(spec: Spec, class_name: str, text: str) -> None:
    for name in PLACES:
        spec.pop(name, None)
    spec["class"] = class_name
    if class_name == "file":
        if text:
            raise InvalidArgument("class file has a pool", field="--place", hint="give --pool")
        return
    spec.pop("pool", None)
    spec["format"] = "raw"
    spec[class_name] = dict(_pair(part) for part in text.split(",") if part)


def _pair(text: str) -> tuple[str, object]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise InvalidArgument(
            f"{text!r} is not KEY=VALUE", field="--place", hint="volumeGroup=vg0,thinPool=tp"
        )
    return key, int(value) if key in NUMBERS and value.isdigit() else value


def rekey(arguments: argparse.Namespace) -> int:
    """Rotate the encryption key of a volume."""

    def change(spec: Spec) -> None:
        spec["encryption"] = {"key": arguments.key}

    with connect.client(arguments.socket) as client:
        _edit(client, arguments, change)
    return 0


LIMITS = ("iops", "bandwidth")
PARTS = ("total", "read", "write")


def limit(arguments: argparse.Namespace) -> int:
    """Change the I/O limits of a volume; those that are not named stay."""

    def change(spec: Spec) -> None:
        limits = {} if arguments.none else dict(spec.get("limits") or {})
        for kind in LIMITS:
            for part in PARTS:
                text = getattr(arguments, f"{kind}_{part}")
                if text is not None:
                    limits[f"{kind}{part.capitalize()}"] = _rate(kind, text, f"--{kind}-{part}")
        if arguments.iops_size is not None:
            limits["iopsSize"] = arguments.iops_size
        spec["limits"] = limits

    with connect.client(arguments.socket) as client:
        _edit(client, arguments, change)
    return 0


def _rate(kind: str, text: str, field: str) -> dict[str, Any]:
    """`LIMIT[:BURST[:SECONDS]]`; 0: no limit."""
    parts = text.split(":")
    if len(parts) > 3 or not all(parts):
        raise InvalidArgument(
            f"{text!r} is not a rate", field=field, hint="LIMIT[:BURST[:SECONDS]]"
        )
    if parts == ["0"]:
        return {}
    number = _whole if kind == "iops" else _text
    rate: dict[str, Any] = {"limit": number(parts[0], field)}
    if len(parts) > 1:
        rate["burst"] = number(parts[1], field)
    if len(parts) > 2:
        rate["burstSeconds"] = _whole(parts[2], field)
    return rate


def _whole(text: str, field: str) -> int:
    if not text.isdigit():
        raise InvalidArgument(f"{text!r} is not a whole number", field=field)
    return int(text)


def _text(text: str, field: str) -> str:
    parse_bytes(text, field=field)
    return text


def _get(client: BlockingClient, arguments: argparse.Namespace) -> dict[str, Any]:
    reference = agent.ObjectRef(kind="Volume", name=arguments.name, namespace=arguments.namespace)
    found: dict[str, Any] = msgspec.json.decode(client.call(agent.GET, reference).object)
    return found


def _edit(
    client: BlockingClient, arguments: argparse.Namespace, change: Callable[[Spec], None]
) -> None:
    """Read, change, apply against the version that was read; wait for the operation."""
    timeout_s = operations.seconds(arguments.timeout)
    document = _get(client, arguments)
    document.pop("status", None)
    change(document["spec"])
    request = agent.Apply(
        objects=manifests.raw([document]),
        requester=connect.requester(),
        reason=arguments.reason,
    )
    result = client.call(agent.APPLY, request).results[0]
    target = operations.label(result.kind, result.name, result.namespace)
    print(f"{target} {result.action}")
    if result.operation_id and not arguments.no_wait:
        operations.announce(operations.wait(client, result.operation_id, timeout_s))
