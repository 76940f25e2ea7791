"""`chv backup`: all disks of a VM, as they were in one instant."""

from __future__ import annotations

import argparse

from chv.cli import connect, operations
from chv.common.quantity import parse_bytes
from chv.common.wire import agent


def backup(arguments: argparse.Namespace) -> int:
    """Back them up; wait for the outcome unless told otherwise."""
    request = agent.BackUpVm(
        name=arguments.name,
        namespace=arguments.namespace,
        requester=connect.requester(),
        reason=arguments.reason,
        target=arguments.target,
        incremental=arguments.incremental,
        bps_max=parse_bytes(arguments.rate, field="--rate") if arguments.rate else 0,
    )
    timeout_s = operations.seconds(arguments.timeout)
    with connect.client(arguments.socket) as client:
        operation = client.call(agent.BACK_UP_VM, request).operation
        if arguments.no_wait:
            print(operation.id)
        else:
            operations.announce(operations.wait(client, operation.id, timeout_s))
    return 0
