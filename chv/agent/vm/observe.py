"""What is seen of a VM: process table, monitor, stord and nwd, in one picture.

Nothing is taken from what was done last. A daemon that does not answer leaves its part unknown
rather than hiding the rest, since a VM must be stoppable without it. Changes nothing.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field, replace

from chv.agent.context import Context
from chv.agent.records import StoredObject, WorkerRow
from chv.agent.vm.config import served_disks
from chv.agent.vm.crashes import backoff_left_s
from chv.agent.vm.desired import facts_of, handle_of
from chv.agent.vm.model import (
    Backend,
    DesiredVm,
    Life,
    ObservedNic,
    ObservedVm,
    ObservedVolume,
    ObservedWorker,
)
from chv.common import logs
from chv.common.errors import ChvError, DeadlineExceeded, NotFound, OutcomeUnknown, Unavailable
from chv.common.ids import short_uid
from chv.common.process.records import AdoptVerdict, WorkerRecord
from chv.common.wire.nwd import NicInfo
from chv.common.wire.resources import ImageStatus
from chv.common.wire.stord import (
    AttachmentInfo,
    BackendState,
    SpaceLevel,
    SpacePolicy,
    VmBackendInfo,
    VolumeInfo,
)
from chv.vmm.driver import HOT_PLUG, VmmObservation, VmmState

log = logs.get(__name__)
START_S = 60.0  # from spawn until the vCPUs run
SILENT = (Unavailable, DeadlineExceeded, OutcomeUnknown)


@dataclass(slots=True)
class Memory:
    """What one agent remembers of one VM between passes; losing it costs time, not safety."""

    first_seen: dict[str, float] = field(default_factory=dict)  # worker id -> unbooted since
    recovery_failures: int = 0
    regrown: frozenset[str] = frozenset()  # operations that have had their disk unplugged
    seccomp: tuple[str, str] = ("", "")  # worker id, and what was seen of its threads


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """The planner's picture and what lies behind it."""

    vm: ObservedVm
    record: WorkerRecord | None = None  # the live process, recorded or found
    monitor: VmmObservation | None = None
    attachments: dict[str, AttachmentInfo] = field(default_factory=dict)
    nics: dict[str, NicInfo] = field(default_factory=dict)
    image: ImageStatus | None = None
    volumes: dict[str, VolumeInfo] = field(default_factory=dict)  # that it wants
    session: VmBackendInfo | None = None
    seccomp: str = ""


@dataclass(frozen=True, slots=True)
class _Process:
    life: Life
    record: WorkerRecord | None


async def observe(
    context: Context, stored: StoredObject, desired: DesiredVm, memory: Memory
) -> Sight:
    """Look at everything that concerns a VM."""
    row = context.ledger.tables.workers.get(stored.uid)
    process = await judge(context, row) if row is not None else None
    storage = await _storage(context, desired)
    worker, monitor = await _worker(context, stored, row, process, memory)
    if worker is not None and row is not None:
        worker = await _with_devices(context, stored, row, worker, storage)
    network = await _network(context, desired)
    image = _image(context, stored, desired)
    facts = facts_of(stored)
    return Sight(
        vm=ObservedVm(
            worker=worker,
            stranger=row is None and await _stranger_lives(context, stored.uid),
            attached=frozenset(storage.attachments),
            backend=storage.backend,
            storage_known=storage.known,
            volumes={uid: _volume(info) for uid, info in storage.volumes.items()},
            nics={nic_id: _nic(info) for nic_id, info in network.nics.items()},
            networks=network.ready,
            groups=network.groups,
            network_known=network.known,
            image_ready=not desired.boot_image or (image is not None and image.phase == "Ready"),
            selected=facts.selection is not None,
            files_made=facts.files_made,
            console=context.world.vmm.console_attached(handle_of(stored)),
            recovery_failures=memory.recovery_failures,
            regrown=memory.regrown,
            held=stored.uid in context.holding,
            backoff_s=backoff_left_s(facts, context.world.moment()),
        ),
        record=process.record if process is not None else None,
        monitor=monitor,
        attachments=storage.attachments,
        nics=network.nics,
        image=image,
        volumes=storage.volumes,
        session=storage.session,
        seccomp=await _seccomp(context, stored, worker, process, memory),
    )


