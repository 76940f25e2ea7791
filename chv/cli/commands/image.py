"""`chv image build|import|ls|rm|gc`."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import msgspec

from chv.cli import connect, manifests, operations, upload
from chv.cli.commands import objects
from chv.common.wire import agent
from chv.common.wire.types import API_VERSION

BUILD_TIMEOUT_S = 600.0


def build(arguments: argparse.Namespace) -> int:
    """Define the Image of a built-in guest and wait until it is built."""
    document = {
        "apiVersion": API_VERSION,
        "kind": "Image",
        "metadata": {
            "name": arguments.name or arguments.builtin,
            "namespace": arguments.namespace,
        },
        "spec": {"builtin": arguments.builtin},
    }
    request = agent.Apply(
        objects=manifests.raw([document]),
        requester=connect.requester(),
        reason=arguments.reason,
    )
    with connect.client(arguments.socket) as client:
        result = client.call(agent.APPLY, request).results[0]
        if result.operation_id:
            operations.announce(operations.wait(client, result.operation_id, BUILD_TIMEOUT_S))
    print(f"Image/{result.name} {result.action}")
    return 0


def import_(arguments: argparse.Namespace) -> int:
    """Store a file, a URL's content or standard input, and define its Image.

    It goes on in the agent where this command is interrupted.
    """
    source, seen = arguments.source, _Seen()
    with connect.client(arguments.socket) as client, operations.going_on(lambda: seen.operation_id):
        if source.startswith(("http://", "https://")):
            reply = client.stream(agent.FETCH_IMAGE, _fetch(arguments), seen.progress)
        elif source == "-" or os.geteuid() != 0:
            reply = upload.send(client, source, _wanted(arguments), seen.progress)
        else:
            reply = client.stream(agent.IMPORT_IMAGE, _by_path(arguments), seen.progress)
    if sys.stderr.isatty():
        print(file=sys.stderr)
    print(f"Image/{arguments.name} {arguments.artifact} sha256:{reply.sha256}")
    return 0


def _wanted(arguments: argparse.Namespace) -> upload.Wanted:
    return upload.Wanted(
        name=arguments.name,
        namespace=arguments.namespace,
        artifact=arguments.artifact,
        format=arguments.format,
        sha256=arguments.sha256,
        requester=connect.requester(),
        reason=arguments.reason,
    )


def _fetch(arguments: argparse.Namespace) -> agent.FetchImage:
    return agent.FetchImage(url=arguments.source, **msgspec.structs.asdict(_wanted(arguments)))


def _by_path(arguments: argparse.Namespace) -> agent.ImportImage:
    path = str(Path(arguments.source).absolute())
    return agent.ImportImage(path=path, **msgspec.structs.asdict(_wanted(arguments)))


class _Seen:
    """What was told of an import."""

    def __init__(self) -> None:
        self.operation_id = ""

    def progress(self, event: agent.Progress) -> None:
        """Remember the operation; show on a terminal how far it is."""
        self.operation_id = event.operation_id or self.operation_id
        if not sys.stderr.isatty():
            return
        how_far = f"{event.done >> 20} MiB"
        if event.total:
            how_far = f"{100 * event.done // event.total:3d} %"
        print(f"\r{event.step} {how_far} ", end="", file=sys.stderr)


def gc(arguments: argparse.Namespace) -> int:
    """Remove what no image has."""
    request = agent.CollectImages(
        dry_run=arguments.dry_run, requester=connect.requester(), reason=arguments.reason
    )
    with connect.client(arguments.socket) as client:
        reply = client.call(agent.COLLECT_IMAGES, request)
    word = "would remove" if arguments.dry_run else "removed"
    for name in reply.removed:
        print(f"{word} {name}")
    print(f"{word} {len(reply.removed)} files, {reply.freed_bytes} bytes")
    return 0


def ls(arguments: argparse.Namespace) -> int:
    """List images."""
    arguments.kind, arguments.name = "image", None
    return objects.get(arguments)


def rm(arguments: argparse.Namespace) -> int:
    """Remove an image that nothing uses."""
    request = agent.DeleteObject(
        kind="Image",
        name=arguments.name,
        namespace=arguments.namespace,
        requester=connect.requester(),
        reason=arguments.reason,
    )
    with connect.client(arguments.socket) as client:
        operation = client.call(agent.DELETE, request).operation
        operations.wait(client, operation.id, BUILD_TIMEOUT_S)
    print(f"Image/{arguments.name} deleted")
    return 0
