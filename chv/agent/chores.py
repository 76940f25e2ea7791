"""Operations that no object's reconciler carries out: imports, keys, leaks, restarts of daemons.

Each is recorded before its effect and done by a task of the engine, so that it goes on where its
caller leaves. An agent that finds one under way, left by one that was killed, does it `again`: its
way looks first at what is there. So each ends once, and with what is true. Fails with Conflict
where something else is under way on the same target.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import anyio
import msgspec
from anyio.abc import TaskGroup

from chv.agent import idempotency
from chv.agent.context import Context
from chv.agent.records import FINAL_STATES, Change, PutOperation
from chv.agent.side_verbs import CHORE_VERBS
from chv.common import logs
from chv.common.errors import (
    Cancelled,
    ChvError,
    Conflict,
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    NotFound,
    OutcomeUnknown,
    Unavailable,
    from_data,
)
from chv.common.failpoint import failpoint
from chv.common.wire.agent import Operation, OperationReply, OperationState
from chv.common.wire.agent_operations import QueuePlace

log = logs.get(__name__)

AGAIN_S_MAX = 90.0  # for daemons to come back, after the agent was killed in the middle
RETRY_S = 0.5
LOOK_S = 0.5  # how often a caller is told how far it is
FAILPOINTS = tuple(
    f"agent.chore.{name}.{moment}" for name in ("do", "end") for moment in ("before", "after")
)

_replace = msgspec.structs.replace
Tell = Callable[[Operation], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Came:
    """What came of it: in words, and for programs."""

    message: str
    result: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Task:
    """One run. `again`: it may have been begun or done before. `hand`: what is not recorded."""

    operation: Operation
    again: bool
    hand: Any = None


@dataclass(frozen=True, slots=True)
class Way:
    """How a verb is done. `slots`: so many at a time, 0: any number; `noun`: what they wait for.

    `undo` is called where it was not done, with the operation: to take away what it has left.
    """

    do: Callable[[Task], Awaitable[Came]]
    slots: int = 0
    noun: str = ""
    undo: Callable[[Operation], Awaitable[None]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """Somebody asks for a verb on a target. `request` tells it from another of that verb there."""

    verb: str
    kind: str
    name: str
    namespace: str = ""
    requester: str
    reason: str = ""
    idempotency_key: str = ""
    request: dict[str, str | int | bool | None] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """What tells it from another request, whoever asks and why."""
        asked = msgspec.json.encode(self.request, order="sorted")
        return idempotency.digest(self.verb, self.kind, self.namespace, self.name, asked)


class Chores:
    """See the module. One per engine; `teach` every verb before `run`."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._ways: dict[str, Way] = {}
        self._hands: dict[str, Any] = {}
        self._started: set[str] = set()  # by this agent, until they have ended
        self._scopes: dict[str, anyio.CancelScope] = {}
        self._lines: dict[str, list[str]] = {}  # by verb: who has a slot, then who waits
        self._moved = anyio.Event()
        self._group: TaskGroup | None = None

    def teach(self, verb: str, way: Way) -> None:
        """Say how a verb is done."""
        assert verb in CHORE_VERBS, f"{verb} would be taken for an object's own"
        self._ways[verb] = way

    async def run(self) -> None:
        """Do what was left under way, then what is asked for, until cancelled."""
        async with anyio.create_task_group() as group:
            self._group = group
            self.follow()
            await anyio.sleep_forever()

    def follow(self) -> None:
        """Memory was read: do what is recorded by now, also what was stored without a reply."""
        recorded = self._context.ledger.tables.operations
        for operation in list(recorded.values()):
            if operation.verb in CHORE_VERBS and operation.state not in FINAL_STATES:
                self._start(operation.id)
                if operation.cancelled_by:
                    self.cancel(operation.id)
        for operation_id in self._hands.keys() - recorded.keys():
            del self._hands[operation_id]

    def _start(self, operation_id: str) -> None:
        """Have it done by a task, unless one is at it. Without a hand it is another agent's."""
        if self._group is None or operation_id in self._started:
            return
        self._started.add(operation_id)
        self._group.start_soon(self._run, operation_id, operation_id not in self._hands)

    async def begin(
        self, wish: Wish, *, check: Callable[[], None] = lambda: None, hand: Any = None
    ) -> tuple[Operation, bool]:
        """Record it and have it done; True: it was asked for before, and this is that one.

        `check` raises where it may not be begun; what is refused leaves no operation.
        """
        ledger = self._context.ledger
        async with ledger.writing():
            known = await idempotency.recorded(ledger, wish.idempotency_key, wish.digest)
            if known is not None:
                return await self._known(known.reply), True
            joined = self._under_way(wish)
            if joined is None:
                check()
            operation = joined or self._new(wish)
            reply = OperationReply(operation=operation)
            changes: list[Change] = [PutOperation(operation=operation)] if joined is None else []
            changes += idempotency.remembered(wish.idempotency_key, wish.digest, reply)
            if joined is None:
                self._hands[operation.id] = hand
            if changes:
                await ledger.commit_held(*changes)
        self._start(operation.id)
        return operation, joined is not None

    async def knows(self, wish: Wish) -> bool:
        """Tell whether this was asked for before and is remembered, or under way."""
        ledger = self._context.ledger
        if await idempotency.recorded(ledger, wish.idempotency_key, wish.digest) is not None:
            return True
        return self._under_way(wish) is not None

    async def outcome(self, operation_id: str, tell: Tell | None = None) -> Operation:
        """Return the operation once it has succeeded; raises what it failed with.

        One that has failed before it was asked for has failed for good: FailedPrecondition, where
        its error would say that the same call may work later.
        """
        known = await self._context.ledger.operation(operation_id)
        operation = await self._final(operation_id, tell)
        if operation.state is OperationState.SUCCEEDED:
            return operation
        replayed = known is not None and known.state in FINAL_STATES
        if replayed and operation.error is not None and operation.error.retriable:
            raise FailedPrecondition(
                f"it has failed: {operation.error.message}",
                resource=operation.id,
                hint="ask once more, under a new key",
            )
        if operation.error is not None:
            raise from_data(operation.error)
        raise Internal(f"{operation.id} is {operation.state.lower()}: {operation.message}")

    def cancel(self, operation_id: str) -> None:
        """End one whose `cancelled_by` is recorded. It has ended: no effect."""
        scope = self._scopes.get(operation_id)
        if scope is not None:
            scope.cancel()

    def place(self, operation: Operation) -> QueuePlace | None:
        """Return where one waits for its turn."""
        way, line = self._ways.get(operation.verb), self._lines.get(operation.verb, [])
        if way is None or operation.id not in line:
            return None
        position = line.index(operation.id) - way.slots + 1
        return QueuePlace(position=position, waits_for=way.noun) if position > 0 else None

    # --- begin

    def _new(self, wish: Wish) -> Operation:
        operation_id = self._context.world.ids.operation()
        return Operation(
            id=operation_id,
            verb=wish.verb,
            kind=wish.kind,
            namespace=wish.namespace,
            name=wish.name,
            uid=operation_id,  # of no object
            generation=0,
            requester=wish.requester,
            reason=wish.reason,
            created_at=self._context.now(),
            request=wish.request,
        )

    async def _known(self, reply: bytes) -> Operation:
        first = msgspec.json.decode(reply, type=OperationReply).operation
        operation = await self._context.ledger.operation(first.id)
        if operation is None:
            raise OutcomeUnknown(
                "it was asked for before, and its operation is forgotten by now",
                resource=first.id,
                hint="look, then ask under a new key",
            )
        return operation

    def _under_way(self, wish: Wish) -> Operation | None:
        """Return the very same, under way; Conflict where it is another one."""
        for operation in self._context.ledger.tables.operations.values():
            target = (operation.verb, operation.kind, operation.namespace, operation.name)
            if target != (wish.verb, wish.kind, wish.namespace, wish.name):
                continue
            if operation.state in FINAL_STATES:
                continue
            if operation.request == wish.request and not operation.cancelled_by:
                return operation
            if _is_beside(operation, wish):
                continue
            raise Conflict(
                f"another {operation.verb} of it is under way, by {operation.requester}",
                resource=operation.id,
                hint=f"wait for it: chv ops show {operation.id}",
            )
        return None

    # --- do

    async def _run(self, operation_id: str, again: bool) -> None:
        operation = await self._context.ledger.operation(operation_id)
        if operation is None or operation.state in FINAL_STATES:
            return
        came: Came | ChvError = Cancelled("it was cancelled")
        with anyio.CancelScope() as scope:
            self._scopes[operation_id] = scope
            if operation.cancelled_by:  # before an agent before us came to it
                scope.cancel()
            came = await self._in_turn(operation, again)
        self._scopes.pop(operation_id, None)
        self._hands.pop(operation_id, None)
        if isinstance(came, ChvError):
            await self._undone(operation)
        await self._end(operation_id, came)
        self._started.discard(operation_id)

    async def _undone(self, operation: Operation) -> None:
        undo = self._ways[operation.verb].undo
        try:
            if undo is not None:
                await undo(operation)
        except ChvError as error:  # what is left is found by those who look for it
            log.warning("agent.chore.not_undone", operation_id=operation.id, error=str(error))

    async def _in_turn(self, operation: Operation, again: bool) -> Came | ChvError:
        """Wait for a slot, then do it."""
        way = self._ways[operation.verb]
        line = self._lines.setdefault(operation.verb, [])
        line.append(operation.id)
        try:
            while way.slots and line.index(operation.id) >= way.slots:
                moved = self._moved
                await moved.wait()
            return await self._done(way, operation, again)
        finally:
            line.remove(operation.id)
            self._moved.set()
            self._moved = anyio.Event()

    async def _done(self, way: Way, operation: Operation, again: bool) -> Came | ChvError:
        """Do it; after a doubt, or another agent's death, look again until that can be told."""
        until_s = anyio.current_time() + AGAIN_S_MAX
        while True:
            task = Task(operation, again, self._hands.get(operation.id))
            try:
                await self._context.operations.begin_step(operation.id, operation.verb)
                await failpoint("agent.chore.do.before")
                came = await way.do(task)
                await failpoint("agent.chore.do.after")
            except (Unavailable, DeadlineExceeded, OutcomeUnknown) as error:
                again = again or isinstance(error, OutcomeUnknown)
                if not again or anyio.current_time() > until_s:
                    return error
                failure: ChvError = error
            except ChvError as error:
                return error
            except AssertionError:
                raise  # a rule of ours does not hold: going on could do harm
            except Exception as error:
                log.exception("agent.chore.bug", error, operation_id=operation.id)  # noqa: TRY401
                self._context.bugs.append(f"{operation.verb}: {type(error).__name__}: {error}")
                return Internal(f"{type(error).__name__}: {error}")
            else:
                return came
            log.info("agent.chore.again", operation_id=operation.id, error=str(failure))
            await anyio.sleep(RETRY_S)

    async def _end(self, operation_id: str, came: Came | ChvError) -> None:
        """Record what came of it, however long the store takes to take it."""
        await failpoint("agent.chore.end.before")
        while True:
            try:
                await self._record(operation_id, came)
                break
            except ChvError as error:
                log.warning("agent.chore.not_recorded", operation_id=operation_id, error=str(error))
            await anyio.sleep(RETRY_S)
        await failpoint("agent.chore.end.after")

    async def _record(self, operation_id: str, came: Came | ChvError) -> None:
        operations = self._context.operations
        async with self._context.ledger.writing() as tables:
            operation = tables.operations.get(operation_id)
            if operation is None or operation.state in FINAL_STATES:
                return
            if isinstance(came, Came):
                operation = _replace(operation, result=came.result)
                changes = operations.ending(operation, OperationState.SUCCEEDED, came.message)
            elif isinstance(came, Cancelled):
                words = operation.cancelled_by or came.message
                changes = operations.ending(
                    operation, OperationState.CANCELLED, f"cancelled {words}", came.data()
                )
            else:
                state, error = OperationState.FAILED, came.data()
                changes = operations.ending(operation, state, str(came), error)
            await self._context.ledger.commit_held(*changes)

    async def _final(self, operation_id: str, tell: Tell | None) -> Operation:
        ledger = self._context.ledger
        while True:
            changed = ledger.operations.event(operation_id)
            operation = await ledger.operation(operation_id)
            if operation is None:
                raise NotFound(f"there is no operation {operation_id!r}")
            if operation.state in FINAL_STATES:
                return operation
            if tell is not None:
                await tell(operation)
            with anyio.move_on_after(LOOK_S if tell is not None else 3600.0):
                await changed.wait()


def _is_beside(operation: Operation, wish: Wish) -> bool:
    """Tell whether two of one verb and target do not touch: artifacts of an Image."""
    return operation.request.get("artifact") != wish.request.get("artifact")
