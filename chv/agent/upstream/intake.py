"""What the control plane wants, taken into the store: newer generations alone, and only while it
is seen.

An older generation is STALE_GENERATION, an equal one changes nothing, a newer one goes through
all checks of an apply. What is refused changes nothing and is reported; it is tried again while
it stays wanted. A deletion counts when it is said: an object that is no longer listed is kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from chv.agent.actors import Workers
from chv.agent.admission import Admitted, admit
from chv.agent.admission_rules import check_delete
from chv.agent.apply_verbs import check_verbs
from chv.agent.cascade import marked_deleting
from chv.agent.context import Context
from chv.agent.mutations import Mutations
from chv.agent.records import Change, PutObject, StoredObject
from chv.agent.tables import Tables
from chv.agent.upstream.link import Link
from chv.agent.upstream.outbox import spec_of
from chv.agent.upstream.records import Assignment, PutAssignment, PutReport
from chv.common.errors import (
    Conflict,
    InvalidArgument,
    OwnershipConflict,
    StaleGeneration,
    Unavailable,
)
from chv.common.wire.manifest import parse
from chv.common.wire.resources import Resource
from chv.common.wire.upstream import Report, ReportKind, Wanted

_replace = msgspec.structs.replace


@dataclass(frozen=True, slots=True)
class Parts:
    """What the intake works with."""

    context: Context
    workers: Workers
    mutations: Mutations
    link: Link


class Intake:
    """See the module."""

    def __init__(self, parts: Parts) -> None:
        self._context = parts.context
        self._workers = parts.workers
        self._mutations = parts.mutations
        self._link = parts.link

    async def take(self, session: int, wanted: Wanted) -> None:
        """Store what is wanted, or raise ChvError having changed nothing."""
        resource = _named_as_wanted(wanted)
        if wanted.deleting:
            await self._let_go(session, wanted)
            return
        if self._is_known(wanted):
            return
        await self._mutations.check([resource])
        async with self._context.ledger.writing() as tables:
            self._require_session(session)
            if self._is_known(wanted):
                return
            _refuse_foreign(tables, resource)
            check_verbs(self._context.world.gate, tables, [resource])
            admitted = self._admitted(resource, wanted)
            if tables.objects.get(resource.metadata.uid) is None:
                await self._mutations.refuse_when_short()
            stored = next(iter(admitted.stored), None) or tables.objects[wanted.uid]
            assignment = self._assignment(tables, stored, wanted)
            changes = (*admitted.changes, PutAssignment(assignment=assignment))
            await self._context.ledger.commit_held(*changes)
        self._mutations.begin(admitted)

    def _is_known(self, wanted: Wanted) -> bool:
        """Tell whether this very generation was taken; refuse an older one."""
        tables = self._context.ledger.tables
        known = tables.assignments.get(wanted.uid)
        if known is None:
            return False
        if wanted.generation < known.generation:
            raise StaleGeneration(
                f"generation {wanted.generation} is older than {known.generation}",
                resource=wanted.uid,
            )
        return wanted.generation == known.generation

    def _require_session(self, session: int) -> None:
        """Take nothing that was said before the connection was lost, nor while cut off."""
        if session != self._link.session or not self._link.connected:
            raise Unavailable("the control plane is not seen: nothing new is taken")

    def _admitted(self, resource: Resource, wanted: Wanted) -> Admitted:
        metadata = _replace(resource.metadata, uid="", resource_version="")
        plain = _replace(resource, metadata=metadata)
        key = (plain.kind, metadata.namespace, metadata.name)
        who, why = wanted.requester, wanted.reason
        return admit(self._context, [plain], who, why, uids={key: wanted.uid})

    @staticmethod
    def _assignment(tables: Tables, stored: StoredObject, wanted: Wanted) -> Assignment:
        before = tables.assignments.get(wanted.uid)
        current = tables.objects.get(wanted.uid)
        observed = before.observed if before is not None else 0
        status = current.resource.status if current is not None else None
        seen = status.observed_generation if status is not None else 0
        if before is not None and seen >= before.taken_as:
            observed = before.generation
        return Assignment(
            uid=wanted.uid,
            generation=wanted.generation,
            taken_as=stored.resource.metadata.generation,
            spec=spec_of(stored),
            observed=observed,
        )

    # --- deletions

    async def _let_go(self, session: int, wanted: Wanted) -> None:
        """Mark for deletion; what is not here is reported as gone."""
        marked: StoredObject | None = None
        async with self._context.ledger.writing() as tables:
            self._require_session(session)
            stored = tables.objects.get(wanted.uid)
            if stored is None:
                await self._context.ledger.commit_held(_gone(wanted))
                return
            if self._is_known(wanted) and stored.deleting:
                return
            marked = await self._mark(tables, stored, wanted)
        self._workers.ensure(marked)
        self._context.wake_referrers(marked)

    async def _mark(self, tables: Tables, stored: StoredObject, wanted: Wanted) -> StoredObject:
        known = tables.assignments.get(stored.uid)
        if known is None:
            raise OwnershipConflict("it is the node's own", resource=stored.title)
        self._context.world.gate.check("delete", desired=stored.deleting)
        check_delete(tables, stored)
        changes: list[Change] = [
            PutAssignment(assignment=_replace(known, generation=wanted.generation))
        ]
        marked = stored
        if not stored.deleting:
            marked = marked_deleting(
                stored, self._context.now(), self._context.ledger.next_revision()
            )
            if marked.facts is not None:
                words = f"deleted by {wanted.requester}"
                marked = _replace(marked, facts=_replace(marked.facts, stop_reason=words))
            operation = self._context.operations.new(
                "delete", marked, wanted.requester, wanted.reason
            )
            changes += [
                PutObject(object=marked),
                *self._context.operations.superseding(operation),
            ]
        await self._context.ledger.commit_held(*changes)
        return marked


def _gone(wanted: Wanted) -> PutReport:
    report = Report(kind=ReportKind.GONE, uid=wanted.uid, generation=wanted.generation)
    return PutReport(report=report)


def _named_as_wanted(wanted: Wanted) -> Resource:
    """Return the object, checked by itself; its uid is the one it came under."""
    resource = parse(wanted.object)
    metadata = resource.metadata
    if metadata.uid not in ("", wanted.uid):
        raise InvalidArgument(
            f"it came as {wanted.uid} and says {metadata.uid}", field="metadata.uid"
        )
    return _replace(resource, metadata=_replace(metadata, uid=wanted.uid))


def _refuse_foreign(tables: Tables, resource: Resource) -> None:
    """Refuse what is the node's own, a name that another object has, and another name for a uid."""
    metadata = resource.metadata
    key = (resource.kind, metadata.namespace, metadata.name)
    there, same = tables.find(*key), tables.objects.get(metadata.uid)
    if there is not None and there.uid != metadata.uid:
        raise OwnershipConflict(
            f"the name belongs to {there.uid} on this node", resource=there.title
        )
    if same is not None and same.uid not in tables.assignments:
        raise OwnershipConflict("it is the node's own", resource=same.title)
    if same is not None and same.key != key:
        raise Conflict(f"{same.uid} has this name for good", resource=same.title)
