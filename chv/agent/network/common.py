"""What the reconcilers of Network, SecurityGroup and Exposure share: how they show and end.

Each is one thing that nwd makes, with a generation, a status of its own and perhaps somebody who
still needs it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import ClassVar, Protocol

import msgspec

from chv.agent.actors import Gone, Outcome, Waiting
from chv.agent.cascade import finish_delete
from chv.agent.conditions import condition, merge
from chv.agent.records import StoredObject
from chv.agent.references import holders
from chv.agent.simple import SimpleReconciler
from chv.common.errors import NotFound
from chv.common.failpoint import failpoint
from chv.common.wire.resources import (
    Condition,
    ExposureStatus,
    NetworkStatus,
    SecurityGroupStatus,
)
from chv.common.wire.types import CallMeta

HELD = Waiting(10.0)

NwdStatus = NetworkStatus | SecurityGroupStatus | ExposureStatus
EMPTY: dict[str, NwdStatus] = {
    "Network": NetworkStatus(),
    "SecurityGroup": SecurityGroupStatus(),
    "Exposure": ExposureStatus(),
}


class Seen(Protocol):
    """A thing as nwd lists it."""

    @property
    def generation(self) -> int:
        """Of the object whose uid it has."""

    @property
    def status(self) -> str:
        """`ready | degraded | absent`."""

    @property
    def message(self) -> str:
        """What is wrong with it."""


class NwdReconciler(SimpleReconciler):
    """Base of the three; `name` is what journal and failpoints call the kind."""

    name: ClassVar[str]

    async def drop(
        self, stored: StoredObject, generation: int, call: Callable[[CallMeta], Awaitable[object]]
    ) -> None:
        """Let nwd delete it; not there is what is wanted."""
        await self.effect(stored, "delete", lambda opid: self._drop(opid, generation, call))

    async def _drop(
        self, operation_id: str, generation: int, call: Callable[[CallMeta], Awaitable[object]]
    ) -> None:
        await failpoint(f"agent.{self.name}.delete.before")
        try:
            await call(self._context.meta(operation_id, generation))
        except NotFound:
            return
        await failpoint(f"agent.{self.name}.delete.after")

    async def held(self, stored: StoredObject, status: NwdStatus, nics: int) -> Outcome | None:
        """It is to go: wait while objects name it or NICs are in it; None: nobody needs it."""
        names = ", ".join(each.title for each in holders(self._context.ledger.tables, stored.key))
        if not names and nics:
            names = f"{nics} NICs"
        if not names:
            return None
        await self.wait(f"waits until {names} lets go of it")
        await self.show(stored, status, condition("Ready", False, "Deleting", f"held by {names}"))
        return HELD

    async def finish(self) -> Outcome:
        """Nothing of it is left in nwd."""
        await finish_delete(self._context, self._uid)
        return Gone()

    async def show_error(self, stored: StoredObject, ready: Condition, *, permanent: bool) -> None:
        """Publish a status that shows the error."""
        before = status_of(stored)
        phase = "Failed" if permanent else before.phase
        await self.show(stored, msgspec.structs.replace(before, phase=phase), ready)

    async def show(self, stored: StoredObject, status: NwdStatus, ready: Condition) -> None:
        """Publish what is seen, with the condition merged into those that were."""
        generation = stored.resource.metadata.generation
        earlier = status_of(stored).conditions
        conditions = merge(earlier, [ready], generation, self._context.now())
        shown = msgspec.structs.replace(
            status, observed_generation=generation, conditions=conditions
        )
        await self._context.publish(stored, shown)


def status_of(stored: StoredObject) -> NwdStatus:
    """Return what is shown of an object, an empty status where nothing was yet."""
    status = stored.resource.status
    assert status is None or isinstance(status, NwdStatus)
    return status if status is not None else EMPTY[stored.resource.kind]


def phase_of_seen(stored: StoredObject, seen: Seen | None) -> str:
    """Return the one word for what nwd has."""
    if stored.deleting:
        return "Deleting"
    if seen is None or seen.status == "absent":
        return "Pending"
    return "Ready" if seen.status == "ready" else "Degraded"
