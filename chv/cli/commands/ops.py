"""`chv ops ls|show|cancel`."""

from __future__ import annotations

import argparse

from chv.cli import connect, operations, output
from chv.common.wire import agent


def ls(arguments: argparse.Namespace) -> int:
    """List operations, newest first."""
    request = agent.ListOperations(active_only=arguments.active, limit=arguments.limit)
    with connect.client(arguments.socket) as client:
        found = client.call(agent.LIST_OPERATIONS, request).operations
    if arguments.output:
        output.document(found, arguments.output)
        return 0
    rows = [
        [
            entry.id,
            entry.verb,
            f"{entry.kind}/{entry.name}",
            entry.namespace,
            entry.state,
            entry.requester,
            output.age(entry.created_at),
            entry.message,
        ]
        for entry in found
    ]
    headers = ["ID", "VERB", "OBJECT", "NAMESPACE", "STATE", "REQUESTER", "AGE", "MESSAGE"]
    output.table(headers, rows)
    return 0


def show(arguments: argparse.Namespace) -> int:
    """Show one operation and its steps."""
    with connect.client(arguments.socket) as client:
        request = agent.OperationRef(operation_id=arguments.id)
        operation = client.call(agent.GET_OPERATION, request).operation
    if arguments.output:
        output.document(operation, arguments.output)
        return 0
    print(
        f"{operation.id}  {operation.verb} {operation.kind}/{operation.name} "
        f"in {operation.namespace}, generation {operation.generation}"
    )
    print(f"  {operation.state}  {operation.message}")
    print(
        f"  requested by {operation.requester} {output.age(operation.created_at)} ago"
        + (f": {operation.reason}" if operation.reason else "")
    )
    if operation.error:
        print(f"  {operation.error.code}: {operation.error.message}")
    if operation.steps:
        print()
        output.table(
            ["STEP", "OUTCOME", "STARTED", "ENDED", "MESSAGE"],
            [
                [step.name, step.outcome, step.started_at, step.ended_at, step.message]
                for step in operation.steps
            ],
        )
    return 0


def cancel(arguments: argparse.Namespace) -> int:
    """Ask for the end of an operation and, unless told otherwise, wait until it has ended."""
    timeout_s = operations.seconds(arguments.timeout)
    request = agent.CancelOperation(
        operation_id=arguments.id, requester=connect.requester(), reason=arguments.reason
    )
    with connect.client(arguments.socket) as client:
        operation = client.call(agent.CANCEL_OPERATION, request).operation
        if not arguments.no_wait:
            operation = operations.final(client, operation.id, timeout_s)
    operations.announce(operation)
    return 0
