"""`chv rebuild`: a new root disk for a VM that stays itself."""

from __future__ import annotations

import argparse
import sys

import msgspec

from chv.cli import connect, operations
from chv.cli.output import note
from chv.common.errors import InvalidArgument
from chv.common.wire.agent_rebuild import REBUILD_VM, RebuildVm


def rebuild(arguments: argparse.Namespace) -> int:
    """Ask whether the data may go, rebuild; wait for the outcome unless told otherwise."""
    if not (arguments.yes or arguments.keep_old):
        _ask(arguments.name)
    request = RebuildVm(
        name=arguments.name,
        namespace=arguments.namespace,
        requester=connect.requester(),
        reason=arguments.reason,
        image=arguments.image,
        keep_old=arguments.keep_old,
        force=arguments.force,
    )
    timeout_s = operations.seconds(arguments.timeout)
    with connect.client(arguments.socket) as client:
        reply = client.call(REBUILD_VM, request)
        operation = reply.operation
        if not arguments.no_wait:
            operation = operations.wait(client, operation.id, timeout_s)
    if arguments.json:
        print(msgspec.json.encode(operation).decode())
    elif arguments.no_wait:
        print(operation.id)
    else:
        operations.announce(operation)
        if arguments.keep_old:
            note(f"its former root disk is volume {reply.former}")
    return 0


def _ask(name: str) -> None:
    """Refuse to lose data that nobody said may go."""
    question = f"what VM {name} has on its root disk is lost for good"
    if sys.stdin.isatty():
        sys.stderr.write(f"{question}; go on? [y/N] ")
        sys.stderr.flush()
        if sys.stdin.readline().strip().lower() in ("y", "yes"):
            return
    raise InvalidArgument(question, field="--yes", hint="give --yes, or --keep-old to keep it")
