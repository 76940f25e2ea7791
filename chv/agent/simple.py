"""What the reconcilers of Volume, Network and Image have in common: journal, errors, the end.

Their plans are a few lines each, so a step is a name and an awaitable effect. A VM has a planner
and an applier of its own.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio
from anyio.abc import TaskGroup

from chv.agent.actors import Outcome
from chv.agent.condition_table import silent_reason
from chv.agent.conditions import condition
from chv.agent.context import Context
from chv.agent.records import StoredObject
from chv.common.errors import (
    ChvError,
    DeadlineExceeded,
    OutcomeUnknown,
    Unavailable,
    condition_reason,
)
from chv.common.wire.agent import OperationState
from chv.common.wire.resources import Condition

OPERATION_S = 900.0
SILENT = (Unavailable, DeadlineExceeded, OutcomeUnknown)  # what a daemon that is away fails with


class SimpleReconciler:
    """Base of the small reconcilers: no monitor, nothing that runs beside the worker."""

    def __init__(self, context: Context, uid: str) -> None:
        self._context = context
        self._uid = uid
        self._serving = ""  # the operation that the pass works for; a newer one is not its to end
        self._since: tuple[str, float] = ("", 0.0)
        self._seen_before: float | None = None  # the look of an earlier pass

    @property
    def monitored(self) -> bool:
        """There is nothing to glance at."""
        return False

    async def glance(self) -> bool:
        """Never called."""
        return False

    def serve(self, group: TaskGroup) -> None:
        """Nothing runs beside the worker."""

    async def reconcile(self, stored: StoredObject) -> Outcome:
        """Make one pass."""
        self._serving = self._context.operations.current_id(self._uid)
        self._seen_before = self._context.seen_at.get(self._uid)
        return await self.look_and_act(stored)

    def _has_looked(self) -> bool:
        """Tell whether this pass has seen what there is of the object."""
        return self._context.seen_at.get(self._uid) != self._seen_before

    async def look_and_act(self, stored: StoredObject) -> Outcome:
        """Make one pass; what is particular to the kind."""
        raise NotImplementedError

    async def show_error(self, stored: StoredObject, ready: Condition, *, permanent: bool) -> None:
        """Publish a status that shows the error."""
        raise NotImplementedError

    async def effect(
        self, stored: StoredObject, name: str, act: Callable[[str], Awaitable[None]]
    ) -> None:
        """Journal a step and do it; `act` gets the operation's id."""
        before = self._context.operations.current_id(self._uid)
        operation = await self._context.operations.require(stored)
        if not self._serving and operation.id != before:
            self._serving = operation.id  # begun by this pass
        await self.step(operation.id, name, act)

    async def step(
        self, operation_id: str, name: str, act: Callable[[str], Awaitable[None]]
    ) -> None:
        """Journal a step of one operation and do it."""
        operations = self._context.operations
        await operations.begin_step(operation_id, name)
        failure: ChvError | None = None
        try:
            await act(operation_id)
        except ChvError as error:
            failure = error
        except TimeoutError:
            failure = OutcomeUnknown("a step took too long")
        if failure is not None:
            await operations.fail_step(operation_id, failure)
            raise failure

    async def settle(self, message: str) -> None:
        """Everything is as wanted: say so on the operation."""
        await self._context.operations.end(self._serving, OperationState.SUCCEEDED, message)

    async def wait(self, message: str) -> None:
        """Show what is waited for."""
        await self._context.operations.note(self._uid, message)
        await self._expire()

    async def progress(self, message: str) -> None:
        """Show how far something is that may take hours."""
        self._since = ("", 0.0)
        await self._context.operations.note(self._uid, message)

    async def failed(self, stored: StoredObject, error: ChvError, *, permanent: bool) -> None:
        """Show the error; a final one ends the operation."""
        silent = silent_reason(stored.resource.kind)
        if silent and isinstance(error, SILENT) and not self._has_looked():
            ready = condition("Ready", None, silent, str(error))
        else:
            ready = condition("Ready", False, condition_reason(error.code), str(error))
        current = self._context.stored(self._uid)
        if current is not None:
            await self.show_error(current, ready, permanent=permanent)
        operations = self._context.operations
        if permanent:
            await operations.end(self._serving, OperationState.FAILED, str(error), error.data())
        else:
            await operations.note(self._uid, f"tries again: {error}")
            await self._expire()

    async def _expire(self) -> None:
        operation = self._context.operations.current(self._uid)
        now = anyio.current_time()
        if operation is None:
            return
        if operation.id != self._since[0]:
            self._since = (operation.id, now)
        elif now - self._since[1] > OPERATION_S:
            error = DeadlineExceeded(f"no success within {OPERATION_S:.0f} s: {operation.message}")
            await self._context.operations.end(
                operation.id, OperationState.FAILED, error.message, error.data()
            )
