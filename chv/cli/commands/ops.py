"""`chv ops ls|show|cancel`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import msgspec

from chv.cli import connect, operations, output
from chv.cli.commands.logs import of_operation
from chv.cli.commands.objects import kind_of
from chv.common.wire import agent

OWN_KINDS = ("Node", "Key", "Leak", "Daemon")


def ls(arguments: argparse.Namespace) -> int:
    """List operations, newest first."""
    request = agent.ListOperations(
        kind=_kind(arguments.kind),
        namespace=arguments.namespace,
        name=arguments.name,
        verb=arguments.verb,
        states=[agent.OperationState(each) for each in arguments.state],
        since=moment(arguments.since),
        active_only=arguments.active,
        limit=arguments.limit,
    )
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
            entry.reason,
            output.age(entry.created_at),
            "" if entry.ended_at else operations.how_far(entry),
            entry.message,
        ]
        for entry in found
    ]
    headers = [
        *("ID", "VERB", "OBJECT", "NAMESPACE", "STATE"),
        *("REQUESTER", "REASON", "AGE", "PROGRESS", "MESSAGE"),
    ]
    output.table(headers, rows)
    return 0


def _kind(text: str) -> str:
    """Return the kind that is meant: of an object, or of what operations alone have."""
    own = {each.lower(): each for each in OWN_KINDS}
    return own.get(text.lower()) or (kind_of(text) if text else "")


def moment(text: str) -> str:
    """Return when `10m` ago was, or the RFC 3339 time that is given."""
    if not text or "T" in text:
        return text
    ago = datetime.now(UTC) - timedelta(seconds=operations.seconds(text, "--since"))
    return ago.strftime("%Y-%m-%dT%H:%M:%SZ")


def show(arguments: argparse.Namespace) -> int:
    """Show one operation and its steps."""
    with connect.client(arguments.socket) as client:
        request = agent.OperationRef(operation_id=arguments.id)
        operation = client.call(agent.GET_OPERATION, request).operation
        lines: list[str] = []
        if arguments.logs:
            lines = of_operation(client, operation.id, operation.created_at)
    if arguments.output:
        plain = msgspec.to_builtins(operation)
        said = {"logs": [msgspec.json.decode(line) for line in lines]} if arguments.logs else {}
        output.document(plain | said, arguments.output)
        return 0
    where = f" in {operation.namespace}" if operation.namespace else ""
    which = f", generation {operation.generation}" if operation.generation else ""
    print(f"{operation.id}  {operation.verb} {operation.kind}/{operation.name}{where}{which}")
    print(f"  {operation.state}  {operation.message}")
    print(
        f"  requested by {operation.requester} {output.age(operation.created_at)} ago"
        + (f": {operation.reason}" if operation.reason else "")
    )
    for words in _details(operation):
        print(f"  {words}")
    if operation.steps:
        print()
        output.table(
            ["STEP", "OUTCOME", "STARTED", "ENDED", "MESSAGE"],
            [
                [step.name, step.outcome, step.started_at, step.ended_at, step.message]
                for step in operation.steps
            ],
        )
    if lines:
        print(f"\n{''.join(lines)}", end="")
    return 0


def _details(operation: agent.Operation) -> Iterator[str]:
    if far := operations.how_far(operation):
        yield far
    if operation.cancelled_by:
        yield f"its end was asked for {operation.cancelled_by}"
    if operation.error:
        yield f"{operation.error.code}: {operation.error.message}"
    asked = {name: value for name, value in operation.request.items() if value not in ("", None)}
    if asked:
        yield "asked for " + ", ".join(f"{name} {value}" for name, value in asked.items())


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
