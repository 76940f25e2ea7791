"""The in-flight proxies of one VM: found, started, ended. The caller holds the VM's lock.

A proxy is a worker like a storage daemon: the intent is recorded before it is started, it goes on
when stord ends, and it is found again by its record or by its id. Its listener is made here, as
root, and gets its VMM-facing name only when the proxy is recorded: a path that a VMM can see
always has somebody behind it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from chv.common.files import ensure_dir
from chv.common.ids import Ids, short_uid
from chv.common.layout import Layout
from chv.common.process import Limits, Provider, SpawnSpec, WorkerRecord, terminate
from chv.stord.exports import RunDirectory
from chv.stord.liveness import is_alive
from chv.stord.proxy import command
from chv.stord.records import Attachment, Backend, Records

UMASK = 0o177  # it makes no files
STOP_GRACE_S = 1.0
MEMORY_BYTES_MAX, PIDS_MAX = 64 << 20, 16
Reached = Callable[[str], Awaitable[None]]


class Proxies:
    """What there is of proxies for one VM. `reached` names the failpoints."""

    def __init__(
        self, records: Records, provider: Provider, ids: Ids, run: RunDirectory, layout: Layout
    ) -> None:
        self._records = records
        self._provider = provider
        self._ids = ids
        self._run = run
        self._layout = layout

    def meant(self) -> frozenset[str]:
        """Return the volumes for which a proxy was started, or was about to be."""
        return frozenset(row.volume_id for row in self._rows() if row.proxy_id)

    async def alive(self) -> frozenset[str]:
        """Return the volumes whose proxy lives."""
        rows = [row for row in self._rows() if row.proxy_id]
        return frozenset([row.volume_id for row in rows if await self._find(row) is not None])

    async def start(self, volume_id: str, reached: Reached) -> None:
        """Record the intent, make the listener, start the proxy, give the listener its name."""
        await self._end(self._row(volume_id))
        backend = self._records.backends[self._run.vm_id]
        worker_id = self._layout.worker_id(command.WORKER_KIND, backend.vm_id, self._ids.nonce())
        await self._put(volume_id, proxy_id=worker_id, proxy=None)
        ensure_dir(self._layout.logs, mode=0o750)
        await reached("before_proxy_spawn")
        with self._run.listen(volume_id, backend.storage_uid, backend.vm_gid) as listener:
            spec = self._spec(volume_id, worker_id, backend, listener.fileno())
            worker = await self._provider.spawn(spec)
        await reached("after_proxy_spawn")
        await self._put(volume_id, proxy=worker)
        await reached("after_proxy_record")
        self._run.place(volume_id)
        await reached("after_proxy_rename")

    async def stop(self, volume_id: str, reached: Reached) -> None:
        """End the proxy and forget it; fine when there is none."""
        await self._end(self._row(volume_id))
        await reached("after_proxy_stop")
        await self._put(volume_id, proxy_id="", proxy=None)
        self._log_path(volume_id).unlink(missing_ok=True)

    # --- inward
    def _rows(self) -> list[Attachment]:
        return self._records.of_vm(self._run.vm_id)

    def _row(self, volume_id: str) -> Attachment:
        return self._records.attachments[volume_id, self._run.vm_id]

    async def _put(self, volume_id: str, **changes: object) -> None:
        row = msgspec.structs.replace(self._row(volume_id), **changes)
        await self._records.put_attachment(row)

    async def _find(self, row: Attachment) -> WorkerRecord | None:
        """Return the live proxy, by its record or by the id that we meant to start it with."""
        if row.proxy is not None:
            alive = await is_alive(self._provider, row.proxy, row.vm_id, "the in-flight proxy")
            return row.proxy if alive else None
        backend = self._records.backends[row.vm_id]
        for found in self._provider.find(row.proxy_id) if row.proxy_id else ():
            same = found.worker_id == row.proxy_id and found.uid == backend.storage_uid
            if same and command.is_ours(found.executable):
                await self._put(row.volume_id, proxy=found.record())
                return found.record()
        return None

    async def _end(self, row: Attachment) -> None:
        worker = await self._find(row) or row.proxy
        if worker is not None:
            await terminate(worker, grace_s=STOP_GRACE_S)
            await self._provider.cleanup(worker)

    def _log_path(self, volume_id: str) -> Path:
        name = f"proxy-{short_uid(self._run.vm_id)}-{short_uid(volume_id)}.log"
        return self._layout.logs / name

    def _spec(self, volume_id: str, worker_id: str, backend: Backend, fd: int) -> SpawnSpec:
        return SpawnSpec(
            worker_id=worker_id,
            argv=command.argv(
                worker_id, self._run.primed(volume_id), command.install(self._layout.run)
            ),
            uid=backend.storage_uid,
            gid=backend.storage_uid,
            groups=(backend.vm_gid,),  # to pass through the VM's directory
            umask=UMASK,
            empty_netns=True,
            fds={command.LISTENER_FD: fd},
            log_path=str(self._log_path(volume_id)),
            cgroup=f"proxy-{short_uid(backend.vm_id)}",
            limits=Limits(memory_max_bytes=MEMORY_BYTES_MAX, pids_max=PIDS_MAX),
        )
