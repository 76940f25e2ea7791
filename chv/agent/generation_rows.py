"""The row that each new generation leaves in the history. Pure.

`with_history` adds to a transaction the row of each generation that it makes: whoever changes an
object through the ledger is recorded, and cannot forget it.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from chv.agent.generations import Generation, GenerationRow, PutGeneration
from chv.agent.records import FINAL_STATES, Change, PutObject, PutOperation, StoredObject
from chv.agent.tables import Tables
from chv.common.wire.agent import Operation

SYSTEM = "system"  # the node itself


def with_history(tables: Tables, changes: Sequence[Change], moment: str) -> tuple[Change, ...]:
    """Return the changes of a transaction with the generations that it makes."""
    found: list[Change] = []
    latest: dict[str, StoredObject] = {}
    for change in changes:
        if not isinstance(change, PutObject):
            continue
        now = change.object
        before = latest.get(now.uid) or tables.objects.get(now.uid)
        latest[now.uid] = now
        if before is None or _is_news(before, now):
            row = _row(before, now, change, _author(changes, now.uid), moment)
            found.append(PutGeneration(generation=_generation(row, now)))
    return (*changes, *found)


def _is_news(before: StoredObject, now: StoredObject) -> bool:
    old, new = before.resource.metadata, now.resource.metadata
    return old.generation != new.generation or old.labels != new.labels


def _author(changes: Sequence[Change], uid: str) -> Operation | None:
    """Return the operation that begins in this transaction; one that ends has made nothing."""
    for change in changes:
        if isinstance(change, PutOperation):
            operation = change.operation
            if operation.uid == uid and operation.state not in FINAL_STATES:
                return operation
    return None


def _row(
    before: StoredObject | None,
    now: StoredObject,
    change: PutObject,
    operation: Operation | None,
    moment: str,
) -> GenerationRow:
    kind, namespace, name = now.key
    row = GenerationRow(
        uid=now.uid,
        kind=kind,
        namespace=namespace,
        name=name,
        generation=now.resource.metadata.generation,
        at=moment,
        requester=SYSTEM,
        changed=changed_fields(before, now),
    )
    replace = msgspec.structs.replace
    if change.author is not None:
        author = change.author
        return replace(row, requester=author.requester, reason=author.reason, verb=author.verb)
    if operation is None:
        return row
    return replace(
        row,
        requester=operation.requester,
        reason=operation.reason,
        verb=operation.verb,
        operation_id=operation.id,
    )


def changed_fields(before: StoredObject | None, now: StoredObject) -> tuple[str, ...]:
    """Return the fields of the spec that differ, by their names in a manifest."""
    if before is None:
        return ()
    old, new = before.resource.spec, now.resource.spec
    names = zip(new.__struct_fields__, new.__struct_encode_fields__, strict=True)
    found = [shown for field, shown in names if getattr(old, field) != getattr(new, field)]
    if before.resource.metadata.labels != now.resource.metadata.labels:
        found.append("labels")
    return tuple(found)


def _generation(row: GenerationRow, stored: StoredObject) -> Generation:
    spec = msgspec.json.encode(stored.resource.spec).decode()
    return Generation(row=row, labels=dict(stored.resource.metadata.labels), spec=spec)