async def _seccomp(
    context: Context,
    stored: StoredObject,
    worker: ObservedWorker | None,
    process: _Process | None,
    memory: Memory,
) -> str:
    """Look once at the threads of each VMM, when its vCPUs run: before, they are not all there."""
    if worker is None or process is None or process.record is None:
        return ""
    if memory.seccomp[0] == worker.worker_id:
        return memory.seccomp[1]
    if worker.state is not VmmState.RUNNING or not worker.booted:
        return ""
    try:
        unfiltered = await context.world.vmm.unfiltered(handle_of(stored), process.record)
    except (NotFound, *SILENT):
        return ""  # the next pass sees what became of it
    seen = "none" if unfiltered is None else "filtered"
    if unfiltered:
        seen = f"unfiltered: {', '.join(unfiltered)}"
        log.warning("agent.vm.unfiltered", vm_id=stored.uid, threads=list(unfiltered))
    memory.seccomp = (worker.worker_id, seen)
    return seen


async def judge(context: Context, row: WorkerRow) -> _Process:
    """Say what became of a recorded or intended VMM. In doubt: UNKNOWN."""
    port = context.world.vmm
    if row.record is None:
        found = await port.find(row.worker_id)
        return _Process(Life.DEAD if found is None else Life.ALIVE, found)
    verdict = await port.verify(row.record)
    if verdict.dead:
        return _Process(Life.DEAD, None)
    known = verdict is AdoptVerdict.ALIVE
    return _Process(Life.ALIVE if known else Life.UNKNOWN, row.record)


async def _worker(
    context: Context,
    stored: StoredObject,
    row: WorkerRow | None,
    process: _Process | None,
    memory: Memory,
) -> tuple[ObservedWorker | None, VmmObservation | None]:
    if row is None or process is None:
        memory.first_seen.clear()
        return None, None
    monitor = None
    if process.life is Life.ALIVE:
        monitor = await look_at_monitor(context, stored)
    worker = ObservedWorker(
        worker_id=row.worker_id,
        life=process.life,
        recorded=row.record is not None,
        state=monitor.state if monitor is not None else VmmState.UNKNOWN,
        booted=row.booted,
        recovering=row.recovering,
        ending=row.ending.kind if row.ending is not None else None,
        start_expired=_start_expired(context, row, memory),
        frozen=row.frozen and stored.uid not in context.freezing,
    )
    return worker, monitor


async def _with_devices(
    context: Context,
    stored: StoredObject,
    row: WorkerRow,
    worker: ObservedWorker,
    storage: _Storage,
) -> ObservedWorker:
    """Add what is recorded as plugged, and what the VMM itself says."""
    by_path = {each.export_path: uid for uid, each in storage.attachments.items()}
    recorded = {
        disk.id: disk.volume_id or by_path.get(disk.path, "") for disk in served_disks(row.config)
    }
    plugged: frozenset[str] | None = None
    plugged_nics: frozenset[str] | None = None
    if row.driver in HOT_PLUG and worker.state in (VmmState.RUNNING, VmmState.PAUSED):
        with suppress(*SILENT):
            seen = await context.world.vmm.disks(handle_of(stored))
            plugged = frozenset(disk.id for disk in seen)
            plugged_nics = frozenset(await context.world.vmm.nics(handle_of(stored)))
    known = {disk_id: uid for disk_id, uid in recorded.items() if uid}
    nics = frozenset(nic.id for nic in row.config.nics)
    return replace(
        worker,
        disks=known,
        plugged=plugged,
        nics=nics,
        plugged_nics=plugged_nics,
        cpus=row.config.cpus,
        cpus_max=row.config.cpus_max,
        memory_bytes=row.config.memory_bytes,
        memory_max_bytes=row.config.memory_max_bytes,
    )


