"""The agent's records in memory and the rules that every store keeps. Pure, synchronous.

`Tables.apply` is the one definition of what a change does. The memory store and the engine's
cache are this class; the SQLite store repeats its rules in SQL, and the contract tests hold them
together. Fails with AlreadyExists, StaleGeneration, Conflict or NotFound, having changed nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, assert_never

import msgspec

from chv.agent.events_record import PutEvents, PutSighting, Sighting, refuse_gap
from chv.agent.generations import (
    DELETED_GENERATIONS_MAX,
    Generation,
    PutGeneration,
    with_generation,
)
from chv.agent.node_record import PutNode
from chv.agent.records import (
    FINAL_STATES,
    Change,
    Prune,
    PutFacts,
    PutObject,
    PutOperation,
    PutRequest,
    PutStatus,
    PutStep,
    PutWorker,
    RemoveObject,
    RemoveWorker,
    RequestRow,
    Snapshot,
    StoredObject,
    Tombstone,
    WorkerRow,
    is_side,
    revision_of,
    with_facts,
    with_status,
)
from chv.agent.upstream.records import (
    Assignment,
    DropReports,
    PutAssignment,
    PutReport,
    key_of,
)
from chv.common.errors import AlreadyExists, Conflict, NotFound, StaleGeneration
from chv.common.wire.agent import Operation
from chv.common.wire.agent_events import Event
from chv.common.wire.upstream import Report

Undo = Callable[[], None]
TOMBSTONES_MAX = 4096  # the oldest go first: nobody speaks any more of what they stand for


class Tables:
    """Objects, workers, operations, remembered requests, tombstones."""

    def __init__(self, snapshot: Snapshot | None = None) -> None:
        snapshot = snapshot or Snapshot()
        self.revision = snapshot.revision
        self.objects = {stored.uid: stored for stored in snapshot.objects}
        self.by_key = {stored.key: stored.uid for stored in snapshot.objects}
        self.workers = {row.vm_uid: row for row in snapshot.workers}
        self.operations = {operation.id: operation for operation in snapshot.operations}
        self.active = {
            operation.uid: operation.id
            for operation in snapshot.operations
            if not is_side(operation)
        }
        self.requests: dict[str, RequestRow] = {}
        self.tombstones: dict[str, Tombstone] = {}
        self.histories: dict[str, tuple[Generation, ...]] = {}  # oldest first
        self.node = snapshot.node
        self.assignments = {each.uid: each for each in snapshot.assignments}
        self.outbox = {key_of(report): report for report in snapshot.outbox}
        self.outbox_seq = snapshot.outbox_seq
        self.sightings = {each.key: each for each in snapshot.sightings}
        self.event_seq = snapshot.event_seq
        self.events: dict[int, Event] = {}  # by number, in order

    def apply(self, changes: tuple[Change, ...]) -> None:
        """Apply all changes, or raise and leave everything as it was."""
        undo: list[Undo] = []
        try:
            for change in changes:
                self._apply(change, undo)
        except Exception:
            for step in reversed(undo):
                step()
            raise

    def snapshot(self) -> Snapshot:
        """Return all but history."""
        return Snapshot(
            revision=self.revision,
            objects=tuple(self.objects.values()),
            workers=tuple(self.workers.values()),
            operations=tuple(o for o in self.operations.values() if o.state not in FINAL_STATES),
            node=self.node,
            assignments=tuple(self.assignments.values()),
            outbox=tuple(sorted(self.outbox.values(), key=lambda report: report.seq)),
            outbox_seq=self.outbox_seq,
            sightings=tuple(self.sightings[key] for key in sorted(self.sightings)),
            event_seq=self.event_seq,
        )

    def active_operation(self, uid: str) -> Operation | None:
        """Return the operation that makes an object as wanted, where one is under way."""
        operation_id = self.active.get(uid)
        return self.operations[operation_id] if operation_id is not None else None

    def find(self, kind: str, namespace: str, name: str) -> StoredObject | None:
        """Return the live object of that name."""
        uid = self.by_key.get((kind, namespace, name))
        return self.objects[uid] if uid is not None else None

    def of_kind(self, kind: str) -> list[StoredObject]:
        """Return all objects of a kind in the order of namespace and name."""
        keys = sorted(key for key in self.by_key if key[0] == kind)
        return [self.objects[self.by_key[key]] for key in keys]

    def _apply(self, change: Change, undo: list[Undo]) -> None:
        match change:
            case PutObject(object=stored):
                self._put_object(stored, undo)
            case PutStatus(uid=uid, status=status):
                if uid in self.objects:
                    stored = self.objects[uid]
                    resource = with_status(stored.resource, status)
                    self._set(self.objects, uid, _replace(stored, resource=resource), undo)
            case PutFacts(uid=uid, facts=facts):
                self._set(self.objects, uid, with_facts(self._stored(uid), facts), undo)
            case RemoveObject(tombstone=tombstone):
                self._remove_object(tombstone, undo)
            case PutWorker(row=row):
                self._put_worker(row, undo)
            case RemoveWorker(vm_uid=vm_uid):
                self._drop(self.workers, vm_uid, undo)
            case PutOperation(operation=operation):
                self._put_operation(operation, undo)
            case PutStep():
                self._put_step(change, undo)
            case PutRequest(request=request):
                self._set(self.requests, request.key, request, undo)
            case PutGeneration(generation=new):
                known = self.histories.get(new.row.uid, ())
                self._set(self.histories, new.row.uid, with_generation(known, new), undo)
            case PutNode(record=record):
                before = self.node
                undo.append(lambda: setattr(self, "node", before))
                self.node = record
            case PutAssignment(assignment=assignment):
                self._assign(assignment, undo)
            case PutReport(report=report):
                self._put_report(report, undo)
            case DropReports(seqs=seqs):
                for key in [k for k, report in self.outbox.items() if report.seq in seqs]:
                    self._drop(self.outbox, key, undo)
            case PutSighting(sighting=sighting):
                self._see(sighting, undo)
            case PutEvents():
                self._put_events(change, undo)
            case Prune():
                self._prune(change, undo)
            case _:
                assert_never(change)

    def _put_object(self, stored: StoredObject, undo: list[Undo]) -> None:
        holder = self.by_key.get(stored.key, stored.uid)
        if holder != stored.uid:
            raise AlreadyExists(f"the name is taken by {holder}", resource=stored.title)
        generation = stored.resource.metadata.generation
        if stored.uid in self.tombstones or generation < self._generation(stored.uid):
            raise StaleGeneration(f"generation {generation} is not new", resource=stored.title)
        self._refuse_taken_slot(stored)
        before = self.objects.get(stored.uid)
        if before is not None and before.key != stored.key:  # it has another name from now on
            self._drop(self.by_key, before.key, undo)
        self._set(self.objects, stored.uid, stored, undo)
        self._set(self.by_key, stored.key, stored.uid, undo)
        self._raise_revision(revision_of(stored), undo)

    def _refuse_taken_slot(self, stored: StoredObject) -> None:
        if stored.facts is None:
            return
        for other in self.objects.values():
            taken = other.facts is not None and other.facts.slot == stored.facts.slot
            if taken and other.uid != stored.uid:
                raise Conflict(f"slot {stored.facts.slot} belongs to {other.title}")

    def _remove_object(self, tombstone: Tombstone, undo: list[Undo]) -> None:
        stored = self._stored(tombstone.uid)
        if stored.uid in self.workers:
            raise Conflict("its VMM is not forgotten yet", resource=stored.title)
        self._drop(self.objects, stored.uid, undo)
        self._drop(self.by_key, stored.key, undo)
        self._drop(self.assignments, stored.uid, undo)
        for key in [key for key, each in self.sightings.items() if each.uid == stored.uid]:
            self._drop(self.sightings, key, undo)
        self._set(self.tombstones, stored.uid, tombstone, undo)
        if stored.uid in self.histories:
            kept = self.histories[stored.uid][-DELETED_GENERATIONS_MAX:]
            self._set(self.histories, stored.uid, kept, undo)
        self._raise_revision(tombstone.revision, undo)

    def _put_worker(self, row: WorkerRow, undo: list[Undo]) -> None:
        existing = self.workers.get(row.vm_uid)
        if existing is not None and existing.worker_id != row.worker_id:
            raise Conflict(f"worker {existing.worker_id} is not forgotten yet", resource=row.vm_uid)
        self._stored(row.vm_uid)
        self._set(self.workers, row.vm_uid, row, undo)

    def _put_operation(self, operation: Operation, undo: list[Undo]) -> None:
        existing = self.operations.get(operation.id)
        if existing is not None and existing.state in FINAL_STATES:
            raise Conflict("a final operation does not change", resource=operation.id)
        steps = existing.steps if existing is not None else []
        self._set(self.operations, operation.id, _replace(operation, steps=steps), undo)
        if is_side(operation):
            return
        if operation.state not in FINAL_STATES:
            self._set(self.active, operation.uid, operation.id, undo)
        elif self.active.get(operation.uid) == operation.id:
            self._drop(self.active, operation.uid, undo)

    def _put_step(self, change: PutStep, undo: list[Undo]) -> None:
        existing = self.operations.get(change.operation_id)
        if existing is None:
            raise NotFound("no such operation", resource=change.operation_id)
        steps = [*existing.steps[: change.index], change.step, *existing.steps[change.index + 1 :]]
        self._set(self.operations, existing.id, _replace(existing, steps=steps), undo)

    def _assign(self, new: Assignment, undo: list[Undo]) -> None:
        self._stored(new.uid)
        known = self.assignments.get(new.uid)
        if known is not None and new.generation < known.generation:
            raise StaleGeneration(f"generation {new.generation} is not new", resource=new.uid)
        self._set(self.assignments, new.uid, new, undo)

    def _put_report(self, report: Report, undo: list[Undo]) -> None:
        self._drop(self.outbox, key_of(report), undo)
        self._set(self.outbox, key_of(report), report, undo)
        before = self.outbox_seq
        undo.append(lambda: setattr(self, "outbox_seq", before))
        self.outbox_seq = max(before, report.seq)

    def _see(self, sighting: Sighting, undo: list[Undo]) -> None:
        if sighting.state:
            self._set(self.sightings, sighting.key, sighting, undo)
        else:
            self._drop(self.sightings, sighting.key, undo)

    def _put_events(self, change: PutEvents, undo: list[Undo]) -> None:
        refuse_gap(self.event_seq, change)
        for event in change.events:
            self._set(self.events, event.seq, event, undo)
        before = self.event_seq
        undo.append(lambda: setattr(self, "event_seq", before))
        self.event_seq += len(change.events)
        if len(self.events) > change.kept_max:
            for seq in list(self.events)[: len(self.events) - change.kept_max]:
                self._drop(self.events, seq, undo)

    def _prune(self, change: Prune, undo: list[Undo]) -> None:
        final = [o.id for o in self.operations.values() if o.state in FINAL_STATES]
        for operation_id in final[: max(0, len(final) - change.operations_max)]:
            self._drop(self.operations, operation_id, undo)
        for key in list(self.requests)[: max(0, len(self.requests) - change.requests_max)]:
            self._drop(self.requests, key, undo)
        gone = [uid for uid in self.tombstones if uid in self.histories]
        for uid in gone[: max(0, len(gone) - change.histories_max)]:
            self._drop(self.histories, uid, undo)
        for uid in list(self.tombstones)[: max(0, len(self.tombstones) - TOMBSTONES_MAX)]:
            self._drop(self.tombstones, uid, undo)

    def _stored(self, uid: str) -> StoredObject:
        stored = self.objects.get(uid)
        if stored is None:
            raise NotFound("no such object", resource=uid)
        return stored

    def _generation(self, uid: str) -> int:
        stored = self.objects.get(uid)
        return stored.resource.metadata.generation if stored is not None else 0

    def _raise_revision(self, revision: int, undo: list[Undo]) -> None:
        before = self.revision
        self.revision = max(before, revision)
        undo.append(lambda: setattr(self, "revision", before))

    @staticmethod
    def _set(table: dict[Any, Any], key: Any, value: Any, undo: list[Undo]) -> None:
        if key in table:
            before = table[key]
            undo.append(lambda: table.__setitem__(key, before))
        else:
            undo.append(lambda: table.__delitem__(key))
        table[key] = value

    @staticmethod
    def _drop(table: dict[Any, Any], key: Any, undo: list[Undo]) -> None:
        if key in table:
            before = table.pop(key)
            undo.append(lambda: table.__setitem__(key, before))


_replace = msgspec.structs.replace
