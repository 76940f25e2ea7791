"""Health, metrics and events of stord: a part of its API. Sizes are bytes.

`chv.common.wire.stord` has the methods, and these names as well.
"""

from __future__ import annotations

from chv.common.wire.storage import BackendState, CrashClass, SpaceLevel
from chv.common.wire.types import Feature, Reply, ShortText, SizeBytes


class VolumeHealth(Reply, frozen=True, kw_only=True):
    """`status`: healthy | degraded | failed | unknown."""

    volume_id: str
    status: str
    backend: BackendState
    last_error: str = ""
    last_error_at: str = ""


class VmStorageMetrics(Reply, frozen=True, kw_only=True):
    """Of the storage daemon of one VM, since it started: /proc/PID/io counts for all disks."""

    vm_id: str
    read_bytes: int
    write_bytes: int
    resident_bytes: int
    backend_pid: int


class VolumeMetrics(Reply, frozen=True, kw_only=True):
    """Of one volume. Operations and latency per volume: see `StorageMetrics.unsupported`."""

    volume_id: str
    size_bytes: SizeBytes
    allocated_bytes: SizeBytes
    snapshots: int
    limited: bool
    errors: int  # errors seen by stord since it started
    attached: bool


class PlaceSpace(Reply, frozen=True, kw_only=True):
    """Where bytes of volumes go: a file system, a volume group or thin pool, an RBD pool.

    `promised_bytes`: the sizes of all its volumes together, which may be more than there is.
    """

    location: str
    total_bytes: int
    free_bytes: int
    promised_bytes: int
    volumes: int
    level: SpaceLevel


class StorageMetrics(Reply, frozen=True, kw_only=True):
    """`unsupported` names what nobody counts, and why, instead of showing zeros."""

    vms: list[VmStorageMetrics] = []
    volumes: list[VolumeMetrics] = []
    places: list[PlaceSpace] = []
    unsupported: dict[str, str] = {}


class StordHealth(Reply, frozen=True, kw_only=True):
    """State of stord as a whole."""

    status: str  # healthy | degraded
    storage_daemon_version: str
    features: list[Feature] = []
    volumes: int = 0
    attachments: int = 0
    free_bytes: SizeBytes = 0
    last_error: str = ""
    places: list[PlaceSpace] = []


class StorageEvent(Reply, frozen=True, kw_only=True):
    """Something that the agent must act on.

    `kind`: backend_lost | backend_ready | backend_restarted | space | job. `backend_restarted`:
    a keep_vm VM lost its storage daemon and has it back. `space`: the level of a volume changed.
    `job`: one ended.
    """

    kind: str
    vm_id: str = ""
    volume_id: str = ""
    crash_class: CrashClass = CrashClass.RESET_VM
    space: SpaceLevel = SpaceLevel.UNKNOWN
    message: ShortText = ""
    at: str = ""
