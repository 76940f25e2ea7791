"""A stateful fake of stord that speaks its wire methods. It outlives the agent.

It keeps the daemon's rules (idempotent by generation and by id, exclusive, refuse what is in use)
and reports to `violate` what no correct agent would ever ask for: a snapshot taken twice, a
restore repeated over newer writes, a disk served or let go of under a guest that has it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from chv.common.errors import (
    Cancelled,
    ChvError,
    Conflict,
    FailedPrecondition,
    Internal,
    InUse,
    InvalidArgument,
    NotFound,
    StaleGeneration,
    Unavailable,
)
from chv.common.rpc import Method
from chv.common.wire import stord
from chv.common.wire.stord import JobInfo, JobKind, JobState
from chv.common.wire.types import Done

Violate = Callable[[str], None]
PLACES = ("class_name", "format", "pool", "block", "lvm", "nbd", "iscsi", "rbd")
JOB_S = (0.0, 1.0, 6.0, 30.0)
_replace = msgspec.structs.replace


@dataclass
class SimVolume:
    """A volume on disk. `backend` is what it is; its size is what was asked for last."""

    generation: int
    size_bytes: int
    backend: stord.VolumeBackend
    open: bool = True
    creating: bool = False
    full: bool = False  # no space where it is
    attached_to: str = ""
    readers: set[str] = field(default_factory=set)
    snapshots: dict[str, bool] = field(default_factory=dict)  # id -> being deleted
    content: str = ""  # what is on it, as a name for all of it
    contents: dict[str, str] = field(default_factory=dict)  # that it had at each snapshot
    applied: str = ""
    key: str = ""  # that opens it now
    restored: dict[str, int] = field(default_factory=dict)  # operation -> attachments by then
    attachments: int = 0

    @property
    def holders(self) -> set[str]:
        return self.readers | ({self.attached_to} if self.attached_to else set())

    @property
    def parent(self) -> stord.SnapshotSource | None:
        source = self.backend.snapshot
        linked = source is not None and source.mode is stord.CloneMode.LINKED
        return source if linked else None


@dataclass
class SimSession:
    """The storage daemon of one VM."""

    incarnation: int = 1
    serving: bool = True
    void: bool = False  # the host has booted since: what was attached has to be so anew
    restarting_until: float = 0.0
    losses: int = 0
    restarts: list[str] = field(default_factory=list)  # operations that asked for one
    attachments: dict[str, bool] = field(default_factory=dict)  # volume id -> read only


@dataclass
class SimJob:
    """Work that ends by itself at `ends_at`, with `effect` where it succeeds."""

    info: JobInfo
    ends_at: float
    effect: Callable[[], object]
    waits: bool = False  # for BeginMirror


class SimStord:
    """stord with its storage daemons. `guest_has` and `vcpus_run` look at the processes."""

    def __init__(self, violate: Violate) -> None:
        self.violate = violate
        self.volumes: dict[str, SimVolume] = {}
        self.sessions: dict[str, SimSession] = {}
        self.jobs: dict[str, SimJob] = {}
        self.job_s: tuple[float, ...] = JOB_S
        self.mishaps = True  # some jobs fail
        self.device_bytes = 1 << 60  # no volume grows beyond
        self.keeps_vms = True  # disks have in-flight proxies
        self.rotates = True  # a key is changed at once
        self.taken: set[str] = set()  # every snapshot that there ever was
        self.down_until = 0.0
        self.now: Callable[[], float] = lambda: 0.0
        self.vmm_alive: Callable[[str], bool] = lambda vm: False
        self.guest_has: Callable[[str, str], bool] = lambda vm, volume: self.vmm_alive(vm)
        self.vcpus_run: Callable[[str], bool] = lambda vm: False
        self.operation_known: Callable[[str], bool] = lambda operation: True

    def handle(self, method: Method[Any, Any], params: Any) -> Any:
        """Answer one call."""
        self.advance()
        if hasattr(params, "meta"):
            operation = params.meta.operation_id.partition(".")[0]
            if not self.operation_known(operation):
                self.violate(f"I7: {method.name} under an operation that is not recorded")
        return getattr(self, f"_{method.name}")(params)

    # --- volumes

    def _ListVolumes(self, _: Any) -> stord.ListVolumesReply:
        return stord.ListVolumesReply(
            volumes=[self._info(uid, volume) for uid, volume in self.volumes.items()]
        )

    def _ListVolumeSessions(self, _: Any) -> stord.ListVolumeSessionsReply:
        return stord.ListVolumeSessionsReply(
            sessions=[self._session(vm_id) for vm_id in self.sessions]
        )

    def _OpenVolume(self, params: stord.OpenVolume) -> stord.VolumeInfo:
        generation, backend, uid = params.meta.generation, params.backend, params.volume_id
        volume = self.volumes.get(uid)
        if volume is None:
            return self._create(params)
        if generation < volume.generation:
            raise StaleGeneration(f"{generation} < {volume.generation}")
        if self._job_of(uid) and generation > volume.generation:
            raise Conflict("a job is under way")
        if not _same_place(volume.backend, backend):
            if not any(job.info.kind is JobKind.MOVE for job in self._jobs_of(uid)):
                self.violate(f"volume {uid} opened at another place than it is: MoveVolume")
            raise InvalidArgument("it does not move by OpenVolume")
        if _source(backend) != _source(volume.backend):
            self.violate(f"volume {uid} opened with another source")
        if backend.size_bytes < volume.backend.size_bytes:
            self.violate(f"I5: volume {uid} asked to shrink")
        if backend.size_bytes > self.device_bytes:
            raise InvalidArgument("more than its device has", field="backend.size_bytes")
        volume.generation, volume.backend, volume.open = generation, backend, True
        if self.rotates:
            volume.key = _key(backend)
        if backend.size_bytes > volume.size_bytes:
            self._grow(volume, params.client)
        return self._info(uid, volume)

    def _create(self, params: stord.OpenVolume) -> stord.VolumeInfo:
        backend, uid = params.backend, params.volume_id
        source = backend.snapshot
        if source is not None:
            parent = self._volume(source.volume_id)
            if source.snapshot_id not in parent.snapshots:
                raise NotFound("no such snapshot")
        if backend.size_bytes > self.device_bytes:
            raise InvalidArgument("more than its device has", field="backend.size_bytes")
        volume = SimVolume(params.meta.generation, backend.size_bytes, backend, key=_key(backend))
        self.volumes[uid] = volume
        if source is not None and source.mode is stord.CloneMode.FULL:
            volume.creating = True
            self._begin(uid, JobKind.CREATE, params.meta.operation_id, lambda: _made(volume))
        return self._info(uid, volume)

    def _grow(self, volume: SimVolume, client: stord.VmmClient) -> None:
        if not volume.holders:
            volume.size_bytes, volume.applied = volume.backend.size_bytes, "detached"
        elif client is stord.VmmClient.QEMU:
            volume.size_bytes, volume.applied = volume.backend.size_bytes, "online"
        else:
            volume.applied = "on_next_start"

    def _CloseVolume(self, params: stord.VolumeRef) -> Done:
        volume = self._volume(params.volume_id)
        if volume.holders:
            raise InUse(f"attached to {volume.holders}")
        volume.open = False
        return Done()

    def _DeleteVolume(self, params: stord.VolumeRef) -> Done:
        volume = self._volume(params.volume_id)
        if volume.holders:
            raise InUse(f"attached to {volume.holders}")
        if volume.snapshots:
            self.violate(f"volume {params.volume_id} deleted with snapshots {volume.snapshots}")
            raise InUse("it has snapshots")
        if self._job_of(params.volume_id):
            raise Conflict("a job is under way")
        if volume.open:
            self.violate(f"volume {params.volume_id} deleted while open")
        del self.volumes[params.volume_id]
        return Done()

    # --- attachments

    def _AttachVolumeToVm(self, params: stord.AttachVolumeToVm) -> stord.AttachmentInfo:
        volume = self._volume(params.volume_id)
        shared = volume.backend.access is stord.AccessMode.READ_ONLY_MANY
        if shared and not params.read_only:
            raise InvalidArgument("read only")
        if not shared and volume.attached_to not in ("", params.vm_id):
            raise InUse(f"attached to {volume.attached_to}")
        if params.meta.generation < volume.generation:
            raise StaleGeneration(f"{params.meta.generation} < {volume.generation}")
        if not volume.open or volume.creating:
            raise FailedPrecondition("not open")
        job = self._job_of(params.volume_id)
        if job is not None and job.info.kind in (JobKind.CHECK, JobKind.REPAIR):
            raise Conflict("it is being checked")
        if params.vm_id in self.sessions and self.sessions[params.vm_id].void:
            self._forget(params.vm_id)
        session = self.sessions.setdefault(params.vm_id, SimSession())
        if not session.serving:
            raise FailedPrecondition("the storage daemon was lost: RecoverVmBackend first")
        if self._is_restarting(session):
            raise Unavailable("the storage daemon is coming back")
        new = params.volume_id not in session.attachments
        if new and self.vcpus_run(params.vm_id) and self.guest_has(params.vm_id, params.volume_id):
            self.violate(f"I5: volume {params.volume_id} attached under running vCPUs")
        session.attachments[params.volume_id] = params.read_only
        if new:
            volume.attachments += 1
            volume.size_bytes = volume.backend.size_bytes
        if shared:
            volume.readers.add(params.vm_id)
        else:
            volume.attached_to = params.vm_id
        return self._attachment(params.vm_id, params.volume_id)

    def _AttachVolumesToVm(self, params: stord.AttachVolumesToVm) -> stord.AttachVolumesReply:
        outcomes = []
        for each in params.volumes:
            one = stord.AttachVolumeToVm(
                meta=_replace(params.meta, generation=each.generation),
                volume_id=each.volume_id,
                vm_id=params.vm_id,
                storage_uid=params.storage_uid,
                vm_gid=params.vm_gid,
                read_only=each.read_only,
                network=params.network,
            )
            try:
                outcome = stord.AttachOutcome(
                    volume_id=each.volume_id, attachment=self._AttachVolumeToVm(one)
                )
            except ChvError as error:
                outcome = stord.AttachOutcome(volume_id=each.volume_id, error=error.data())
            outcomes.append(outcome)
        return stord.AttachVolumesReply(outcomes=outcomes)

    def _DetachVolumeFromVm(self, params: stord.DetachVolumeFromVm) -> Done:
        volume = self._volume(params.volume_id)
        if params.vm_id not in volume.holders:
            return Done()
        if self.guest_has(params.vm_id, params.volume_id):
            self.violate(f"I5: volume {params.volume_id} detached while the VMM has it")
        volume.readers.discard(params.vm_id)
        if volume.attached_to == params.vm_id:
            volume.attached_to = ""
        session = self.sessions[params.vm_id]
        del session.attachments[params.volume_id]
        if not session.attachments:
            del self.sessions[params.vm_id]
        return Done()

    def _RestartVmBackend(self, params: stord.RestartVmBackend) -> stord.VmBackendInfo:
        session = self.sessions.get(params.vm_id)
        if session is None:
            raise NotFound("no storage daemon")
        if self._is_restarting(session):
            raise Unavailable("it is just starting")
        if not session.serving or not self.keeps_vms:
            raise FailedPrecondition("it cannot be replaced under the guest")
        if not self.vcpus_run(params.vm_id):
            self.violate(f"I5: storage daemon of {params.vm_id} replaced while its vCPUs stand")
        if params.meta.operation_id not in session.restarts:
            session.restarts.append(params.meta.operation_id)
            session.incarnation += 1
        return self._session(params.vm_id)

    def _RecoverVmBackend(self, params: stord.RecoverVmBackend) -> stord.VmBackendInfo:
        session = self.sessions.get(params.vm_id)
        if session is None:
            raise NotFound("no attachments")
        if self._is_restarting(session):
            self.violate(f"backend of {params.vm_id} recovered that comes back by itself")
        if not session.serving:
            if self.vcpus_run(params.vm_id):
                self.violate(f"backend of {params.vm_id} came back while its vCPUs ran")
            session.serving = True
            session.incarnation += 1
        return self._session(params.vm_id)

    def lose_backend(self, vm_id: str) -> None:
        """The storage daemon of a VM dies."""
        self.sessions[vm_id].serving = False
        self.sessions[vm_id].losses += 1

    def reboot(self) -> None:
        """No storage daemon is left; what was attached is recorded, and void."""
        for session in self.sessions.values():
            session.void, session.serving = True, False

    def _forget(self, vm_id: str) -> None:
        for uid in self.sessions.pop(vm_id).attachments:
            self.volumes[uid].readers.discard(vm_id)
            if self.volumes[uid].attached_to == vm_id:
                self.volumes[uid].attached_to = ""

    def _is_restarting(self, session: SimSession) -> bool:
        return session.serving and self.now() < session.restarting_until

    def _state(self, session: SimSession) -> stord.BackendState:
        if self._is_restarting(session):
            return stord.BackendState.RESTARTING
        if session.void:
            return stord.BackendState.ABSENT
        return stord.BackendState.SERVING if session.serving else stord.BackendState.LOST

    # --- snapshots

    def _CreateSnapshot(self, params: stord.CreateSnapshot) -> stord.SnapshotsReply:
        volumes = {uid: self._volume(uid) for uid in params.volume_ids}
        if any(params.snapshot_id in volume.snapshots for volume in volumes.values()):
            return self._parts(params)
        for uid, volume in volumes.items():
            if volume.attached_to != params.vm_id:
                raise FailedPrecondition(f"{uid} is attached to {volume.attached_to!r}")
            if self._job_of(uid):
                raise Conflict("a job is under way")
        if params.snapshot_id in self.taken:
            self.violate(f"snapshot {params.snapshot_id} was taken a second time")
        self.taken.add(params.snapshot_id)
        for volume in volumes.values():
            volume.snapshots[params.snapshot_id] = False
            volume.contents[params.snapshot_id] = volume.content
        return self._parts(params)

    def _parts(self, params: stord.CreateSnapshot) -> stord.SnapshotsReply:
        found = [self._part(uid, params.snapshot_id) for uid in params.volume_ids]
        return stord.SnapshotsReply(snapshots=found)

    def _DeleteSnapshot(self, params: stord.SnapshotRef) -> JobInfo:
        volume, snapshot = self._volume(params.volume_id), params.snapshot_id
        if snapshot not in volume.snapshots:
            raise NotFound("no such snapshot")
        if self._clones(snapshot):
            self.violate(f"snapshot {snapshot} deleted under its clones")
            raise InUse("it has clones")
        job = self._begin(
            params.volume_id,
            JobKind.DELETE_SNAPSHOT,
            params.meta.operation_id,
            lambda: volume.snapshots.pop(snapshot, None),
        )
        volume.snapshots[snapshot] = True
        return job

    def _RestoreSnapshot(self, params: stord.SnapshotRef) -> stord.VolumeInfo:
        volume = self._volume(params.volume_id)
        if volume.holders:
            raise InUse(f"attached to {volume.holders}")
        if params.snapshot_id not in volume.snapshots:
            raise NotFound("no such snapshot")
        if self._job_of(params.volume_id):
            raise Conflict("a job is under way")
        operation = params.meta.operation_id
        if volume.restored.setdefault(operation, volume.attachments) != volume.attachments:
            self.violate(f"volume {params.volume_id} restored again over what was written since")
        volume.content = volume.contents[params.snapshot_id]
        return self._info(params.volume_id, volume)

    def _clones(self, snapshot_id: str) -> list[str]:
        return [
            uid
            for uid, volume in self.volumes.items()
            if volume.parent is not None and volume.parent.snapshot_id == snapshot_id
        ]

    def _part(self, volume_id: str, snapshot_id: str) -> stord.SnapshotInfo:
        volume = self.volumes[volume_id]
        return stord.SnapshotInfo(
            snapshot_id=snapshot_id,
            volume_id=volume_id,
            created_at="2026-01-01T00:00:00Z",
            size_bytes=volume.size_bytes,
            used_by=self._clones(snapshot_id),
            deleting=volume.snapshots[snapshot_id],
        )

    # --- jobs

    def _BackupVolume(self, params: stord.BackupVolume) -> JobInfo:
        self._volume(params.volume_id)
        return self._begin(params.volume_id, JobKind.BACKUP, params.meta.operation_id)

    def _BackupVm(self, params: stord.BackupVm) -> JobInfo:
        volume_ids = [part.volume_id for part in params.volumes]
        if len({frozenset(self._volume(each).holders) for each in volume_ids}) > 1:
            raise FailedPrecondition("some are attached, some are not")
        job_id = params.meta.operation_id
        if job_id not in self.jobs and any(map(self._job_of, volume_ids)):
            raise Conflict("a job is under way")
        info = self._begin(volume_ids[0], JobKind.BACKUP, job_id)
        self.jobs[job_id].info = _replace(info, volume_ids=volume_ids)
        return self.jobs[job_id].info

    def _CheckVolume(self, params: stord.CheckVolume) -> JobInfo:
        if self._volume(params.volume_id).holders:
            raise FailedPrecondition("it is attached")
        kind = JobKind.REPAIR if params.repair else JobKind.CHECK
        return self._begin(params.volume_id, kind, params.meta.operation_id)

    def _MoveVolume(self, params: stord.MoveVolume) -> JobInfo:
        volume, backend = self._volume(params.volume_id), params.backend
        if params.meta.generation < volume.generation:
            raise StaleGeneration(f"{params.meta.generation} < {volume.generation}")
        if volume.snapshots or _source(backend) != _source(volume.backend):
            raise FailedPrecondition("it has snapshots, or another source")

        def arrive() -> None:
            places = {name: getattr(backend, name) for name in PLACES}
            volume.backend = _replace(volume.backend, **places)

        known = params.meta.operation_id in self.jobs
        info = self._begin(params.volume_id, JobKind.MOVE, params.meta.operation_id, arrive)
        job = self.jobs[info.job_id]
        if known:
            return info
        if params.waits and volume.attached_to and info.state is JobState.RUNNING:
            job.waits, job.ends_at = True, float("inf")
            job.info = _replace(info, waits=True)
        elif volume.attached_to and self.vcpus_run(volume.attached_to):
            self.violate(f"the mirror of {params.volume_id} began under vCPUs that run")
        return job.info

    def _BeginMirror(self, params: stord.BeginMirror) -> JobInfo:
        job = self.jobs.get(params.job_id)
        if job is None:
            raise NotFound("no such job")
        if job.waits:
            vm_id = self._volume(job.info.volume_id).attached_to
            if vm_id and self.vcpus_run(vm_id):
                self.violate(f"the mirror of {job.info.volume_id} began under vCPUs that run")
            job.waits, job.ends_at = False, self.now() + self.job_s[0]
            job.info = _replace(job.info, waits=False)
        return job.info

    def _GetJob(self, params: stord.JobRef) -> JobInfo:
        if params.job_id not in self.jobs:
            raise NotFound("no such job")
        return self.jobs[params.job_id].info

    def _ListJobs(self, _: Any) -> stord.JobsReply:
        return stord.JobsReply(jobs=[job.info for job in self.jobs.values()])

    def _CancelJob(self, params: stord.JobRef) -> JobInfo:
        info = self._GetJob(params)
        if info.state in (JobState.DONE, JobState.FAILED):
            raise FailedPrecondition("it has ended")
        self._end(self.jobs[params.job_id], JobState.CANCELLED)
        return self.jobs[params.job_id].info

    def _begin(
        self,
        volume_id: str,
        kind: JobKind,
        job_id: str,
        effect: Callable[[], object] = lambda: None,
    ) -> JobInfo:
        known = self.jobs.get(job_id)
        if known is not None:
            if (known.info.volume_id, known.info.kind) != (volume_id, kind):
                self.violate(f"job {job_id} means two things")
            return known.info
        if self._job_of(volume_id):
            raise Conflict("a job is under way")
        info = JobInfo(
            job_id=job_id,
            volume_id=volume_id,
            kind=kind,
            state=JobState.RUNNING,
            total_bytes=100,
        )
        ends_at = self.now() + self.job_s[zlib.crc32(job_id.encode()) % len(self.job_s)]
        self.jobs[job_id] = SimJob(info, ends_at, effect)
        return info

    def advance(self) -> None:
        """Let jobs end whose time has come; some fail."""
        for job in list(self.jobs.values()):
            if job.info.state is JobState.RUNNING and job.ends_at <= self.now():
                failing = self.mishaps and zlib.crc32(job.info.job_id.encode()) % 7 == 0
                self._end(job, JobState.FAILED if failing else JobState.DONE)

    def _end(self, job: SimJob, state: JobState) -> None:
        if job.info.state is not JobState.RUNNING:
            return
        volume = self.volumes.get(job.info.volume_id)
        problem = {
            JobState.FAILED: Internal("sim: the job failed").data(),
            JobState.CANCELLED: Cancelled("sim: cancelled").data(),
        }.get(state)
        job.info = _replace(job.info, state=state, error=problem, done_bytes=50)
        if state is JobState.DONE:
            job.effect()
        elif volume is not None:
            volume.snapshots = dict.fromkeys(volume.snapshots, False)
            if volume.creating:  # nothing half-made stays
                del self.volumes[job.info.volume_id]

    def _job_of(self, volume_id: str) -> SimJob | None:
        running = [job for job in self._jobs_of(volume_id) if job.info.state is JobState.RUNNING]
        return running[0] if running else None

    def _jobs_of(self, volume_id: str) -> list[SimJob]:
        return [
            job
            for job in self.jobs.values()
            if volume_id in (job.info.volume_id, *job.info.volume_ids)
        ]

    # --- answers

    def _volume(self, volume_id: str) -> SimVolume:
        if volume_id not in self.volumes:
            raise NotFound(f"no volume {volume_id}")
        return self.volumes[volume_id]

    def _info(self, uid: str, volume: SimVolume) -> stord.VolumeInfo:
        job = self._job_of(uid)
        state = "creating" if volume.creating else "open" if volume.open else "closed"
        wanted = volume.backend.size_bytes
        return stord.VolumeInfo(
            volume_id=uid,
            generation=volume.generation,
            format=volume.backend.format,
            size_bytes=volume.size_bytes,
            allocated_bytes=0,
            path=f"/sim/{uid}",
            attached_to=volume.attached_to,
            readers=sorted(volume.readers),
            state=state,
            applied=volume.applied,
            pending_size_bytes=wanted if wanted != volume.size_bytes else 0,
            limits=volume.backend.limits,
            snapshots=[self._part(uid, snapshot) for snapshot in volume.snapshots],
            space=stord.SpaceLevel.CRITICAL if volume.full else stord.SpaceLevel.OK,
            space_policy=volume.backend.space_policy,
            job=job.info.job_id if job is not None else "",
            class_name=volume.backend.class_name,
            pool=volume.backend.pool,
            backend=volume.backend,
            encryption_key=volume.key,
        )

    def _attachment(self, vm_id: str, volume_id: str) -> stord.AttachmentInfo:
        session = self.sessions[vm_id]
        return stord.AttachmentInfo(
            volume_id=volume_id,
            vm_id=vm_id,
            export_path=f"/sim/{vm_id}/{volume_id}.sock",
            read_only=session.attachments[volume_id],
            crash_class=stord.CrashClass.RESET_VM,
            backend=self._state(session),
        )

    def _session(self, vm_id: str) -> stord.VmBackendInfo:
        session = self.sessions[vm_id]
        return stord.VmBackendInfo(
            vm_id=vm_id,
            backend=self._state(session),
            losses=session.losses,
            last_restart=f"{session.incarnation} follows {session.incarnation - 1}",
            attachments=[self._attachment(vm_id, volume) for volume in session.attachments],
        )


def _made(volume: SimVolume) -> None:
    volume.creating = False


def _same_place(one: stord.VolumeBackend, other: stord.VolumeBackend) -> bool:
    return all(getattr(one, name) == getattr(other, name) for name in PLACES)


def _key(backend: stord.VolumeBackend) -> str:
    return backend.encryption.key if backend.encryption is not None else ""


def _source(backend: stord.VolumeBackend) -> object:
    return (backend.source, backend.snapshot, backend.backup)
