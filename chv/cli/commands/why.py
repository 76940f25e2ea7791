"""`chv why`: one screen from what is wanted to what blocks it."""

from __future__ import annotations

import argparse

from chv.cli import connect, output
from chv.cli.commands.history import target
from chv.cli.last_events import last_events, print_events
from chv.common.errors import InvalidArgument
from chv.common.wire import agent
from chv.common.wire import agent_history as wire


def why(arguments: argparse.Namespace) -> int:
    """Say why an object is as it is; a bare name is a VM's."""
    text = arguments.object if "/" in arguments.object else f"vm/{arguments.object}"
    kind, name, generation = target(text)
    if generation:
        raise InvalidArgument(f"{text!r} names a generation", hint=f"chv history {text}")
    with connect.client(arguments.socket) as client:
        request = agent.ObjectRef(kind=kind, name=name, namespace=arguments.namespace)
        reply = client.call(wire.WHY, request)
        newest = [] if reply.as_wanted else last_events(client, kind, arguments.namespace, name)
    if arguments.output:
        output.document(reply, arguments.output)
        return 0
    print(reply.verdict)
    if not reply.as_wanted:
        _page(reply)
        print_events(newest)
    return 0


def _page(reply: wire.WhyReply) -> None:
    print(f"\nWanted  {reply.wants}, generation {reply.generation}{_by(reply.wanted)}")
    if reply.observed_generation < reply.generation:
        print(f"        only generation {reply.observed_generation} was looked at so far")
    if reply.age_s >= 0:
        print(f"Seen    {reply.age_s:.0f}s ago, phase {reply.phase}")
    if reply.operation is not None:
        _operation(reply.operation)
    if reply.conditions:
        print("\nConditions")
        for each in reply.conditions:
            since = output.age(each.last_transition_time)
            print(f"  {each.type} is {each.status} ({each.reason}) for {since}")
            for text in filter(None, (each.message, each.evidence)):
                print(f"    {text}")
    if reply.obstacles:
        print("\nWaits for")
        for other in reply.obstacles:
            print(f"  {other.kind}/{other.name}: {other.problem}")
    for said in reply.words:
        _lines(said.source, said.lines)
    _lines("Serial console", reply.serial)
    _lines("What to do", reply.fixes)


def _by(wanted: wire.GenerationInfo | None) -> str:
    if wanted is None:
        return ""
    why = f": {wanted.reason}" if wanted.reason else ""
    return f" by {wanted.requester or 'unknown'} {output.age(wanted.at)} ago{why}"


def _operation(operation: agent.Operation) -> None:
    said = f": {operation.message}" if operation.message else ""
    print(
        f"\nOperation {operation.id}: {operation.verb} by {operation.requester}, "
        f"{operation.state}{said}"
    )
    if operation.error is not None:
        print(f"  {operation.error.code}: {operation.error.message}")
    for step in operation.steps:
        print(f"  {step.outcome:8} {step.name}  {step.message}".rstrip())


def _lines(title: str, lines: list[str]) -> None:
    if lines:
        print(f"\n{title}")
        for line in lines:
            print(f"  {line}")
