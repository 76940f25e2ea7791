"""The agent's store in memory, for the simulation and for tests: outlives an engine, not us."""

from __future__ import annotations

import anyio.lowlevel
import msgspec

from chv.agent import events_memory as pages
from chv.agent.events_record import EventPage
from chv.agent.generations import Generation, GenerationRow
from chv.agent.operation_filter import EVERY, OperationFilter
from chv.agent.records import Change, RequestRow, Snapshot
from chv.agent.tables import Tables
from chv.common.wire.agent import Operation
from chv.common.wire.agent_events import WatchEvents


class MemoryStore:
    """An `AgentStore` whose transactions are applied to `Tables`."""

    def __init__(self) -> None:
        self.tables = Tables()

    async def load(self) -> Snapshot:
        """Return everything that is not history."""
        await anyio.lowlevel.checkpoint()
        return self.tables.snapshot()

    async def commit(self, changes: tuple[Change, ...]) -> None:
        """Apply all changes, or raise and apply none."""
        await anyio.lowlevel.checkpoint()
        self.tables.apply(changes)

    async def operation(self, operation_id: str) -> Operation | None:
        """Return one operation with its steps."""
        return self.tables.operations.get(operation_id)

    async def operations(
        self,
        *,
        kind: str = "",
        namespace: str = "",
        name: str = "",
        limit: int,
        others: OperationFilter = EVERY,
    ) -> list[Operation]:
        """Return operations without steps, newest first."""
        wanted = (kind, namespace, name)
        found = [
            msgspec.structs.replace(operation, steps=[])
            for operation in reversed(self.tables.operations.values())
            if all(not w or w == h for w, h in zip(wanted, _target(operation), strict=True))
            and others.takes(operation)
        ]
        return found[:limit]

    async def request(self, key: str) -> RequestRow | None:
        """Return what was recorded for an Idempotency-Key."""
        return self.tables.requests.get(key)

    async def histories(self, kind: str, namespace: str, name: str) -> list[str]:
        """Return the uids that have had this name and have a history, newest first."""
        rows = ((uid, history[-1].row) for uid, history in self.tables.histories.items())
        key = (kind, namespace, name)
        return [uid for uid, row in rows if (row.kind, row.namespace, row.name) == key][::-1]

    async def history(self, uid: str) -> list[GenerationRow]:
        """Return what is known of an object's generations, newest first."""
        return [each.row for each in reversed(self.tables.histories.get(uid, ()))]

    async def generation(self, uid: str, generation: int) -> Generation | None:
        """Return one generation whole."""
        known = self.tables.histories.get(uid, ())
        return next((each for each in known if each.row.generation == generation), None)

    async def events(self, after_seq: int, wanted: WatchEvents, limit: int) -> EventPage:
        """Return the first wanted events after a number."""
        return pages.page(self.tables, after_seq, wanted, limit)

    async def last_events(self, wanted: WatchEvents, limit: int) -> EventPage:
        """Return the newest wanted events, in order."""
        return pages.newest(self.tables, wanted, limit)

    async def shortage(self) -> str:
        """Never: memory has no reserve."""
        return ""


def _target(operation: Operation) -> tuple[str, str, str]:
    return (operation.kind, operation.namespace, operation.name)
