"""`chv start|stop|restart|reset|pause|resume|restore` and `chv wait`."""

from __future__ import annotations

import argparse

from chv.cli import connect, operations
from chv.cli.commands.objects import kind_of
from chv.common.errors import InvalidArgument
from chv.common.wire import agent, agent_waiting


def act(arguments: argparse.Namespace) -> int:
    """Ask for the verb and, unless told otherwise, wait for its outcome."""
    timeout_s = operations.seconds(arguments.timeout)
    request = agent.ActOnVm(
        verb=agent.VmVerb(arguments.verb),
        name=arguments.name,
        namespace=arguments.namespace,
        requester=connect.requester(),
        reason=arguments.reason,
        force=getattr(arguments, "force", False),
        snapshot=getattr(arguments, "snapshot", ""),
    )
    with connect.client(arguments.socket) as client:
        reply = client.call(agent.ACT_ON_VM, request)
        if arguments.no_wait:
            print(reply.operation.id)
        else:
            operations.announce(operations.wait(client, reply.operation.id, timeout_s))
    return 0


def wait(arguments: argparse.Namespace) -> int:
    """Wait until a condition holds, a phase is reached, or the object is gone."""
    if arguments.object == "node":
        return _wait_for_node(arguments)
    kind, _, name = arguments.object.partition("/")
    if not name:
        raise InvalidArgument(
            f"{arguments.object!r} is not KIND/NAME", hint="for instance vm/hello, or node"
        )
    condition, status = _condition(arguments.condition, "phase")
    timeout_s = operations.seconds(arguments.timeout)
    request = agent.WaitCondition(
        kind=kind_of(kind),
        name=name,
        namespace=arguments.namespace,
        condition=condition,
        status=status,
        timeout_s=timeout_s,
    )
    with connect.client(arguments.socket) as client:
        client.call(agent.WAIT_CONDITION, request, timeout_s=timeout_s + 5)
    print(f"{arguments.object} {arguments.condition}")
    return 0


def _wait_for_node(arguments: argparse.Namespace) -> int:
    condition, status = _condition(arguments.condition, "state")
    timeout_s = operations.seconds(arguments.timeout)
    request = agent_waiting.WaitNode(condition=condition, status=status, timeout_s=timeout_s)
    with connect.client(arguments.socket) as client:
        client.call(agent_waiting.WAIT_NODE, request, timeout_s=timeout_s + 5)
    print(f"node {arguments.condition}")
    return 0


def _condition(text: str, word: str) -> tuple[str, str]:
    """Return a condition and the status that it is to have; `word=NAME` is one as a whole."""
    head, _, tail = text.partition("=")
    return (head, tail.capitalize()) if tail and head != word else (text, "True")
