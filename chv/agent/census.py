"""The node's census: looks at everything at start and from time to time, and acts on a word.

stord and nwd look at their kinds, the agent at its own, and what nobody explains is noted in the
`LeakBook`. Nothing is removed but by `reap`, for one id, after looking again; a daemon that cannot
be asked is a reason to do nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import anyio
import anyio.to_thread

from chv.agent import census_own
from chv.agent.console.keeper import ConsoleKeeper
from chv.agent.leak_records import LeakRecords
from chv.agent.leaks import LeakBook, Look
from chv.agent.links import DaemonLink
from chv.agent.vmms import Vmms
from chv.common import logs
from chv.common.clock import Clock, timestamp
from chv.common.config import CensusConfig
from chv.common.errors import ChvError
from chv.common.ids import Ids
from chv.common.layout import Layout
from chv.common.process import Provider
from chv.common.wire.types import CENSUS, CensusItem, Empty

log = logs.get(__name__)
AGENT, CGROUPS = "agent", "agent (cgroups)"  # who owns a cgroup is known when all have answered
DAEMONS = ("stord", "nwd")
RETRY_S_MAX = 30.0
JITTER = (0.8, 1.2)


@dataclass(frozen=True)
class CensusParts:
    """What the census looks at and through."""

    layout: Layout
    provider: Provider
    link: Callable[[str], DaemonLink]
    vmms: Vmms
    console: ConsoleKeeper
    records: LeakRecords
    clock: Clock
    ids: Ids
    config: CensusConfig
    on_look: Callable[[LeakBook], None] = lambda book: None


class Census:
    """See the module. `leaks` has what is certain; `leaks.counts()` is for the metrics."""

    def __init__(self, parts: CensusParts) -> None:
        self.parts = parts
        self.leaks = LeakBook(parts.config.settle_s)
        self._lock = anyio.Lock()

    async def run(self) -> None:
        """Look until cancelled: soon again while something is uncertain, else every `every_s`."""
        while True:
            try:
                await self.look()
            except (ChvError, OSError) as error:
                log.warning("census.failed", error=str(error))
            await anyio.sleep(self._pause_s() * self.parts.ids.jitter(*JITTER))

    def _pause_s(self) -> float:
        config = self.parts.config
        if self.leaks.watching:
            return min(max(config.settle_s, 1.0) * JITTER[1], config.every_s)
        return min(RETRY_S_MAX, config.every_s) if self.leaks.unread else config.every_s

    async def look(self) -> None:
        """Look once, and note it."""
        async with self._lock:
            seen = await self.see()
            before = set(self.leaks.counts().items())
            stamp = timestamp(self.parts.clock.now())
            now_s = self.parts.clock.monotonic()
            self.leaks.note(seen, self.parts.records.busy(), now_s, stamp)
        self.parts.on_look(self.leaks)
        if set(self.leaks.counts().items()) != before:
            log.warning("census.leaks", **self.leaks.counts())

    async def look_twice(self) -> None:
        """Look, and where something is uncertain once more when it has had its time."""
        await self.look()
        if self.leaks.watching:
            await self.parts.clock.sleep(self.parts.config.settle_s)
            await self.look()

    async def see(self) -> Look:
        """Return everything that is there, and who did not answer."""
        parts = self.parts
        files = [path for vm in parts.records.handles() for path in parts.vmms.kept_files(vm)]
        own = await anyio.to_thread.run_sync(census_own.look, parts.layout, parts.provider, files)
        items: list[tuple[str, CensusItem]] = []
        unread: dict[str, str] = {}
        for name in DAEMONS:
            try:
                found = (await self.parts.link(name).call(CENSUS, Empty())).items
            except ChvError as error:
                unread[name] = str(error)
                continue
            items += [(name, item) for item in found]
        known = {item.name for _, item in items if item.kind == "process" and item.known}
        for item in await anyio.to_thread.run_sync(
            census_own.judge, own, parts.layout, parts.records.explained(), parts.console.pid, known
        ):
            items.append((CGROUPS if item.kind == "cgroup" else AGENT, item))
        read = {AGENT, *DAEMONS} - set(unread)
        return Look(tuple(items), frozenset(read if unread else {*read, CGROUPS}), unread)
