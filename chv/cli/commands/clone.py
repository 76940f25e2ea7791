"""`chv clone`: a VM like another, with an identity of its own."""

from __future__ import annotations

import argparse

from chv.cli import connect, operations
from chv.cli.output import note
from chv.common.wire.agent_clone import CLONE_VM, CloneVm
from chv.common.wire.resources import CloneModeName


def clone(arguments: argparse.Namespace) -> int:
    """Clone it, say what was not copied; wait for the outcome unless told otherwise."""
    request = CloneVm(
        name=arguments.name,
        new_name=arguments.new_name,
        namespace=arguments.namespace,
        requester=connect.requester(),
        reason=arguments.reason,
        mode=CloneModeName(arguments.mode),
        start=arguments.start,
        freeze=arguments.freeze,
    )
    timeout_s = operations.seconds(arguments.timeout)
    with connect.client(arguments.socket) as client:
        reply = client.call(CLONE_VM, request)
        for words in reply.left_out:
            note(f"not copied: {words}")
        if arguments.no_wait:
            print(reply.operation.id)
        else:
            operations.announce(operations.wait(client, reply.operation.id, timeout_s))
    return 0
