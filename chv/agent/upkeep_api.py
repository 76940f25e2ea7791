"""The handlers of `chv.common.wire.agent_leaks`: leaks, and restarts of daemons."""

from __future__ import annotations

from chv.agent.census import Census
from chv.agent.console.keeper import ConsoleKeeper
from chv.agent.daemons import Daemons
from chv.agent.leak_actions import LeakActions
from chv.common import logs
from chv.common.rpc import Server
from chv.common.wire import agent_leaks as wire
from chv.common.wire.agent import DaemonStatus
from chv.common.wire.types import CENSUS, CensusReply, Empty

log = logs.get(__name__)


class UpkeepApi:
    """See the module."""

    def __init__(self, census: Census, daemons: Daemons, console: ConsoleKeeper) -> None:
        self._census = census
        self._actions = LeakActions(census)
        self._daemons = daemons
        self._console = console

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
        )

    async def reap(self, request: wire.LeakRef) -> wire.LeakDone:
        """Remove one."""
        return wire.LeakDone(leak=await self._actions.reap(request))

    async def adopt(self, request: wire.LeakRef) -> wire.LeakDone:
        """Take one up."""
        return wire.LeakDone(leak=await self._actions.adopt(request))

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
        log.warning(
            "daemon.restart_asked",
            name=request.name,
            requester=request.requester,
            reason=request.reason,
        )
        before = self._one(request.name)
        if request.name == "console":
            await self._console.restart()
        else:
            await self._daemons.restart(request.name)
        return wire.RestartDaemonReply(before=before, after=self._one(request.name))
