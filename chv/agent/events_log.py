"""Events as lines of the agent's log, so that one search finds what all daemons did."""

from __future__ import annotations

from collections.abc import Iterable

from chv.common import logs
from chv.common.wire.agent_events import Event, EventType

log = logs.get(__name__)

QUIET = ("Condition", "Phase")  # what follows from the rest, unless it is a warning


def log_events(events: Iterable[Event]) -> None:
    """Write a line for each event that tells what was done."""
    for event in events:
        if event.reason in QUIET and event.type is EventType.NORMAL:
            continue
        fields = {"operation_id": event.operation_id} if event.operation_id else {}
        where = f"{event.namespace}/" if event.namespace else ""
        log.info(
            "agent.event",
            seq=event.seq,
            reason=event.reason,
            object=f"{event.kind} {where}{event.name}",
            message=event.message,
            **fields,
        )
