"""`chv events`: what has happened, and what happens; resumed by number where the agent restarts."""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import msgspec

from chv.cli import connect, output
from chv.cli.commands.logs import parse_since
from chv.cli.commands.objects import kind_of
from chv.cli.commands.ops import OWN_KINDS
from chv.common.clock import SystemClock
from chv.common.errors import InvalidArgument, ResourceExhausted, Unavailable
from chv.common.wire import agent_events as wire

RETRY_S = 0.2


def events(arguments: argparse.Namespace) -> int:
    """Print events in order; with --follow until interrupted."""
    kind, name = target(arguments.object)
    of_object = kind not in OWN_KINDS and name
    request = wire.WatchEvents(
        after_seq=arguments.after,
        kind=kind,
        namespace=arguments.namespace or ("default" if of_object else ""),
        name=name,
        type=arguments.type,
        operation_id=arguments.operation,
        since=parse_since(arguments.since, SystemClock().now()),
        follow=arguments.follow,
    )
    if arguments.after is not None and arguments.after < 0:
        raise InvalidArgument("events are numbered from 1", field="--after")
    reader = Reader(request, json=arguments.json)
    while True:
        try:
            with connect.client(arguments.socket) as client:
                client.stream(wire.WATCH_EVENTS, reader.request(), reader.show)
            return 0
        except (Unavailable, ResourceExhausted) as error:
            if not (arguments.follow and reader.began):
                raise
            reader.away(str(error))
            time.sleep(RETRY_S)


def target(text: str) -> tuple[str, str]:
    """Return kind and name of KIND/NAME, KIND or nothing."""
    kind, _, name = text.partition("/")
    own = {each.lower(): each for each in OWN_KINDS}
    if kind.lower() in own:
        return own[kind.lower()], name
    return (kind_of(kind) if kind else ""), name


class Reader:
    """Prints events and knows where to go on."""

    def __init__(self, request: wire.WatchEvents, *, json: bool) -> None:
        self._request = request
        self._json = json
        self._away = False
        self.began = False

    def request(self) -> wire.WatchEvents:
        """Return what to ask for now."""
        return self._request

    def show(self, chunk: wire.EventChunk) -> None:
        """Print what came; from here on it is not asked for again."""
        if self._away:
            output.note(f"the agent is back: going on after event {self._request.after_seq}")
        self._away, self.began = False, True
        for event in chunk.events:
            sys.stdout.write(_line(event) if not self._json else _object(event))
        sys.stdout.flush()
        self._request = msgspec.structs.replace(
            self._request, after_seq=chunk.last_seq, log=chunk.log, since=""
        )

    def away(self, why: str) -> None:
        """Say once that the agent is not there."""
        if not self._away:
            output.note(f"waiting for the agent: {why}")
        self._away = True


def _line(event: wire.Event) -> str:
    where = f"{event.namespace}/" if event.namespace else ""
    words = event.message.replace("\n", " ")
    return (
        f"{event.seq:<6} {event.at}  {event.type:7}  {event.kind}/{where}{event.name}  "
        f"{event.reason}  {words}\n"
    )


def _object(event: wire.Event) -> str:
    fields: dict[str, Any] = {name: getattr(event, name) for name in event.__struct_fields__}
    return msgspec.json.encode(fields).decode() + "\n"
