"""Observe one VM's storage daemon and apply one step of a plan to it.

The caller holds the VM's lock. Every step is idempotent and may be cut short anywhere; what was
cut short is found by the next observation. Errors are those of the parts; none is kept back.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import assert_never

import anyio
import msgspec

from chv.common import logs
from chv.common.clock import Clock
from chv.common.config import StorageConfig
from chv.common.errors import ChvError, DeadlineExceeded, Unavailable
from chv.common.failpoint import failpoint
from chv.common.files import ensure_dir
from chv.common.ids import Ids, short_uid
from chv.common.layout import Layout
from chv.common.process import (
    Limits,
    Provider,
    SpawnSpec,
    WorkerRecord,
    terminate,
    wait_gone,
)
from chv.common.racing import unless
from chv.stord import confinement
from chv.stord.disks import Disks
from chv.stord.exports import RunDirectory
from chv.stord.levels import Errors, Levels
from chv.stord.liveness import is_alive
from chv.stord.opening import Opening
from chv.stord.plan import (
    AddDisk,
    Observed,
    Publish,
    RemoveExport,
    RemoveNodes,
    StartBackend,
    StartProxy,
    Step,
    StopBackend,
    StopProxy,
    Unpublish,
)
from chv.stord.proxies import Proxies
from chv.stord.qsd import block_jobs, graph, vhost_user
from chv.stord.qsd.monitor import Monitor
from chv.stord.qsd.monitors import Monitors
from chv.stord.records import Backend, Records
from chv.stord.tools import Tools

log = logs.get(__name__)
STOP_GRACE_S = 3.0
CLOSE_TIMEOUT_S = 5.0
# Of a storage daemon and the threads that read and write for it. Its memory has no limit of its
# own: pages of the guest count for whoever touches them first.
PIDS_MAX = 512
WORKER_KIND = "qsd"
LAST_WORDS_CHARACTERS_MAX = 200
# Files that the storage daemon makes are its own; it makes none but sockets.
UMASK = 0o177


@dataclass(frozen=True, slots=True)
class Parts:
    """What all work on storage daemons needs."""

    layout: Layout
    records: Records
    provider: Provider
    disks: Disks
    tools: Tools
    clock: Clock
    ids: Ids
    boot_id: str
    storage: StorageConfig = field(default_factory=StorageConfig)
    levels: Levels = field(default_factory=Levels)
    errors: Errors = field(default_factory=Errors)
    monitors: Monitors = field(default_factory=Monitors)

    @property
    def binary(self) -> str:
        """The storage daemon that new incarnations run."""
        return self.storage.storage_daemon_binary or graph.BINARY


class Work:
    """One piece of work on the storage daemon of one VM; `verb` names its failpoints."""

    def __init__(self, parts: Parts, vm_id: str, verb: str) -> None:
        self._parts = parts
        self._vm_id = vm_id
        self._verb = verb
        self._monitor: tuple[Path, Monitor] | None = None
        self.run = RunDirectory(parts.layout, vm_id)
        self._opening = Opening(parts, self.run, self._reached)
        # Disks that the storage daemon has from its command line.
        self._started_with: frozenset[str] = frozenset()
        self._proxies = Proxies(parts.records, parts.provider, parts.ids, self.run, parts.layout)

    @property
    def _backend(self) -> Backend:
        return self._parts.records.backends[self._vm_id]

    async def _reached(self, place: str) -> None:
        await failpoint(f"stord.{self._verb}.{place}")

    def become(self, verb: str) -> None:
        """Go on under another name: what was found makes it another piece of work."""
        self._verb = verb

    async def monitor(self) -> Monitor | None:
        """Return the monitor of the storage daemon that serves; None where none lives."""
        if await self._find_worker() is None:
            return None
        return await self._open_monitor()

    # --- observation
    async def observe(self) -> Observed:
        """Return what is there. A storage daemon that nobody wants any more is not asked."""
        rows = self._parts.records.of_vm(self._vm_id)
        volume_ids = [row.volume_id for row in rows]
        alive = await self._find_worker() is not None
        seen = Observed(
            alive=alive,
            paths=self.run.published(volume_ids),
            proxies=await self._proxies.alive(),
            unplaced=self.run.moving(volume_ids),
            proxy_remains=self._proxies.meant(),
            primed=self.run.has_primed(volume_ids),
            remains=self.run.remains() or bool(self._backend.worker_id),
        )
        if not alive or not any(row.wanted for row in rows):
            return seen
        nodes, exports = await (await self._open_monitor()).graph()
        return msgspec.structs.replace(seen, nodes=nodes, exports=exports)

    async def _find_worker(self) -> WorkerRecord | None:
        """Return the live worker, by its record or by the id that we meant to start it with."""
        backend = self._backend
        if backend.worker is None:
            return await self._find_unrecorded(backend)
        alive = await is_alive(
            self._parts.provider, backend.worker, self._vm_id, "the storage daemon"
        )
        return backend.worker if alive else None

    async def _find_unrecorded(self, backend: Backend) -> WorkerRecord | None:
        if not backend.worker_id:
            return None
        for found in self._parts.provider.find(backend.worker_id):
            ours = Path(found.executable).name in (graph.BINARY, Path(self._parts.binary).name)
            if ours and found.worker_id == backend.worker_id and found.uid == backend.storage_uid:
                await self._put(worker=found.record())
                return found.record()
        return None

    async def _put(self, **changes: object) -> None:
        await self._parts.records.put_backend(msgspec.structs.replace(self._backend, **changes))

    async def _open_monitor(self) -> Monitor:
        if self._monitor is None:
            path = self.run.monitor(self._backend.incarnation)
            self._monitor = (path, await self._connect(path))
        return self._monitor[1]

    async def close(self) -> None:
        """Let go of the connection."""
        if self._monitor is not None:
            path, monitor = self._monitor
            self._monitor = None
            await self._parts.monitors.give_back(self._vm_id, path, monitor)

    async def _connect(self, path: Path) -> Monitor:
        """Connect, or find out early that the storage daemon has ended."""
        backend, monitors = self._backend, self._parts.monitors
        connecting = partial(monitors.take, self._vm_id, path, backend.storage_uid)
        if backend.worker is None:
            return await connecting()
        opened = await unless(partial(wait_gone, backend.worker), connecting)
        if not opened:
            raise Unavailable(
                f"the storage daemon has ended: {self._last_words()}", resource=self._vm_id
            )
        return opened[0]

    def _last_words(self) -> str:
        try:
            lines = self._log_path().read_text(errors="replace").splitlines()
        except FileNotFoundError:
            return "no log"
        return lines[-1][:LAST_WORDS_CHARACTERS_MAX] if lines else "it said nothing"

    # --- steps
    async def apply(self, step: Step) -> None:
        """Do one step."""
        match step:
            case Unpublish(volume_id):
                self.run.unpublish(volume_id)
                await self._reached("after_unpublish")
            case RemoveExport(volume_id):
                await (await self._open_monitor()).delete_export(graph.export_id(volume_id))
                await self._reached("after_export_gone")
            case RemoveNodes(volume_id):
                await self._remove_nodes(volume_id)
            case StopBackend():
                await self._stop()
            case StartBackend():
                await self._start()
            case AddDisk(volume_id, read_only):
                if volume_id not in self._started_with:
                    monitor = await self._open_monitor()
                    await self._opening.add(monitor, volume_id, read_only=read_only)
            case Publish(volume_id, proxied):
                await self._publish(volume_id, proxied=proxied)
            case StopProxy(volume_id):
                await self._proxies.stop(volume_id, self._reached)
            case StartProxy(volume_id):
                await self._proxies.start(volume_id, self._reached)
            case _:
                assert_never(step)

    async def _remove_nodes(self, volume_id: str) -> None:
        """Delete what can be deleted until nothing of the volume is left.

        Only the top of a chain can go at a time, and what was opened as a part of another node
        goes with it; which is which differs after snapshots, merges and moves.
        """
        monitor = await self._open_monitor()
        await block_jobs.cancel_of(monitor, volume_id)
        while present := graph.removal_order(await monitor.nodes(), volume_id):
            await self._remove_one(monitor, present)
            await self._reached("after_node_gone")
        group = graph.throttle_group(volume_id)
        if group in await monitor.objects():
            await monitor.delete_object(group)
        await self._reached("after_nodes_gone")

    @staticmethod
    async def _remove_one(monitor: Monitor, names: list[str]) -> None:
        """Delete the first that lets itself be deleted; raise what the first said if none does."""
        refusals: list[ChvError] = []
        for name in names:
            try:
                await monitor.delete_node(name)
            except (Unavailable, DeadlineExceeded):
                raise
            except ChvError as error:
                refusals.append(error)
            else:
                return
        raise refusals[0]

    async def _stop(self) -> None:
        await self.close()
        await self._parts.monitors.drop(self._vm_id)
        worker = await self._find_worker() or self._backend.worker
        if worker is not None:
            await terminate(worker, grace_s=STOP_GRACE_S)
            await self._reached("after_stop")
            await self._parts.provider.cleanup(worker)
        self.run.remove()
        self._log_path().unlink(missing_ok=True)
        await self._reached("after_remove")

    def _log_path(self) -> Path:
        return self._parts.layout.logs / f"qsd-{short_uid(self._vm_id)}.log"

    async def _start(self) -> None:
        """Start the storage daemon with the disks that its command line can open."""
        disks = await self._opening.at_start()
        await self._start_with(disks)
        if not disks:
            return
        try:
            await self._open_monitor()
            self._started_with = frozenset(each.disk.volume_id for each in disks)
            return
        except Unavailable as error:
            problem = error
        if await self._find_worker() is not None:
            raise problem
        log.warning("started_again", vm_id=self._vm_id, error=problem, next="without disks")
        # One of them would not open: the monitor has better words for it than a log.
        await self._start_with(())

    async def _start_with(self, disks: tuple[graph.Serving, ...]) -> None:
        """Record the intent, start the worker, record the worker."""
        old = self._backend.worker
        if old is not None:
            await self._parts.provider.cleanup(old)
        incarnation = self._parts.ids.nonce()
        worker_id = self._parts.layout.worker_id(WORKER_KIND, self._vm_id, incarnation)
        await self._put(worker=None, worker_id=worker_id, incarnation=incarnation)
        self.run.prepare(self._backend.storage_uid, self._backend.vm_gid)
        ensure_dir(self._parts.layout.logs, mode=0o750)
        await self._reached("before_spawn")
        worker = await self._parts.provider.spawn(self._spawn_spec(disks))
        await self._reached("after_spawn")
        await self._put(worker=worker)
        await self._reached("after_worker_record")

    def _spawn_spec(self, disks: tuple[graph.Serving, ...]) -> SpawnSpec:
        backend = self._backend
        argv = graph.argv(
            self.run.monitor(backend.incarnation),
            self.run.pid_file(backend.worker_id),
            self._parts.binary,
            disks,
        )
        return SpawnSpec(
            worker_id=backend.worker_id,
            argv=tuple(argv),
            uid=backend.storage_uid,
            gid=backend.storage_uid,
            groups=(backend.vm_gid,),  # to pass through the VM's directory
            umask=UMASK,
            empty_netns=not backend.network,
            landlock=confinement.storage_daemon_rules(
                self._parts.layout,
                self._parts.storage,
                self._vm_id,
                self._parts.binary,
                network=backend.network,
            ),
            log_path=str(self._log_path()),
            cgroup=f"qsd-{short_uid(self._vm_id)}",
            limits=Limits(pids_max=PIDS_MAX),
        )

    async def _publish(self, volume_id: str, *, proxied: bool) -> None:
        backend = self._backend
        await vhost_user.prime(self.run.unprimed(volume_id), backend.storage_uid)
        await self._reached("after_prime")
        if proxied:
            self.run.hand_over(volume_id)
        else:
            self.run.publish(volume_id, backend.storage_uid, backend.vm_gid)
        await self._reached("after_rename")


@asynccontextmanager
async def work_on(parts: Parts, vm_id: str, verb: str) -> AsyncIterator[Work]:
    """Yield a `Work` that lets go of its connection at the end."""
    work = Work(parts, vm_id, verb)
    try:
        yield work
    finally:
        with anyio.move_on_after(CLOSE_TIMEOUT_S, shield=True):
            await work.close()
