"""The newest events of an object, for commands that show it."""

from __future__ import annotations

from chv.cli import output
from chv.common.rpc.blocking import BlockingClient
from chv.common.wire import agent_events as wire

LAST_MAX = 5


def last_events(client: BlockingClient, kind: str, namespace: str, name: str) -> list[wire.Event]:
    """Return the newest events of an object, in order."""
    found: list[wire.Event] = []
    request = wire.WatchEvents(kind=kind, namespace=namespace, name=name, tail=LAST_MAX)
    client.stream(wire.WATCH_EVENTS, request, lambda chunk: found.extend(chunk.events))
    return found


def print_events(found: list[wire.Event]) -> None:
    """Print them below what else is said of the object."""
    if found:
        print("\nEvents")
        for event in found:
            print(f"  {output.age(event.at):>4}  {event.type:7}  {event.reason}  {event.message}")
