"""One worker per object: it looks, acts, sleeps, and looks again when something may have changed.

Level-triggered: a wake-up carries no information, and whatever was missed is found at the next
resync. Objects run in parallel; within one object everything is in sequence. Errors that may
pass are retried with a capped exponential back-off, reset by a change of what is wanted; final
ones wait for a change. The firewall is here: no error of one object harms another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup

from chv.agent.context import Context
from chv.agent.records import SentFacts, StoredObject, all_facts
from chv.common import logs
from chv.common.errors import (
    ChvError,
    Conflict,
    DataLoss,
    Internal,
    InvalidArgument,
    OutcomeUnknown,
    OwnershipConflict,
    PermissionDenied,
    Unauthenticated,
    Unsupported,
)

log = logs.get(__name__)

BACKOFF_S_FIRST = 0.2
BACKOFF_S_MAX = 15.0
AGAIN_MAX = 50  # passes in a row without rest
# Only a change of what is wanted, or of the node, can cure these.
PERMANENT = (
    InvalidArgument,
    Unsupported,
    PermissionDenied,
    Unauthenticated,
    OwnershipConflict,
    DataLoss,
)


@dataclass(frozen=True, slots=True)
class Done:
    """As wanted; look again at the next resync."""


@dataclass(frozen=True, slots=True)
class Again:
    """Something was done: look at once whether it is as wanted now."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """Somebody else must move first; look again after so long at the latest."""

    retry_s: float


@dataclass(frozen=True, slots=True)
class Gone:
    """The object is no more."""


Outcome = Done | Again | Waiting | Gone


class Reconciler(Protocol):
    """What is particular to a kind of object. One instance per object, used by its worker only."""

    async def reconcile(self, stored: StoredObject) -> Outcome:
        """Make one pass. ChvErrors are handled by the worker."""
        ...

    async def failed(self, stored: StoredObject, error: ChvError, *, permanent: bool) -> None:
        """Show an error on the object and its operation."""
        ...

    async def glance(self) -> bool:
        """Look cheaply whether a pass is due; called every `monitor_s` while `monitored`."""
        ...

    @property
    def monitored(self) -> bool:
        """Tell whether `glance` makes sense now."""
        ...

    def serve(self, group: TaskGroup) -> None:
        """Start what accompanies the object in the worker's task group."""
        ...


