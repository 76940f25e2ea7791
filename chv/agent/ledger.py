"""The engine's memory of the store, and the only way to change either.

Memory is a cache of the store: it follows a commit and never leads it. After a commit that
failed, perhaps only in its reply, memory is read again before the next change. Whoever checks
and then stores holds `writing` for both. Fails as the store does.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import anyio

from chv.agent.events_derive import with_events
from chv.agent.events_log import log_events
from chv.agent.events_record import PutEvents
from chv.agent.generation_rows import with_history
from chv.agent.records import (
    FINAL_STATES,
    AgentStore,
    Change,
    Prune,
    PutFacts,
    PutObject,
    PutOperation,
    PutStatus,
    PutStep,
    RemoveObject,
)
from chv.agent.tables import Tables
from chv.agent.watch import Watch
from chv.common.wire.agent import Operation

OPERATIONS_MAX = 2000
REQUESTS_MAX = 1000
CACHED_FINAL_MAX = 200
PRUNE_EVERY = 200
EVENTS = "events"


class Ledger:
    """Tables in memory over an `AgentStore`. `objects` and `operations` tell of changes.

    `now`: the stamp of a generation in the history, which goes to the store alone. `derive`: adds
    to a transaction what follows from it: the reports to a control plane.
    """

    def __init__(self, store: AgentStore, now: Callable[[], str]) -> None:
        self.store = store
        self.now = now
        self.tables = Tables()
        self.objects = Watch()
        self.operations = Watch()
        self.events = Watch()  # one key: EVENTS
        self.derive: Callable[[Tables, tuple[Change, ...]], tuple[Change, ...]] = (
            lambda tables, changes: changes
        )
        self.on_reload: Callable[[], None] = lambda: None
        self.on_commit: Callable[[Tables, tuple[Change, ...]], None] = lambda tables, changes: None
        self._lock = anyio.Lock(fast_acquire=True)
        self._doubtful = True
        self._commits = 0

    async def load(self) -> None:
        """Read the store."""
        async with self.writing():
            pass

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[Tables]:
        """Hold off every other change; memory is exact within."""
        async with self._lock:
            if self._doubtful:
                await self._reload()
            yield self.tables

    async def commit(self, *changes: Change) -> None:
        """Store the changes in one transaction."""
        async with self.writing():
            await self.commit_held(*changes)

    async def commit_held(self, *changes: Change) -> None:
        """Store the changes; the caller holds `writing`."""
        self._commits += 1
        if self._commits % PRUNE_EVERY == 0:
            changes = (*changes, Prune(operations_max=OPERATIONS_MAX, requests_max=REQUESTS_MAX))
        changes = self.derive(self.tables, changes)
        changes = with_events(self.tables, changes, self.now())
        self._doubtful = True
        with anyio.CancelScope(shield=True):
            await self.store.commit(with_history(self.tables, changes, self.now()))
        self.tables.apply(changes)
        self._doubtful = False
        self.on_commit(self.tables, changes)
        self._trim()
        self._tell(changes)

    async def operation(self, operation_id: str) -> Operation | None:
        """Return an operation from memory, else from the store."""
        known = self.tables.operations.get(operation_id)
        return known if known is not None else await self.store.operation(operation_id)

    def next_revision(self, ahead: int = 1) -> int:
        """Return the revision that the `ahead`-th object of the next commit gets."""
        return self.tables.revision + ahead

    async def _reload(self) -> None:
        self.tables = Tables(await self.store.load())
        self._doubtful = False
        # What changed is not known: wake all who wait, they look for themselves.
        self.objects.notify_all()
        self.operations.notify_all()
        self.events.notify_all()
        self.on_reload()

    def _trim(self) -> None:
        """Forget in memory what the store keeps longer, and looks up itself."""
        self.tables.tombstones.clear()
        self.tables.requests.clear()
        self.tables.events.clear()
        operations = self.tables.operations
        if len(operations) <= CACHED_FINAL_MAX * 2 + len(self.tables.active):
            return
        final = [key for key, operation in operations.items() if operation.state in FINAL_STATES]
        for key in final[:-CACHED_FINAL_MAX]:
            del operations[key]

    def _tell(self, changes: tuple[Change, ...]) -> None:
        for change in changes:
            match change:
                case PutObject(object=stored):
                    self.objects.notify(stored.uid)
                case PutStatus(uid=uid) | PutFacts(uid=uid):
                    self.objects.notify(uid)
                case RemoveObject(tombstone=tombstone):
                    self.objects.notify(tombstone.uid)
                case PutOperation(operation=operation):
                    self.operations.notify(operation.id)
                case PutStep(operation_id=operation_id):
                    self.operations.notify(operation_id)
                case PutEvents(events=events):
                    self.events.notify(EVENTS)
                    log_events(events)
                case _:
                    pass
