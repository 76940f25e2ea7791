"""The agent's part of `chv console`: names the line and passes the holder's socket on."""

from __future__ import annotations

from chv.agent.console.keeper import ConsoleKeeper
from chv.agent.engine import Engine
from chv.common.rpc import Server, WithFds
from chv.common.wire.agent_console import OPEN_CONSOLE, ConsoleReply, OpenConsole, OpenLine


class ConsoleApi:
    """See the module. A new holder has no lines: every object is looked at then."""

    def __init__(self, keeper: ConsoleKeeper, engine: Engine) -> None:
        self._keeper = keeper
        self._engine = engine
        keeper.on_up = lambda: engine.notify_daemon_ready("console")

    def register(self, server: Server) -> None:
        """Give the method its handler."""
        server.add(OPEN_CONSOLE, self.open)

    async def open(self, request: OpenConsole) -> WithFds[ConsoleReply]:
        """NotFound: no VM; FailedPrecondition: its line is not held; Unavailable: no holder."""
        line = OpenLine(
            vm_id=self._engine.vm_uid(request.name, request.namespace),
            read_only=request.read_only,
            take=request.take,
        )
        reply, fds = await self._keeper.open_line(line)
        return WithFds(reply, fds)
