"""The desired-state history: how it is read, and the way back.

A rollback is an apply like any other, as a new generation through all checks. How a generation
gets into the history is in `chv.agent.generation_rows`. Fails with NotFound where a generation
is not known, and as an apply does.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from chv.agent import idempotency
from chv.agent.context import Context
from chv.agent.generations import Generation, GenerationRow
from chv.common.errors import FailedPrecondition, NotFound
from chv.common.wire import agent as api
from chv.common.wire import agent_history as wire
from chv.common.wire.resources import RunStrategy
from chv.common.wire.types import API_VERSION

REASON_MAX = 256

Applier = Callable[[api.Apply, str], Awaitable[api.ApplyReply]]


class History:
    """Reads of the history, and the rollback. `apply`: through all checks."""

    def __init__(self, context: Context, apply: Applier) -> None:
        self._context = context
        self._apply = apply

    async def rows(self, request: wire.ListGenerations) -> wire.GenerationsReply:
        """Who made each generation that is known, newest first; also of what is gone."""
        store = self._context.ledger.store
        uid, others = await self._uid(request.kind, request.namespace, request.name, request.uid)
        rows = await store.history(uid)
        if not rows:
            title = f"{request.kind} {request.namespace}/{request.name}"
            raise NotFound(f"there is no history of {uid}", resource=title)
        return wire.GenerationsReply(
            uid=uid,
            deleted=self._context.stored(uid) is None,
            generations=[_info(row) for row in rows],
            others=others,
        )

    async def get(self, request: wire.GetGeneration) -> wire.GenerationReply:
        """One generation as a manifest; 0 is the current one."""
        uid, _ = await self._uid(request.kind, request.namespace, request.name, request.uid)
        found = await self._generation(uid, request.generation)
        manifest = msgspec.Raw(msgspec.json.encode(_manifest(found)))
        return wire.GenerationReply(generation=_info(found.row), object=manifest)

    async def newest(self, uid: str) -> wire.GenerationInfo | None:
        """Return who made the newest generation of an object."""
        rows = await self._context.ledger.store.history(uid)
        return _info(rows[0]) if rows else None

    async def manifest(self, request: wire.Rollback) -> msgspec.Raw:
        """Return what a rollback applies: spec and labels of then, all else as it is."""
        key = (request.kind, request.namespace, request.name)
        stored = self._context.ledger.tables.find(*key)
        if stored is None:
            raise NotFound(
                f"there is no {request.kind} {request.name!r} in namespace {request.namespace}",
                hint="of what was deleted, `chv history KIND/NAME@N -o yaml` shows what to apply",
            )
        if stored.deleting:
            raise FailedPrecondition("it is being deleted", resource=stored.title)
        document = _manifest(await self._generation(stored.uid, request.to))
        now = msgspec.to_builtins(stored.resource.metadata)
        kept = ("uid", "resourceVersion", "annotations", "finalizers", "ownerReferences")
        document["metadata"] |= {name: now[name] for name in kept if name in now}
        return msgspec.Raw(msgspec.json.encode(document))

    async def rollback(self, request: wire.Rollback) -> api.ApplyReply:
        """Apply an earlier generation again, as a new one."""
        digest = idempotency.digest_of("rollback", request)
        key, store = request.idempotency_key, self._context.ledger
        known = await idempotency.recorded(store, "" if request.dry_run else key, digest)
        if known is not None:
            return msgspec.json.decode(known.reply, type=api.ApplyReply)
        words = f"rollback to generation {request.to}"
        if request.reason:
            words += f": {request.reason}"
        return await self._apply(
            api.Apply(
                objects=[await self.manifest(request)],
                requester=request.requester,
                reason=words[:REASON_MAX],
                dry_run=request.dry_run,
                idempotency_key=key,
            ),
            digest,
        )

    async def _uid(self, kind: str, namespace: str, name: str, uid: str) -> tuple[str, list[str]]:
        """Return whose history is meant, and the others of that name: the live one is first."""
        known = await self._context.ledger.store.histories(kind, namespace, name)
        live = self._context.ledger.tables.find(kind, namespace, name)
        if live is not None:
            known = [live.uid, *(each for each in known if each != live.uid)]
        chosen = uid or (known[0] if known else "")
        if chosen not in known:
            what = f"with uid {uid}" if uid else f"{name!r}"
            raise NotFound(f"there is and was no {kind} {what} in namespace {namespace}")
        return chosen, [each for each in known if each != chosen]

    async def _generation(self, uid: str, generation: int) -> Generation:
        store = self._context.ledger.store
        rows = await store.history(uid)
        number = generation or (rows[0].generation if rows else 0)
        found = await store.generation(uid, number)
        if found is None:
            first, last = (rows[-1].generation, rows[0].generation) if rows else (0, 0)
            raise NotFound(
                f"generation {number} of {uid} is not known",
                field="generation",
                hint=f"known: {first} to {last}",
            )
        return found


def _info(row: GenerationRow) -> wire.GenerationInfo:
    return wire.GenerationInfo(
        generation=row.generation,
        at=row.at,
        requester=row.requester,
        reason=row.reason,
        verb=row.verb,
        operation_id=row.operation_id,
        changed=list(row.changed),
    )


def _manifest(found: Generation) -> dict[str, Any]:
    """Return a generation as an object to apply. What is left out of a spec is its default."""
    spec: dict[str, Any] = msgspec.json.decode(found.spec)
    if found.row.kind == "VirtualMachine":
        # Where a file says nothing of it, a VM that was stopped stays so.
        spec = {"runStrategy": RunStrategy.RERUN_ON_FAILURE.value, **spec}
    metadata: dict[str, Any] = {"name": found.row.name, "namespace": found.row.namespace}
    if found.labels:
        metadata["labels"] = found.labels
    return {
        "apiVersion": API_VERSION,
        "kind": found.row.kind,
        "metadata": metadata,
        "spec": spec,
    }
