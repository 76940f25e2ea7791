"""What a transaction tells: from the tables before it and its changes to events. Pure.

The one place where events come about: `with_events` adds them to the transaction, so whoever
changes something through the ledger tells of it, and nobody tells of what was not changed. What is
stored again as it was tells nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from chv.agent.events_record import PutEvents, PutSighting, Sighting
from chv.agent.events_words import (
    Told,
    condition_events,
    facts_events,
    generation_events,
    node_events,
    of_node,
    of_object,
    of_operation,
    operation_events,
    phase_events,
    worker_events,
)
from chv.agent.node_record import NodeRecord, PutNode
from chv.agent.records import (
    FINAL_STATES,
    Change,
    PutFacts,
    PutObject,
    PutOperation,
    PutStatus,
    PutWorker,
    RemoveObject,
    RemoveWorker,
    StoredObject,
    WorkerRow,
    with_facts,
    with_status,
)
from chv.agent.tables import Tables
from chv.common.wire.agent import Operation
from chv.common.wire.agent_events import Event

# However its characters are written, a page of events fits into one frame.
MESSAGE_CHARACTERS_MAX = 512
DATA_CHARACTERS_MAX = 256


def with_events(tables: Tables, changes: tuple[Change, ...], at: str) -> tuple[Change, ...]:
    """Return the changes of a transaction with the events that they are."""
    told = tuple(derived(tables, changes))
    if not told:
        return changes
    first = tables.event_seq + 1
    numbered = tuple(
        msgspec.structs.replace(event, seq=first + index, at=event.at or at)
        for index, event in enumerate(told)
    )
    return (*changes, PutEvents(events=numbered))


def derived(tables: Tables, changes: tuple[Change, ...]) -> Iterator[Event]:
    """Yield the events of a transaction in the order of its changes, without numbers.

    A time has only what was seen before.
    """
    view = _View(tables)
    authors = _authors(changes)
    for change in changes:
        for head, told in view.events(change):
            author = head.operation_id or authors.get(head.uid) or tables.active.get(head.uid, "")
            yield msgspec.structs.replace(
                head,
                type=told.type,
                reason=told.reason,
                message=told.message[:MESSAGE_CHARACTERS_MAX],
                data={key: text[:DATA_CHARACTERS_MAX] for key, text in told.data.items()},
                operation_id=author,
            )


def _authors(changes: tuple[Change, ...]) -> dict[str, str]:
    """Return the operation that each object's changes belong to: one under way before one ended."""
    found: dict[str, str] = {}
    operations = [change.operation for change in changes if isinstance(change, PutOperation)]
    for operation in sorted(operations, key=lambda each: each.state not in FINAL_STATES):
        found[operation.uid] = operation.id
    return found


@dataclass
class _View:
    """The tables, and what the changes so far have made of them."""

    tables: Tables
    objects: dict[str, StoredObject | None] = field(default_factory=dict)
    workers: dict[str, WorkerRow | None] = field(default_factory=dict)
    operations: dict[str, Operation] = field(default_factory=dict)
    sightings: dict[str, Sighting] = field(default_factory=dict)
    node: NodeRecord | None = None

    def events(self, change: Change) -> Iterator[tuple[Event, Told]]:
        """Yield what one change tells, of whom; from here on it is done."""
        match change:
            case PutObject(object=stored):
                yield from self._put(self._object(stored.uid), stored)
            case PutStatus(uid=uid, status=status):
                before = self._object(uid)
                if before is not None:
                    resource = with_status(before.resource, status)
                    yield from self._put(before, msgspec.structs.replace(before, resource=resource))
            case PutFacts(uid=uid, facts=facts):
                before = self._object(uid)
                if before is not None:
                    yield from self._put(before, with_facts(before, facts))
            case RemoveObject(tombstone=tombstone):
                before = self._object(tombstone.uid)
                self.objects[tombstone.uid] = None
                if before is not None:
                    yield of_object(before), Told("Deleted", "nothing of it is left")
            case PutWorker(row=row):
                yield from self._put_worker(row.vm_uid, row)
            case RemoveWorker(vm_uid=vm_uid):
                yield from self._put_worker(vm_uid, None, change)
            case PutOperation(operation=operation):
                known = self.operations.get(operation.id)
                known = known or self.tables.operations.get(operation.id)
                self.operations[operation.id] = operation
                head = of_operation(operation)
                yield from ((head, told) for told in operation_events(known, operation))
            case PutNode(record=record):
                was, self.node = self.node or self.tables.node, record
                yield from ((of_node(), told) for told in node_events(was, record))
            case PutSighting(sighting=sighting):
                yield from self._see(sighting)
            case _:
                pass

    def _object(self, uid: str) -> StoredObject | None:
        return self.objects[uid] if uid in self.objects else self.tables.objects.get(uid)

    def _put(self, before: StoredObject | None, now: StoredObject) -> Iterator[tuple[Event, Told]]:
        self.objects[now.uid] = now
        head = of_object(now)
        was = before.resource.status if before is not None else None
        for events in (
            generation_events(before, now),
            facts_events(before, now),
            phase_events(was, now.resource.status),
            condition_events(was, now.resource.status),
        ):
            yield from ((head, told) for told in events)

    def _put_worker(
        self, vm_uid: str, now: WorkerRow | None, removal: RemoveWorker | None = None
    ) -> Iterator[tuple[Event, Told]]:
        known = self.workers if vm_uid in self.workers else self.tables.workers
        before, self.workers[vm_uid] = known.get(vm_uid), now
        stored = self._object(vm_uid)
        if stored is not None:
            ending = removal.ending if removal is not None else None
            head = of_object(stored)
            yield from ((head, told) for told in worker_events(before, now, ending))

    def _see(self, now: Sighting) -> Iterator[tuple[Event, Told]]:
        before = self.sightings.get(now.key) or self.tables.sightings.get(now.key)
        self.sightings[now.key] = now
        if (before.state if before is not None else "") != now.state:
            head = Event(
                at=now.at, kind=now.kind, namespace=now.namespace, name=now.name, uid=now.uid
            )
            data = {"from": before.state if before is not None else "", "to": now.state}
            yield head, Told(now.reason, now.message, now.type, data)
