"""What stord does that outlives its call, and snapshots: a part of its API. Sizes are bytes.

`chv.common.wire.stord` has the methods, and these names as well.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from msgspec import Meta

from chv.common.errors import ErrorData
from chv.common.wire.storage import SnapshotInfo, VolumeBackend
from chv.common.wire.types import CallMeta, Message, Reply, ShortText, SizeBytes, Uid

TOGETHER_MAX = 16  # volumes that one call freezes in one instant


class CreateSnapshot(Message, frozen=True, kw_only=True):
    """Freeze the state of volumes, all in the same instant or none.

    `vm_id`: the VM that all of them are attached to; empty: none of them is attached. The same
    snapshot_id again gives the same answer. `meta.generation` is ignored.
    """

    meta: CallMeta
    snapshot_id: Uid
    volume_ids: Annotated[list[Uid], Meta(min_length=1, max_length=TOGETHER_MAX)]
    vm_id: Annotated[str, Meta(pattern=r"^([0-9a-f-]{36})?\Z")] = ""


class SnapshotRef(Message, frozen=True, kw_only=True):
    """One volume's part of a snapshot. `meta.generation` is ignored."""

    meta: CallMeta
    volume_id: Uid
    snapshot_id: Uid


class SnapshotsReply(Reply, frozen=True, kw_only=True):
    """Snapshots, by volume and age."""

    snapshots: list[SnapshotInfo] = []


class JobKind(StrEnum):
    """What runs long."""

    CREATE = "create"
    DELETE_SNAPSHOT = "delete_snapshot"
    BACKUP = "backup"
    MOVE = "move"
    CHECK = "check"
    REPAIR = "repair"
    REKEY = "rekey"


class JobState(StrEnum):
    """All but `running` are final."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


class JobInfo(Reply, frozen=True, kw_only=True):
    """Work that outlives its call. At most one is under way per volume.

    `job_id` is the operation id of the call that began it. `volume_ids`: all of them, where it is
    of several; `volume_id` is the first. `result` depends on the kind: check and repair: errors,
    leaks, fixed; backup: path, sequence, bytes (of several: the paths, and all bytes).
    """

    job_id: str
    volume_id: str
    kind: JobKind
    state: JobState
    done_bytes: SizeBytes = 0
    total_bytes: SizeBytes = 0
    message: str = ""
    error: ErrorData | None = None
    result: dict[str, str] = {}
    volume_ids: list[str] = []
    started_at: str = ""
    ended_at: str = ""
    waits: bool = False  # for BeginMirror


class JobRef(Message, frozen=True, kw_only=True):
    """A job by its id."""

    job_id: ShortText


class BeginMirror(JobRef, frozen=True, kw_only=True):
    """A move that waits. The vCPUs stand until `until_s` of CLOCK_MONOTONIC, in seconds."""

    until_s: float


class JobsReply(Reply, frozen=True, kw_only=True):
    """Jobs under way and the last final ones, newest first."""

    jobs: list[JobInfo] = []


class BackupVolume(Message, frozen=True, kw_only=True):
    """Copy the volume's present state to `target`.

    `target`: a directory below storage.backup_paths, which gets `<sequence>.qcow2` and
    `backup.json`; or `nbd://host:port/export` of an allowed server, which gets the data raw.
    `incremental`: only what changed since the backup before, which must have gone to the same
    target; FAILED_PRECONDITION where there is none or the record of changes was lost.
    """

    meta: CallMeta
    volume_id: Uid
    target: ShortText
    incremental: bool = False
    bps_max: Annotated[int, Meta(ge=0, le=2**50)] = 0  # 0: as fast as it goes


class BackupPart(Message, frozen=True, kw_only=True):
    """One volume of a VM's backup; `target` as in BackupVolume, another for each volume."""

    volume_id: Uid
    target: ShortText


class BackupVm(Message, frozen=True, kw_only=True):
    """Copy volumes as they all were in one instant, as BackupVolume does each: one job for all.

    All are attached to the VM, or none to any. All of them are kept, or none is.
    `meta.generation` is ignored. `bps_max` is shared evenly.
    """

    meta: CallMeta
    vm_id: Uid
    volumes: Annotated[list[BackupPart], Meta(min_length=1, max_length=TOGETHER_MAX)]
    incremental: bool = False
    bps_max: Annotated[int, Meta(ge=0, le=2**50)] = 0


class CheckVolume(Message, frozen=True, kw_only=True):
    """qemu-img check of a volume that is not attached, with `repair` its repair."""

    meta: CallMeta
    volume_id: Uid
    repair: bool = False


class MoveVolume(Message, frozen=True, kw_only=True):
    """Bring the volume to another place while its VM runs: a mirror, then a pivot.

    `backend` is the volume's new description: class, place, pool, format may differ, nothing
    else. Refused where it has snapshots or linked clones. `replace_backend`: where the new place
    needs a network and the VM's storage daemon has none, that is replaced first as by
    RestartVmBackend; the vCPUs run. `waits`: the mirror under a guest begins only by BeginMirror,
    when the caller has made the vCPUs stand: requests that are under way at that moment may
    otherwise not reach the new place.
    """

    meta: CallMeta
    volume_id: Uid
    backend: VolumeBackend
    bps_max: Annotated[int, Meta(ge=0, le=2**50)] = 0
    replace_backend: bool = False
    waits: bool = False
