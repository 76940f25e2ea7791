"""Keeps the storage daemon of each VM where the records want it, and notices what happens to it.

One lock per VM; under it: observe, plan, apply, record the outcome. A death is noticed by the
pidfd; a hung storage daemon misses its deadline three times and is killed. A new incarnation
starts unasked only under a keep_vm VM, whose proxies hold its guest meanwhile, and not too often.
One VM's failure is logged here and tried again; it harms no other VM.
"""

from __future__ import annotations

import signal
from collections.abc import Awaitable, Callable
from functools import partial

import anyio
import anyio.to_thread
import msgspec
from anyio.abc import TaskGroup

from chv.common import logs
from chv.common.clock import timestamp
from chv.common.errors import ChvError, DeadlineExceeded
from chv.common.failpoint import failpoint
from chv.common.process import WorkerRecord, wait_gone
from chv.common.wire.stord import CrashClass, StorageEvent
from chv.stord import crash_class, restarts
from chv.stord.events import Events
from chv.stord.exports import RunDirectory
from chv.stord.locks import KeyedLocks
from chv.stord.plan import Desired, Observed, StopBackend, StopProxy, Wanted, plan
from chv.stord.proxy import command
from chv.stord.records import Attachment, Backend, BackendPhase
from chv.stord.work import Parts, Work, work_on

log = logs.get(__name__)
PULSE_S = 10.0
PULSES_PARALLEL = 8
MISSES_MAX = 3
REASON_CHARACTERS_MAX = 256
MAY_START = (BackendPhase.STARTING, BackendPhase.RECOVERING, BackendPhase.RESTARTING)


