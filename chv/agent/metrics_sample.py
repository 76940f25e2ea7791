"""What metrics must ask for: processes of VMMs from /proc, counters from nwd and stord.

Asked in the background and only while somebody scrapes, so that an idle node pays nothing and no
scrape waits for a daemon. What was not heard of for `STALE_S` is absent from then on.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import anyio

from chv.agent.links import DaemonLink
from chv.agent.tables import Tables
from chv.common import logs
from chv.common.clock import Clock
from chv.common.errors import ChvError
from chv.common.process import procfs
from chv.common.wire.nwd_policy import NIC_STATS, GetNicStats, NicStats
from chv.common.wire.stord import GET_METRICS, StorageMetrics
from chv.common.wire.types import Empty

log = logs.get(__name__)
EVERY_S = 5.0
STALE_S = 15.0
SCRAPED_S = 150.0  # so long after a scrape another one is expected
ASK_TIMEOUT_S = 3.0
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class ProcessUse:
    """CPU time since the process started, seconds, and resident memory, bytes."""

    user_s: float
    system_s: float
    resident_bytes: int


@dataclass
class Sampled:
    """The last answers and when they came, monotonic seconds; absent: never."""

    processes: Mapping[str, ProcessUse] = field(default_factory=dict)  # by VM uid
    nics: Mapping[str, NicStats] = field(default_factory=dict)  # by NIC uid
    storage: StorageMetrics | None = None
    at_s: dict[str, float] = field(default_factory=dict)  # by source


class Sampler:
    """See the module."""

    def __init__(
        self, tables: Callable[[], Tables], link: Callable[[str], DaemonLink], clock: Clock
    ) -> None:
        self._tables, self._link, self._clock = tables, link, clock
        self._last = Sampled()
        self._scraped = anyio.Event()
        self._scraped_at_s = 0.0

    def scraped(self) -> None:
        """Somebody looks: keep the answers fresh for a while."""
        self._scraped_at_s = self._clock.monotonic()
        self._scraped.set()

    def processes(self) -> Mapping[str, ProcessUse]:
        """Return the use of each VM's VMM, nothing where it was too long ago."""
        return self._last.processes if self._is_fresh("proc") else {}

    def nics(self) -> Mapping[str, NicStats]:
        """Return the counters of each NIC, nothing where nwd has not answered for too long."""
        return self._last.nics if self._is_fresh("nwd") else {}

    def storage(self) -> StorageMetrics | None:
        """Return what stord counts, None where it has not answered for too long."""
        return self._last.storage if self._is_fresh("stord") else None

    def ages_s(self) -> dict[str, float]:
        """Return how old the last answer of each source is, seconds."""
        now = self._clock.monotonic()
        return {source: now - at for source, at in self._last.at_s.items()}

    def _is_fresh(self, source: str) -> bool:
        return self.ages_s().get(source, STALE_S) < STALE_S

    async def run(self) -> None:
        """Ask, while there is somebody to know."""
        while True:
            if self._clock.monotonic() - self._scraped_at_s > SCRAPED_S:
                self._scraped = anyio.Event()
            await self._scraped.wait()
            await self.sample()
            await self._clock.sleep(EVERY_S)

    async def sample(self) -> None:
        """Ask once."""
        workers = {
            row.vm_uid: (row.record.pid, row.record.start_time)
            for row in self._tables().workers.values()
            if row.record is not None
        }
        self._last.processes = await anyio.to_thread.run_sync(_uses, workers)
        self._last.at_s["proc"] = self._clock.monotonic()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._ask, "nwd", self._ask_nwd)
            tasks.start_soon(self._ask, "stord", self._ask_stord)

    async def _ask(self, source: str, ask: Callable[[], Awaitable[None]]) -> None:
        """Ask a daemon; one that does not answer leaves its last answer to grow stale."""
        try:
            with anyio.move_on_after(ASK_TIMEOUT_S) as scope:
                await ask()
        except ChvError as error:
            log.debug("metrics.not_answered", source=source, error=error)
            return
        if not scope.cancelled_caught:
            self._last.at_s[source] = self._clock.monotonic()

    async def _ask_nwd(self) -> None:
        reply = await self._link("nwd").call(NIC_STATS, GetNicStats())
        self._last.nics = {each.nic_id: each for each in reply.nics}

    async def _ask_stord(self) -> None:
        self._last.storage = await self._link("stord").call(GET_METRICS, Empty())


def _uses(workers: Mapping[str, tuple[int, int]]) -> dict[str, ProcessUse]:
    found = {vm_uid: process_use(*worker) for vm_uid, worker in workers.items()}
    return {vm_uid: use for vm_uid, use in found.items() if use is not None}


def process_use(pid: int, start_time: int) -> ProcessUse | None:
    """Return what a process uses; None where it is gone or the pid is another's by now."""
    try:
        line = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    if procfs.parse_stat(line).start_time != start_time:
        return None
    fields = line.rpartition(b")")[2].split()
    return ProcessUse(
        user_s=int(fields[11]) / _TICKS,
        system_s=int(fields[12]) / _TICKS,
        resident_bytes=int(fields[21]) * _PAGE_BYTES,
    )
