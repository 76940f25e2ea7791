"""Operations: who asked for what, which steps were taken, how it ended.

At most one operation is under way per object; a newer one supersedes it. Each step is journalled
before its effect; its end is stored with the next change, so that a step costs one commit. Where
the node acts by itself (repair, restart after a crash), it does so under an operation of its own.
"""

from __future__ import annotations

import msgspec

from chv.agent.ledger import Ledger
from chv.agent.progress import ProgressBook
from chv.agent.records import FINAL_STATES, Change, PutOperation, PutStep, StoredObject
from chv.common.clock import Clock, timestamp
from chv.common.errors import ChvError, Conflict, ErrorData, FailedPrecondition
from chv.common.ids import Ids
from chv.common.wire.agent import Operation, OperationState, OperationStep

SYSTEM = "system"
STEPS_MAX = 200  # later steps of an endless repair overwrite the last row

_replace = msgspec.structs.replace


class Operations:
    """Begin, journal and end operations. Reads are on the ledger."""

    def __init__(self, ledger: Ledger, clock: Clock, ids: Ids) -> None:
        self._ledger = ledger
        self._clock = clock
        self._ids = ids
        self.progress = ProgressBook()

    def new(self, verb: str, stored: StoredObject, requester: str, reason: str = "") -> Operation:
        """Return a new operation on an object; the caller stores it."""
        metadata = stored.resource.metadata
        return Operation(
            id=self._ids.operation(),
            verb=verb,
            kind=stored.resource.kind,
            namespace=metadata.namespace,
            name=metadata.name,
            uid=metadata.uid,
            generation=metadata.generation,
            requester=requester,
            reason=reason,
            created_at=self.now(),
        )

    def superseding(self, operation: Operation) -> list[Change]:
        """Return the changes that put `operation` in the place of the one under way."""
        current = self.current(operation.uid)
        changes: list[Change] = []
        if current is not None:
            changes = self.ending(current, OperationState.SUPERSEDED, f"by {operation.id}")
        return [*changes, PutOperation(operation=operation)]

    def ending(
        self,
        operation: Operation,
        state: OperationState,
        message: str = "",
        error: ErrorData | None = None,
    ) -> list[Change]:
        """Return the changes that end an operation; one that failed always has an error."""
        succeeded = state is OperationState.SUCCEEDED
        if state is OperationState.FAILED and error is None:
            error = FailedPrecondition(message).data()
        ended = _replace(
            operation,
            state=state,
            message=message,
            error=error,
            ended_at=self.now(),
            progress=self.progress.last(operation.id, succeeded=succeeded),
        )
        outcome = "done" if succeeded else "failed"
        return [*self._step_end(operation, outcome, ""), PutOperation(operation=ended)]

    def ending_open(
        self,
        operation: Operation | None,
        state: OperationState,
        message: str = "",
        error: ErrorData | None = None,
    ) -> list[Change]:
        """Return the changes that end an operation, none where it has ended or is not known."""
        if operation is None or operation.state in FINAL_STATES:
            return []
        return self.ending(operation, state, message, error)

    def current(self, uid: str) -> Operation | None:
        """Return the operation under way that makes an object as wanted."""
        return self._ledger.tables.active_operation(uid)

    async def require(
        self, stored: StoredObject, verb: str = "reconcile", reason: str = ""
    ) -> Operation:
        """Return the operation under way, or begin one of the node's own."""
        async with self._ledger.writing():
            operation = self.current(stored.uid)
            if operation is None:
                operation = self.new(verb, stored, SYSTEM, reason)
                await self._ledger.commit_held(PutOperation(operation=operation))
            return operation

    async def begin_step(self, operation_id: str, name: str, *more: Change) -> None:
        """Journal a step before its effect, with `more` in the same transaction.

        Conflict where the operation was superseded meanwhile: plan again under the new one.
        """
        async with self._ledger.writing() as tables:
            operation = tables.operations.get(operation_id)
            if operation is None or operation.state in FINAL_STATES:
                raise Conflict("the operation was superseded", resource=operation_id)
            step = OperationStep(name=name, started_at=self.now())
            index = min(len(operation.steps), STEPS_MAX - 1)
            begun = self._begun(operation)
            heads = [] if begun is operation else [PutOperation(operation=begun)]
            await self._ledger.commit_held(
                *heads,
                *self._step_end(operation, "done", ""),
                PutStep(operation_id=operation.id, index=index, step=step),
                *more,
            )

    async def fail_step(self, operation_id: str, error: ChvError) -> None:
        """Journal that the last step failed, and show why on the operation."""
        async with self._ledger.writing() as tables:
            operation = tables.operations.get(operation_id)
            if operation is None:
                return
            changes = self._step_end(operation, "failed", str(error))
            if operation.state not in FINAL_STATES and operation.message != str(error):
                changes.append(PutOperation(operation=_replace(operation, message=str(error))))
            if changes:
                await self._ledger.commit_held(*changes)

    async def note(self, uid: str, message: str) -> None:
        """Show a message on the operation under way."""
        async with self._ledger.writing():
            operation = self.current(uid)
            if operation is not None and operation.message != message:
                noted = _replace(self._begun(operation), message=message)
                await self._ledger.commit_held(PutOperation(operation=noted))

    async def note_of(self, operation_id: str, message: str) -> None:
        """Show a message on one operation, unless it has ended."""
        async with self._ledger.writing() as tables:
            operation = tables.operations.get(operation_id)
            if operation is None or operation.state in FINAL_STATES:
                return
            if message and operation.message != message:
                noted = _replace(self._begun(operation), message=message)
                await self._ledger.commit_held(PutOperation(operation=noted))

    async def end(
        self,
        operation_id: str,
        state: OperationState,
        message: str = "",
        error: ErrorData | None = None,
    ) -> None:
        """End this operation, unless it has ended or was superseded."""
        async with self._ledger.writing() as tables:
            operation = tables.operations.get(operation_id)
            if operation is not None and operation.state not in FINAL_STATES:
                await self._ledger.commit_held(*self.ending(operation, state, message, error))

    def current_id(self, uid: str) -> str:
        """Return the id of the operation under way on an object, '' where there is none."""
        operation = self.current(uid)
        return operation.id if operation is not None else ""

    def now(self) -> str:
        """Return the stamp of this moment."""
        return timestamp(self._clock.now())

    def _begun(self, operation: Operation) -> Operation:
        if operation.state is not OperationState.PENDING:
            return operation
        return _replace(operation, state=OperationState.RUNNING, started_at=self.now())

    def _step_end(self, operation: Operation, outcome: str, message: str) -> list[Change]:
        if not operation.steps or operation.steps[-1].outcome != "running":
            return []
        step = _replace(operation.steps[-1], outcome=outcome, message=message, ended_at=self.now())
        return [PutStep(operation_id=operation.id, index=len(operation.steps) - 1, step=step)]
