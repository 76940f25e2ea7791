"""`chv key create|ls|rm`: encryption keys of the node. A key is never shown."""

from __future__ import annotations

import argparse
import base64
import sys
from pathlib import Path

from chv.cli import connect, output
from chv.common.errors import InvalidArgument, NotFound
from chv.common.wire import agent
from chv.common.wire.types import Empty

KEY_BYTES_MAX = 4096


def create(arguments: argparse.Namespace) -> int:
    """Store a key: made at random, or the bytes of a file as they are."""
    value = b"" if arguments.source is None else _read(arguments.source)
    request = agent.PutKey(
        name=arguments.name,
        namespace=arguments.namespace,
        key=base64.b64encode(value).decode(),
        requester=connect.requester(),
        reason=arguments.reason,
    )
    with connect.client(arguments.socket) as client:
        info = client.call(agent.PUT_KEY, request)
    print(f"key {info.namespace}/{info.name} created")
    return 0


def _read(source: str) -> bytes:
    try:
        if source == "-":
            data = sys.stdin.buffer.read(KEY_BYTES_MAX + 1)
        else:
            with Path(source).open("rb") as stream:
                data = stream.read(KEY_BYTES_MAX + 1)
    except FileNotFoundError as error:
        raise NotFound(f"no file {source!r}", field="--from") from error
    except OSError as error:
        raise InvalidArgument(
            f"cannot read {source!r}: {error.strerror}", field="--from"
        ) from error
    if not data:
        raise InvalidArgument(f"{source!r} is empty", field="--from")
    return data


def ls(arguments: argparse.Namespace) -> int:
    """List keys by name, and the volumes that name them."""
    with connect.client(arguments.socket) as client:
        keys = client.call(agent.LIST_KEYS, Empty()).keys
    if not arguments.all_namespaces:
        keys = [key for key in keys if key.namespace == arguments.namespace]
    if arguments.output:
        output.document(keys, arguments.output)
        return 0
    rows = [
        [key.namespace, key.name, ",".join(key.used_by) or "-", output.age(key.created_at)]
        for key in keys
    ]
    output.table(["NAMESPACE", "NAME", "USED-BY", "AGE"], rows)
    return 0


def rm(arguments: argparse.Namespace) -> int:
    """Destroy a key that no volume needs."""
    request = agent.DeleteKey(
        name=arguments.name,
        namespace=arguments.namespace,
        requester=connect.requester(),
        reason=arguments.reason,
    )
    with connect.client(arguments.socket) as client:
        client.call(agent.DELETE_KEY, request)
    print(f"key {arguments.namespace}/{arguments.name} deleted")
    return 0
