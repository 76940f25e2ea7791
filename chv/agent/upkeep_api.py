"""The handlers of `chv.common.wire.agent_leaks`: leaks, and restarts of daemons."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from chv.agent.census import Census
from chv.agent.chores import Came, Chores, Task, Way, Wish
from chv.agent.console.keeper import ConsoleKeeper
from chv.agent.daemons import Daemons
from chv.agent.engine import Engine
from chv.agent.leak_actions import LeakActions
from chv.agent.side_verbs import RESTART_DAEMON
from chv.common import logs
from chv.common.errors import Unavailable
from chv.common.rpc import Server
from chv.common.wire import agent_leaks as wire
from chv.common.wire.agent import DaemonStatus, Operation
from chv.common.wire.types import CENSUS, CensusReply, Empty

log = logs.get(__name__)


class UpkeepApi:
    """See the module."""

    def __init__(
        self, census: Census, daemons: Daemons, console: ConsoleKeeper, engine: Engine
    ) -> None:
        self._census = census
        self._chores: Chores = engine.chores
        self._unused: Callable[[], Awaitable[dict[str, int]]] = engine.unused
        self._actions = LeakActions(census, engine.chores)
        self._daemons = daemons
        self._console = console
        engine.chores.teach(RESTART_DAEMON, Way(self._restart))

    def register(self, server: Server) -> None:
        """Give every method its handler."""
        server.add(CENSUS, self.census)
        server.add(wire.LIST_LEAKS, self.list_leaks)
        server.add(wire.REAP_LEAK, self.reap)
        server.add(wire.ADOPT_LEAK, self.adopt)
        server.add(wire.LIST_DAEMONS, self.list_daemons)
        server.add(wire.RESTART_DAEMON, self.restart)

    async def census(self, request: Empty) -> CensusReply:
        """Everything of this instance that exists: the daemons' kinds and ours, merged."""
        del request
        return CensusReply(items=[item for _, item in (await self._census.see()).items])

    async def list_leaks(self, request: wire.ListLeaks) -> wire.LeaksReply:
        """What the last look told, or a look now."""
        if request.look:
            await self._census.look_twice()
        book = self._census.leaks
        return wire.LeaksReply(
            leaks=[self._actions.shown(each) for each in book.leaks()],
            looked_at=book.looked_at,
            unread=book.unread,
            watching=book.watching,
            unused=await self._unused(),
        )

    async def reap(self, request: wire.LeakRef) -> wire.LeakDone:
        """Remove one; the operation goes on where the caller leaves."""
        return await self._done(await self._actions.reap(request))

    async def adopt(self, request: wire.LeakRef) -> wire.LeakDone:
        """Take one up."""
        return await self._done(await self._actions.adopt(request))

    async def _done(self, begun: Operation) -> wire.LeakDone:
        operation = await self._chores.outcome(begun.id)
        known: dict[str, Any] = operation.result
        # An agent that has found it done knows no more of it than its id.
        leak = msgspec.convert(known or {"id": operation.name, "kind": "", "name": ""}, wire.Leak)
        return wire.LeakDone(leak=leak, operation_id=operation.id)

    async def list_daemons(self, request: Empty) -> wire.DaemonsReply:
        """All three, from memory."""
        del request
        return wire.DaemonsReply(daemons=self._all())

    def _all(self) -> list[DaemonStatus]:
        return [*self._daemons.statuses(), self._console.status()]

    def _one(self, name: str) -> DaemonStatus:
        return next(each for each in self._all() if each.name == name)

    async def restart(self, request: wire.RestartDaemon) -> wire.RestartDaemonReply:
        """Start one anew."""
        wish = Wish(
            verb=RESTART_DAEMON,
            kind="Daemon",
            name=request.name,
            requester=request.requester,
            reason=request.reason,
            idempotency_key=request.idempotency_key,
        )
        begun, _ = await self._chores.begin(wish, hand=self._one(request.name))
        operation = await self._chores.outcome(begun.id)
        reply = msgspec.convert(operation.result, wire.RestartDaemonReply)
        return msgspec.structs.replace(reply, operation_id=operation.id)

    async def _restart(self, task: Task) -> Came:
        name = task.operation.name
        before = task.hand or self._one(name)
        log.warning(
            "daemon.restart_asked",
            name=name,
            requester=task.operation.requester,
            reason=task.operation.reason,
        )
        if task.again and name != "console":
            self._require_ready(name)  # it came anew with the agent, which is what was wanted
        elif name == "console":
            await self._console.restart()
        else:
            await self._daemons.restart(name)
        after = self._one(name)
        result = {"before": msgspec.to_builtins(before), "after": msgspec.to_builtins(after)}
        return Came(f"pid {before.pid} -> {after.pid}, version {after.version}", result)

    def _require_ready(self, name: str) -> None:
        status = self._one(name)
        if status.state != "ready":
            raise Unavailable(f"chv-{name} is {status.state}", resource=f"daemon/{name}")
