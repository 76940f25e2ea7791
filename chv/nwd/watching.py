"""The methods about what is seen of packets: logs, explanations, captures, names. No logic."""

from __future__ import annotations

from chv.common.rpc import Server
from chv.common.wire import nwd_policy as wire
from chv.nwd.capture import Captures
from chv.nwd.explain import Explainer
from chv.nwd.keeper import Keeper
from chv.nwd.packet_log import PacketLogs
from chv.nwd.resolving import Resolver


class Watching:
    """Their handlers. `keep` runs for the life of the daemon."""

    def __init__(self, keeper: Keeper) -> None:
        self._logs = PacketLogs(keeper.parts)
        self._explainer = Explainer(keeper)
        self._captures = Captures(keeper.parts)
        self._resolver = Resolver(keeper.parts)

    def register(self, server: Server) -> None:
        """Add every handler of `WATCH_METHODS`."""
        server.add(wire.NETWORK_LOG, self._logs.get)
        server.add(wire.EXPLAIN_PATH, self._explainer.explain)
        server.add(wire.OPEN_CAPTURE, self._captures.open)
        server.add(wire.RESOLVE_NAME, self._resolver.resolve)

    async def keep(self) -> None:
        """Gather what rules tell of."""
        await self._logs.keep()