class Keeper:
    """All VMs with attachments. Tasks that watch storage daemons run in `tasks`."""

    def __init__(self, parts: Parts, events: Events, tasks: TaskGroup) -> None:
        self.parts = parts
        self.locks = KeyedLocks()
        self.misses: dict[str, int] = {}
        self._records = parts.records
        self._events = events
        self.tasks = tasks
        self._watched: set[str] = set()
        self._deaths = restarts.Deaths()
        # VMs whose proxies do not stay alive: served without one from their next start on.
        self._unproxied: set[str] = set()
        # Finishes or takes back what a kill left half done of a VM's layers.
        self.settle: Callable[[str], Awaitable[None]] = _nothing

    # --- one VM; the caller holds its lock
    async def converge(self, vm_id: str, verb: str) -> None:
        """Bring one VM to where its records want it; `verb` names the failpoints."""
        # As it was when the storage daemon died, if it did: before anything is settled.
        keep = self.crash_class(vm_id) is CrashClass.KEEP_VM
        await self.settle(vm_id)
        async with work_on(self.parts, vm_id, verb) as work:
            observed = await work.observe()
            if observed.alive:
                self._watch(vm_id)
            problem = await self._note_deaths(work, observed, keep=keep)
            desired = self._desired(vm_id)
            if not problem:
                known = tuple(row.volume_id for row in self._records.of_vm(vm_id))
                for step in plan(desired, observed, known):
                    await work.apply(step)
        if problem:
            await self.give_up_recovery(vm_id, problem)
            return
        await self._settle(vm_id, serving=observed.alive or desired.may_start)
        await failpoint(f"stord.{verb}.after_record")

    def _desired(self, vm_id: str) -> Desired:
        phase = self._records.backends[vm_id].phase
        return Desired(
            attachments=tuple(
                Wanted(
                    volume_id=row.volume_id,
                    read_only=row.read_only,
                    published=row.published,
                    proxied=row.proxied,
                )
                for row in self._records.of_vm(vm_id)
                if row.wanted
            ),
            may_start=phase in MAY_START,
            restarting=phase is BackendPhase.RESTARTING,
        )

    async def _note_deaths(self, work: Work, observed: Observed, *, keep: bool) -> str:
        """Count the dead, begin a restart where there may be one; return why there is none."""
        vm_id, now_s = work.run.vm_id, self.parts.clock.monotonic()
        backend = self._records.backends[vm_id]
        rows = [row for row in self._records.of_vm(vm_id) if row.wanted]
        dead = [row for row in rows if row.proxy and row.volume_id not in observed.proxies]
        if dead and not self._deaths.note(vm_id, "proxy", now_s):
            self._unproxied.add(vm_id)
            return "its in-flight proxy died too often"
        serving = backend.phase is BackendPhase.SERVING and keep
        again = backend.phase is BackendPhase.RESTARTING and backend.worker is not None
        if not observed.alive and rows and (serving or again):
            if not self._deaths.note(vm_id, "storage daemon", now_s):
                return "the storage daemon died too often"
            log.warning("backend_died", vm_id=vm_id, next="restarted under the VM")
        if not observed.alive and rows and serving:
            now = timestamp(self.parts.clock.now())
            await self._records.put_backend(restarts.begun(backend, now))
            await failpoint("stord.restart.after_intent")
        if self._records.backends[vm_id].phase is BackendPhase.RESTARTING:
            work.become("restart")
        return ""

    def takes_proxy(self, vm_id: str, rows: list[Attachment]) -> bool:
        """Tell whether a VM with these attachments gets in-flight proxies."""
        return (
            self.parts.storage.proxy == "auto"
            and command.is_runnable()
            and vm_id not in self._unproxied
            and all(row.read_only or not self._has_metadata(row.volume_id) for row in rows)
        )

    async def _settle(self, vm_id: str, *, serving: bool) -> None:
        """Record what the steps have led to."""
        rows = self._records.of_vm(vm_id)
        for row in rows:
            if not row.wanted:
                await self._revoke(row, rows)
        if not any(row.wanted for row in rows):
            await self._records.drop_backend(vm_id)
            return
        for row in rows:
            if not row.wanted:
                await self._records.drop_attachment(row.volume_id, vm_id)
        backend = self._records.backends[vm_id]
        if serving:
            await self._record_served(backend)
            self._watch(vm_id)
        elif backend.phase is BackendPhase.SERVING:
            await self._mark_lost(vm_id, "the storage daemon ended")

    async def _revoke(self, row: Attachment, rows: list[Attachment]) -> None:
        """Take a volume's files back from the VM's storage uid, but for what it still serves."""
        backend = self._records.backends[row.vm_id]
        if row.volume_id in self._records.volumes:
            still = tuple(each.volume_id for each in rows if each.wanted)
            revoke = partial(
                self.parts.disks.revoke, row.volume_id, backend.storage_uid, still=still
            )
            await anyio.to_thread.run_sync(revoke)

    async def _record_served(self, backend: Backend) -> None:
        fresh = [
            msgspec.structs.replace(row, published=True)
            for row in self._records.of_vm(backend.vm_id)
            if not row.published
        ]
        served = restarts.finished(backend, timestamp(self.parts.clock.now()))
        if fresh or served != backend:
            await self._records.put_vm(fresh, None if served == backend else served)
        if backend.phase is BackendPhase.RESTARTING:
            log.warning("backend_restarted", vm_id=backend.vm_id, losses=served.losses)
            self._tell(backend.vm_id, "backend_restarted")

    async def give_up_recovery(self, vm_id: str, reason: str) -> None:
        """Go back to LOST with nothing running: whoever asked no longer holds the VM still."""
        async with work_on(self.parts, vm_id, "give_up") as work:
            for row in self._records.of_vm(vm_id):
                work.run.unpublish(row.volume_id)
                if row.proxy_id:
                    await work.apply(StopProxy(row.volume_id))
            await work.apply(StopBackend())
        await self._mark_lost(vm_id, reason)

    async def _mark_lost(self, vm_id: str, reason: str) -> None:
        backend = self._records.backends[vm_id]
        if backend.worker is not None:
            await self.parts.provider.cleanup(backend.worker)
        await self._mark_unclean(vm_id)
        self._deaths.forget(vm_id)
        row = loss_recorded(backend, reason, timestamp(self.parts.clock.now()))
        await self._records.put_backend(row)
        log.error("backend_lost", vm_id=vm_id, reason=reason, losses=row.losses)
        self._events.publish(self._lost(row))

    async def _mark_unclean(self, vm_id: str) -> None:
        """Remember which files may be damaged: those with metadata, that were written."""
        dirty = [
            row.volume_id
            for row in self._records.of_vm(vm_id)
            if not row.read_only and self._has_metadata(row.volume_id)
        ]
        if dirty:
            await self._records.mark_unclean(dirty)

    def _has_metadata(self, volume_id: str) -> bool:
        volume = self._records.volumes.get(volume_id)
        return volume is not None and not crash_class.is_plain(volume)

    def crash_class(self, vm_id: str) -> CrashClass:
        """Return what the loss of the VM's storage daemon means: the worst of its disks."""
        return crash_class.worst(
            crash_class.of_attachment(row, self._records.volumes.get(row.volume_id))
            for row in self._records.of_vm(vm_id)
            if row.wanted
        )

    async def look(self, vm_id: str) -> None:
        """Converge once; the firewall of one VM. Counts the misses of a hung storage daemon."""
        try:
            if self._records.backends[vm_id].phase is BackendPhase.RECOVERING:
                await self.give_up_recovery(vm_id, "the recovery was cut short")
            else:
                await self._bring_up(vm_id)
            self.misses.pop(vm_id, None)
        except DeadlineExceeded as error:
            self.misses[vm_id] = self.misses.get(vm_id, 0) + 1
            log.warning("backend_hangs", vm_id=vm_id, misses=self.misses[vm_id], error=error)
            if self.misses[vm_id] >= MISSES_MAX:
                await self._kill(vm_id)
        except ChvError as error:
            log.warning("converge_failed", vm_id=vm_id, error=error, next="tried again")
        except Exception as error:  # the firewall of one VM
            log.exception("converge_failed", error, vm_id=vm_id)  # noqa: TRY401  it is our logger

    async def _bring_up(self, vm_id: str) -> None:
        """Converge; while the storage daemon is restarted under a VM, again and again for a bit."""
        end_s = self.parts.clock.monotonic() + restarts.RESTART_S_MAX
        while True:
            try:
                await self.converge(vm_id, "adopt")
            except Exception as error:  # a part of the firewall of one VM
                if self._records.backends[vm_id].phase is not BackendPhase.RESTARTING:
                    raise
                if self.parts.clock.monotonic() > end_s:
                    await self.give_up_recovery(vm_id, f"it did not come back: {error}")
                    return
                log.warning("restart_failed", vm_id=vm_id, error=error, next="tried again")
                await self.parts.clock.sleep(restarts.RETRY_S)
            else:
                return

    async def _kill(self, vm_id: str) -> None:
        worker = self._records.backends[vm_id].worker
        self.misses.pop(vm_id, None)
        if worker is not None:
            log.error("backend_killed", vm_id=vm_id, pid=worker.pid, reason="it hung")
            await self.parts.provider.kill(worker, signal.SIGKILL)

    # --- death of a storage daemon or of a proxy
    def _watch(self, vm_id: str) -> None:
        worker = self._records.backends[vm_id].worker
        proxies = [row.proxy for row in self._records.of_vm(vm_id)]
        for each in (worker, *proxies):
            if each is not None and each.worker_id not in self._watched:
                self._watched.add(each.worker_id)
                self.tasks.start_soon(self._until_gone, vm_id, each)

    async def _until_gone(self, vm_id: str, worker: WorkerRecord) -> None:
        """The firewall of one watch: what it misses is found by the next pulse."""
        try:
            await self._after_end(vm_id, worker)
        except Exception as error:
            log.exception("watch_failed", error, vm_id=vm_id)  # noqa: TRY401  it is our logger

    async def _after_end(self, vm_id: str, worker: WorkerRecord) -> None:
        await wait_gone(worker)
        self._watched.discard(worker.worker_id)
        # At once, without the lock: a VMM that reconnects must find no dead path.
        if self._is_backend(vm_id, worker) and self.crash_class(vm_id) is CrashClass.RESET_VM:
            run = RunDirectory(self.parts.layout, vm_id)
            for row in self._records.of_vm(vm_id):
                run.unpublish(row.volume_id)
        async with self.locks.hold(vm_id):
            if self._is_current(vm_id, worker):
                await self.look(vm_id)

    def _is_backend(self, vm_id: str, worker: WorkerRecord) -> bool:
        backend = self._records.backends.get(vm_id)
        return backend is not None and backend.worker == worker

    def _is_current(self, vm_id: str, worker: WorkerRecord) -> bool:
        """Tell whether the VM still counts on it, or is without a storage daemon right now."""
        backend = self._records.backends.get(vm_id)
        if backend is None:
            return False
        workers = (backend.worker, *(row.proxy for row in self._records.of_vm(vm_id)))
        return worker in workers or backend.phase is BackendPhase.RESTARTING

    def open_losses(self) -> list[StorageEvent]:
        """Return an event for every loss that nobody has recovered from."""
        rows = self._records.backends.values()
        return [self._lost(row) for row in rows if row.phase is BackendPhase.LOST]

    def _lost(self, row: Backend) -> StorageEvent:
        return StorageEvent(
            kind="backend_lost",
            vm_id=row.vm_id,
            crash_class=CrashClass.RESET_VM,  # whatever it could have been: it is down now
            message=row.message,
            at=row.lost_at,
        )

    def tell_ready(self, vm_id: str) -> None:
        """Tell the watchers that the VM is served again."""
        self._tell(vm_id, "backend_ready")

    def _tell(self, vm_id: str, kind: str) -> None:
        now = timestamp(self.parts.clock.now())
        self._events.publish(
            StorageEvent(kind=kind, vm_id=vm_id, crash_class=self.crash_class(vm_id), at=now)
        )

    # --- all VMs
    async def adopt(self) -> None:
        """Bring every recorded VM to where its records want it; after a boot, void them."""
        async with anyio.create_task_group() as adopting:
            for vm_id in list(self._records.backends):
                adopting.start_soon(self._adopt_one, vm_id)

    async def _adopt_one(self, vm_id: str) -> None:
        async with self.locks.hold(vm_id):
            backend = self._records.backends[vm_id]
            if backend.boot_id != self.parts.boot_id:
                await self._void(backend)
            await self.look(vm_id)

    async def _void(self, backend: Backend) -> None:
        await self._mark_unclean(backend.vm_id)
        rows = self._records.of_vm(backend.vm_id)
        for row in rows:
            await self._revoke(row, [])
        void = msgspec.structs.replace(
            backend,
            phase=BackendPhase.ABSENT,
            boot_id=self.parts.boot_id,
            worker=None,
            worker_id="",
            incarnation="",
        )
        rows = [msgspec.structs.replace(row, proxy=None, proxy_id="") for row in rows]
        await self._records.put_vm(rows, void)
        log.info("attachments_void", vm_id=backend.vm_id, reason="the host has booted")

    async def pulse_forever(self) -> None:
        """Look at every VM now and then: hints may be lost, and a hung process gives none."""
        limiter = anyio.CapacityLimiter(PULSES_PARALLEL)
        while True:
            await self.parts.clock.sleep(PULSE_S)
            async with anyio.create_task_group() as pulses:
                for vm_id in list(self._records.backends):
                    pulses.start_soon(self._pulse, vm_id, limiter)

    async def _pulse(self, vm_id: str, limiter: anyio.CapacityLimiter) -> None:
        async with limiter, self.locks.hold(vm_id):
            if vm_id in self._records.backends:
                await self.look(vm_id)


async def _nothing(_vm_id: str) -> None:
    """Settle nothing: a keeper without snapshots."""


def loss_recorded(backend: Backend, reason: str, now: str) -> Backend:
    """Return the row of a storage daemon that is lost; a return that failed is no new loss."""
    fresh = backend.phase not in (BackendPhase.RECOVERING, BackendPhase.RESTARTING)
    told = f"{now}: {reason}; disks are down until RecoverVmBackend"
    return msgspec.structs.replace(
        backend,
        phase=BackendPhase.LOST,
        message=reason[:REASON_CHARACTERS_MAX],
        lost_at=now,
        losses=backend.losses + fresh,
        last_loss=told[:REASON_CHARACTERS_MAX],
    )