class Worker:
    """Drives the reconciler of one object."""

    def __init__(self, context: Context, uid: str, reconciler: Reconciler) -> None:
        self._context = context
        self._uid = uid
        self._reconciler = reconciler
        self._woken = anyio.Event()
        self._failures = 0
        self._wanted: object = None  # what was wanted in the last pass
        self._given_up = False  # on what is wanted; a change or `insist` starts again
        self._again = 0

    def wake(self) -> None:
        """Look at the object soon."""
        self._woken.set()

    def insist(self) -> None:
        """Look again even where a final error was met: the node has changed."""
        self._given_up = False
        self._failures = 0
        self._woken.set()

    async def run(self) -> None:
        """Work until the object is gone or the engine ends."""
        async with anyio.create_task_group() as group:
            self._reconciler.serve(group)
            while True:
                self._woken = anyio.Event()
                with logs.operation(self._context.operations.current_id(self._uid)):
                    outcome = await self._pass()
                if isinstance(outcome, Gone):
                    self._context.forget(self._uid)
                    break
                await self._rest(outcome)
            group.cancel_scope.cancel()

    async def _pass(self) -> Outcome:
        stored = self._context.stored(self._uid)
        if stored is None:
            return Gone()
        self._notice_change(stored)
        if self._given_up:
            return Done()
        try:
            outcome = await self._reconciler.reconcile(stored)
        except ChvError as error:
            return await self._after_error(stored, error)
        except TimeoutError:
            return await self._after_error(stored, OutcomeUnknown("a step took too long"))
        except AssertionError:
            raise  # a rule of ours does not hold: going on could do harm
        except Exception as error:
            log.exception("agent.reconcile.bug", error, uid=self._uid)  # noqa: TRY401
            self._context.bugs.append(f"{stored.title}: {type(error).__name__}: {error}")
            return await self._after_error(stored, Internal(f"{type(error).__name__}: {error}"))
        self._failures = 0
        return outcome

    def _notice_change(self, stored: StoredObject) -> None:
        """Start afresh where something else is wanted than before."""
        facts = all_facts(stored)
        wanted = (
            stored.resource.metadata.generation,
            stored.deleting,
            facts if not isinstance(facts, SentFacts) else None,  # says what was done, not wanted
            self._context.referred(stored),
        )
        if wanted != self._wanted:
            self._wanted, self._given_up, self._failures = wanted, False, 0

    async def _after_error(self, stored: StoredObject, error: ChvError) -> Outcome:
        if isinstance(error, Conflict):  # somebody changed the object meanwhile: plan again
            return Again()
        permanent = isinstance(error, PERMANENT)
        self._failures += 1
        # What is tried again is shown on the object; only what is final needs a person.
        tell = log.warning if permanent else log.info
        tell("agent.reconcile.failed", object=stored.title, error=str(error), final=permanent)
        try:
            await self._reconciler.failed(stored, error, permanent=permanent)
        except ChvError as second:
            log.warning("agent.reconcile.unreported", object=stored.title, error=str(second))
            permanent = False
        self._given_up = permanent
        return Done() if permanent else Waiting(self._backoff_s())

    def _backoff_s(self) -> float:
        limit = min(BACKOFF_S_MAX, BACKOFF_S_FIRST * 2 ** min(self._failures - 1, 16))
        return self._context.world.ids.jitter(limit / 2, limit)

    async def _rest(self, outcome: Outcome) -> None:
        if isinstance(outcome, Again):
            self._again += 1
            if self._again < AGAIN_MAX:
                await anyio.lowlevel.checkpoint()
                return
            log.error("agent.reconcile.restless", uid=self._uid, passes=self._again)
        self._again = 0
        resync_s = self._context.world.limits.resync_s
        rest_s = min(outcome.retry_s, resync_s) if isinstance(outcome, Waiting) else resync_s
        # No herd of objects that all look at the same moment.
        await self._sleep(rest_s * self._context.world.ids.jitter(0.9, 1.0))

    async def _sleep(self, rest_s: float) -> None:
        """Sleep until woken, until a glance says that something changed, at most so long."""
        with anyio.move_on_after(rest_s):
            if not self._reconciler.monitored:  # only a pass changes that
                await self._woken.wait()
            while not self._woken.is_set():
                with anyio.move_on_after(self._context.world.limits.monitor_s):
                    await self._woken.wait()
                    return
                if await self._glance():
                    return

    async def _glance(self) -> bool:
        try:
            return await self._reconciler.glance()
        except ChvError:
            return True  # a full pass will say what is wrong


class Workers:
    """All workers of the engine, in its task group."""

    def __init__(self, make: Callable[[StoredObject], Worker]) -> None:
        self._make = make
        self._workers: dict[str, Worker] = {}
        self._group: TaskGroup | None = None

    def attach(self, group: TaskGroup) -> None:
        """Run in this group from now on."""
        self._group = group

    def ensure(self, stored: StoredObject) -> None:
        """Start the worker of an object where it has none; wake it."""
        worker = self._workers.get(stored.uid)
        if worker is not None:
            worker.wake()
        elif self._group is not None:
            worker = self._workers[stored.uid] = self._make(stored)
            self._group.start_soon(self._run, stored.uid, worker)

    def wake(self, uid: str) -> None:
        """Wake the worker of an object; none: no effect."""
        worker = self._workers.get(uid)
        if worker is not None:
            worker.wake()

    def insist(self, uid: str) -> None:
        """Look at an object again, also where a final error was met; no worker: no effect."""
        worker = self._workers.get(uid)
        if worker is not None:
            worker.insist()

    def insist_all(self) -> None:
        """Look at everything again, also where a final error was met."""
        for worker in self._workers.values():
            worker.insist()

    async def _run(self, uid: str, worker: Worker) -> None:
        try:
            await worker.run()
        finally:
            self._workers.pop(uid, None)
