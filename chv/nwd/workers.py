"""The dnsmasq processes: started with a recorded intent, told by SIGHUP, adopted, ended.

One per network, in its namespace, with a uid of this instance and three capabilities: to bind its
ports, to answer clients without an address, to enter neighbours. It outlives nwd. Which process
it is rests on its record; where that cannot be told it is UNKNOWN and no second one is started.
Fails with Unavailable when it ends too often or does not come up.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections import defaultdict, deque
from functools import lru_cache
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec

from chv.common import logs
from chv.common.clock import Clock
from chv.common.errors import Unavailable
from chv.common.failpoint import failpoint
from chv.common.ids import Ids
from chv.common.layout import Layout
from chv.common.process import (
    AdoptVerdict,
    Limits,
    Provider,
    SpawnSpec,
    WorkerRecord,
    send,
    terminate,
    wait_gone,
)
from chv.nwd import dnsmasq, runfiles
from chv.nwd.kernel import netns
from chv.nwd.nft.text import digest
from chv.nwd.plan import DnsState
from chv.nwd.records import Records, Worker

log = logs.get(__name__)
KIND = "dnsmasq"
CAPABILITIES = ("CAP_NET_ADMIN", "CAP_NET_RAW", "CAP_NET_BIND_SERVICE")
READY_TIMEOUT_S = 5.0
READY_POLL_S = 0.002
RETRY_S = 0.05
STOP_GRACE_S = 1.0
MEMORY_BYTES_MAX = 128 << 20
PROGRAMS_KEPT_MAX = 8
PROGRAM_KEPT_S = 2.0
LOG_BYTES_MAX = 1 << 20
_SIGHUP_BIT = 1 << (signal.SIGHUP - 1)
_BOUND = (" 00000000:0043 ", ":0035 ")  # DHCP and DNS in /proc/PID/net/udp


class Workers:
    """All dnsmasq processes of this instance."""

    def __init__(
        self,
        layout: Layout,
        records: Records,
        provider: Provider,
        clock: Clock,
        limits: tuple[int, float],
    ) -> None:
        self._layout = layout
        self._records = records
        self._provider = provider
        self._clock = clock
        self._restarts_max, self._window_s = limits
        self._ends: defaultdict[str, deque[float]] = defaultdict(deque)
        self._ids = Ids()

    def prefix(self) -> str:
        """Every worker id of ours starts with it."""
        return f"{self._layout.worker_prefix}{KIND}:"

    async def state(self, network_id: str, netns_path: str) -> DnsState:
        """Judge the recorded process; one of which only the intent is known is looked for."""
        row = self._records.workers.get(network_id)
        if row is None:
            return DnsState.NONE
        if row.process is None:
            row = await self._find(row)
        if row.process is None:
            return DnsState.DEAD
        verdict = self._provider.adopt(row.process).verdict
        if verdict.dead:
            return DnsState.DEAD
        if verdict is AdoptVerdict.UNKNOWN:
            return DnsState.UNKNOWN
        return DnsState.ALIVE if _is_in(row.process, netns_path) else DnsState.MISPLACED

    async def _find(self, row: Worker) -> Worker:
        found = await anyio.to_thread.run_sync(self._provider.find, row.worker_id)
        if not found:
            return row
        row = msgspec.structs.replace(row, process=found[0].record())
        await self._records.put_worker(row)
        return row

    def configuration(self, network_id: str) -> str:
        """Return the digest of what the recorded process was started with.

        Empty when its program has been replaced since: then it is due for a restart as well.
        """
        row = self._records.workers.get(network_id)
        if row is None:
            return ""
        configuration, _, program = row.conf_digest.partition(":")
        return configuration if program in ("", _program()) else ""

    def bridge(self, network_id: str) -> int:
        """Return the number of the bridge that the recorded process is bound to."""
        row = self._records.workers.get(network_id)
        return row.bridge_index if row is not None else 0

    def process(self, network_id: str) -> WorkerRecord | None:
        """Return the recorded process."""
        row = self._records.workers.get(network_id)
        return row.process if row is not None else None

    def forgive(self, network_id: str) -> None:
        """Forget the ends so far: somebody asked for the network again."""
        self._ends.pop(network_id, None)

    def _refuse_storm(self, network_id: str) -> None:
        ends = self._ends[network_id]
        while ends and ends[0] <= self._clock.monotonic() - self._window_s:
            ends.popleft()
        if len(ends) > self._restarts_max:
            raise Unavailable(
                f"dnsmasq ended {len(ends)} times within {self._window_s:g} s:"
                f" {self._last_words(network_id)}",
                resource=network_id,
                hint="it is tried again when the window has passed",
            )

    def _last_words(self, network_id: str) -> str:
        text = runfiles.read(self._layout.network_run(network_id) / dnsmasq.LOG)
        return text.strip().splitlines()[-1][-200:] if text.strip() else "it said nothing"

    async def start(self, plan: Worker, configuration: str, verb: str) -> None:
        """Start one that listens, as `plan` says but for its id.

        The caller knows that the recorded one, if any, is dead.
        """
        network_id = plan.network_id
        while True:
            await self._bury(network_id)
            self._refuse_storm(network_id)
            process = await self._start_once(plan, configuration, verb)
            if await self._ready(network_id, process):
                return
            await self._clock.sleep(RETRY_S)

    async def _bury(self, network_id: str) -> None:
        """Forget a dead one, and count its end: nobody asked for it, or `stop` had forgotten it."""
        if self.process(network_id) is not None:
            self._ends[network_id].append(self._clock.monotonic())
        await self._clear(network_id)

    async def _start_once(self, plan: Worker, configuration: str, verb: str) -> WorkerRecord:
        network_id = plan.network_id
        directory = await anyio.to_thread.run_sync(runfiles.prepare, self._layout, network_id)
        worker_id = self._layout.worker_id(KIND, network_id, self._ids.nonce())
        conf = directory / f"{worker_id}.conf"
        await anyio.to_thread.run_sync(runfiles.replace, conf, configuration, self._layout.dns_uid)
        await anyio.to_thread.run_sync(_shorten, directory / dnsmasq.LOG)
        await anyio.to_thread.run_sync(runfiles.empty_leases, self._layout, network_id)
        started_with = f"{plan.conf_digest}:{_program()}"
        row = msgspec.structs.replace(plan, worker_id=worker_id, conf_digest=started_with)
        await self._records.put_worker(row)
        await failpoint(f"nwd.{verb}.dns_intent")
        process = await self._provider.spawn(self._spec(network_id, worker_id, conf))
        await failpoint(f"nwd.{verb}.dns_spawned")
        await self._records.put_worker(msgspec.structs.replace(row, process=process))
        await anyio.to_thread.run_sync(runfiles.tidy, directory, conf.name)
        return process

    def _spec(self, network_id: str, worker_id: str, conf: Path) -> SpawnSpec:
        uid = self._layout.dns_uid
        return SpawnSpec(
            worker_id=worker_id,
            argv=(dnsmasq.PROGRAM, "--keep-in-foreground", f"--conf-file={conf}"),
            uid=uid,
            gid=uid,
            keep_capabilities=CAPABILITIES,
            netns=netns.path_of(self._layout.netns(network_id)),
            log_path=str(conf.parent / dnsmasq.LOG),
            limits=Limits(memory_max_bytes=MEMORY_BYTES_MAX),
        )

    async def _ready(self, network_id: str, process: WorkerRecord) -> bool:
        """Wait until it handles SIGHUP, which would end it before, and listens; False: it died."""
        with anyio.move_on_after(READY_TIMEOUT_S):
            while not _listens(process.pid):
                if self._provider.adopt(process).verdict.dead:
                    return False
                await anyio.sleep(READY_POLL_S)
            return True
        raise Unavailable(
            f"dnsmasq does not listen after {READY_TIMEOUT_S:g} s: {self._last_words(network_id)}",
            resource=network_id,
        )

    def tell(self, network_id: str) -> None:
        """Let it read its files again; does not block."""
        process = self.process(network_id)
        if process is not None:
            send(process, signal.SIGHUP)

    async def stop(self, network_id: str) -> None:
        """End the recorded one and forget it."""
        process = self.process(network_id)
        if process is not None:
            await terminate(process, grace_s=STOP_GRACE_S)
        await self._clear(network_id)

    async def _clear(self, network_id: str) -> None:
        process = self.process(network_id)
        if process is not None:
            await self._provider.cleanup(process)
        if network_id in self._records.workers:
            await self._records.drop_worker(network_id)

    async def end_strays(self) -> None:
        """End processes of ours that no record explains, as a lost record would leave them."""
        known = {row.worker_id for row in self._records.workers.values()}
        for found in await anyio.to_thread.run_sync(self._provider.find, self.prefix()):
            if found.worker_id in known:
                continue
            log.warning("stray_dnsmasq_ended", worker_id=found.worker_id, pid=found.pid)
            await terminate(found.record(), grace_s=STOP_GRACE_S)
            await self._provider.cleanup(found.record())

    async def until_end(self, process: WorkerRecord) -> None:
        """Return when the process has ended."""
        await wait_gone(process)


def _is_in(process: WorkerRecord, netns_path: str) -> bool:
    try:
        return netns.inode(f"/proc/{process.pid}/ns/net") == netns.inode(netns_path)
    except FileNotFoundError:
        return False


def _listens(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        udp = Path(f"/proc/{pid}/net/udp").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
    handles = int(caught.split()[1], 16) & _SIGHUP_BIT
    return bool(handles) and all(mark in udp for mark in _BOUND)


def _program() -> str:
    """Tell one dnsmasq program from the next that is put in its place; empty: there is none."""
    path = _path(int(time.monotonic() / PROGRAM_KEPT_S))
    if path is None:
        return ""
    status = os.stat(path)  # noqa: PTH116  asked in every pass
    return _mark(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


@lru_cache(1)  # nine directories to look into; whatever is put before it is seen soon
def _path(_moment: int) -> str | None:
    return shutil.which(dnsmasq.PROGRAM)


@lru_cache(PROGRAMS_KEPT_MAX)
def _mark(*words: int) -> str:
    return digest(" ".join(map(str, words)))


def _shorten(path: Path) -> None:
    """Keep the log bounded; what it says is of use only while the process lives."""
    if path.exists() and path.stat().st_size > LOG_BYTES_MAX:
        path.write_text("")
