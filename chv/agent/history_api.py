"""The handlers of `chv.common.wire.agent_history`: history, rollback, why. No logic of its own."""

from __future__ import annotations

from chv.agent.history import History
from chv.agent.image.callers import refuse_paths
from chv.agent.why import Why
from chv.common.rpc import CallContext, Server
from chv.common.wire import agent as api
from chv.common.wire import agent_history as wire


class HistoryApi:
    """See the module."""

    def __init__(self, history: History, why: Why) -> None:
        self._history = history
        self._why = why

    def register(self, server: Server) -> None:
        """Give every method its handler."""
        server.add(wire.LIST_GENERATIONS, self._history.rows)
        server.add(wire.GET_GENERATION, self._history.get)
        server.add(wire.ROLLBACK, self.rollback)
        server.add(wire.WHY, self._why.why)

    async def rollback(self, request: wire.Rollback, context: CallContext) -> api.ApplyReply:
        """Apply an earlier generation; files of the node are root's to name."""
        if context.peer_uid != 0:
            refuse_paths(await self._history.manifest(request))
        return await self._history.rollback(request)