async def _stranger_lives(context: Context, uid: str) -> bool:
    """A VMM with this VM's id that no record explains: wait until it is proven gone."""
    worker_id = context.strangers.get(short_uid(uid))
    if worker_id is None:
        return False
    if await context.world.vmm.find(worker_id) is not None:
        return True
    context.strangers.pop(short_uid(uid), None)
    return False


async def look_at_monitor(context: Context, stored: StoredObject) -> VmmObservation:
    """Ask the monitor; silence is UNKNOWN with the reason, not an error."""
    try:
        return await context.world.vmm.observe(handle_of(stored))
    except SILENT as error:
        return VmmObservation(state=VmmState.UNKNOWN, reason="MonitorSilent", evidence=str(error))


def _start_expired(context: Context, row: WorkerRow, memory: Memory) -> bool:
    if row.booted:
        return False
    now = context.world.clock.monotonic()
    return now - memory.first_seen.setdefault(row.worker_id, now) > START_S


# --- storage


@dataclass(slots=True)
class _Storage:
    known: bool = False
    backend: Backend = Backend.ABSENT
    attachments: dict[str, AttachmentInfo] = field(default_factory=dict)
    volumes: dict[str, VolumeInfo] = field(default_factory=dict)
    session: VmBackendInfo | None = None


async def _storage(context: Context, desired: DesiredVm) -> _Storage:
    try:
        sessions = await context.sessions.fresh()
        volumes = await context.volumes.fresh() if desired.disks else None
    except ChvError:
        return _Storage()
    seen = _Storage(known=True)
    for session in sessions.sessions:
        if session.vm_id == desired.uid:
            seen.session = session
            seen.backend = _BACKENDS[session.backend]
            seen.attachments = {each.volume_id: each for each in session.attachments}
    wanted = {disk.volume_uid for disk in desired.disks}
    for volume in volumes.volumes if volumes is not None else ():
        if volume.volume_id in wanted:
            seen.volumes[volume.volume_id] = volume
    return seen


def _volume(info: VolumeInfo) -> ObservedVolume:
    full = info.space is SpaceLevel.CRITICAL and info.space_policy is SpacePolicy.STOP
    return ObservedVolume(
        generation=info.generation,
        state=info.state,
        attached_to=info.attached_to,
        pending=info.pending_size_bytes > 0,
        full=full,
    )


_BACKENDS = {
    BackendState.SERVING: Backend.SERVING,
    BackendState.LOST: Backend.LOST,
    BackendState.RESTARTING: Backend.RESTARTING,
    BackendState.ABSENT: Backend.ABSENT,
}


# --- network


@dataclass(slots=True)
class _Network:
    known: bool = False
    nics: dict[str, NicInfo] = field(default_factory=dict)
    ready: dict[str, int] = field(default_factory=dict)
    groups: frozenset[str] = frozenset()


async def _network(context: Context, desired: DesiredVm) -> _Network:
    try:
        nics = await context.nics.fresh()
        networks = await context.networks.fresh() if desired.nics else None
        grouped = any(nic.groups for nic in desired.nics)
        groups = await context.groups.fresh() if grouped else None
    except ChvError:
        return _Network()
    seen = _Network(known=True)
    seen.nics = {nic.nic_id: nic for nic in nics.nics if nic.vm_id == desired.uid}
    wanted = {nic.network_uid for nic in desired.nics}
    for network in networks.networks if networks is not None else ():
        if network.network_id in wanted and network.status == "ready":
            seen.ready[network.network_id] = network.generation
    seen.groups = frozenset(group.group_id for group in (groups.groups if groups else ()))
    return seen


def _nic(info: NicInfo) -> ObservedNic:
    return ObservedNic(
        generation=info.generation,
        network_uid=info.network_id,
        attached=info.state == "attached",
    )


def _image(context: Context, stored: StoredObject, desired: DesiredVm) -> ImageStatus | None:
    namespace = stored.resource.metadata.namespace
    image = context.ledger.tables.find("Image", namespace, desired.boot_image)
    status = image.resource.status if image is not None else None
    return status if isinstance(status, ImageStatus) else None
