"""`chv image build|import|ls|rm`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from chv.cli import connect, manifests, operations
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
    request = agent.Apply(objects=manifests.raw([document]), requester=connect.requester())
    with connect.client(arguments.socket) as client:
        result = client.call(agent.APPLY, request).results[0]
        if result.operation_id:
            operations.announce(operations.wait(client, result.operation_id, BUILD_TIMEOUT_S))
    print(f"Image/{result.name} {result.action}")
    return 0


def import_(arguments: argparse.Namespace) -> int:
    """Copy a local file into the content-addressed store and define its Image."""
    request = agent.ImportImage(
        name=arguments.name,
        namespace=arguments.namespace,
        artifact=arguments.artifact,
        path=str(Path(arguments.path).absolute()),
        format=arguments.format,
        sha256=arguments.sha256,
        requester=connect.requester(),
    )
    with connect.client(arguments.socket) as client:
        reply = client.stream(agent.IMPORT_IMAGE, request, _progress)
    if sys.stderr.isatty():
        print(file=sys.stderr)
    print(f"Image/{arguments.name} {arguments.artifact} sha256:{reply.sha256}")
    return 0


def _progress(event: agent.Progress) -> None:
    if sys.stderr.isatty():
        percent = 100 * event.done // event.total if event.total else 0
        print(f"\r{event.step} {percent:3d} %", end="", file=sys.stderr)


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
    )
    with connect.client(arguments.socket) as client:
        operation = client.call(agent.DELETE, request).operation
        operations.wait(client, operation.id, BUILD_TIMEOUT_S)
    print(f"Image/{arguments.name} deleted")
    return 0
