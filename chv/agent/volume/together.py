"""A backup of all disks of a VM: one operation of the VM, a request on each of its volumes. Pure.

The first of the volumes begins stord's job, watches it, and ends the operation; the others keep
their request, so that no other verb comes between, until the operation has ended. Fails as the
verbs on a volume do.
"""

from __future__ import annotations

from chv.agent.records import BackupPart, StoredObject, VolumeRequest
from chv.agent.tables import Tables
from chv.agent.volume import verbs
from chv.common.errors import FailedPrecondition, NotFound
from chv.common.wire.agent import BackUpVm, VolumeVerb
from chv.common.wire.resources import VirtualMachine


def requested(
    tables: Tables, vm: StoredObject, request: BackUpVm, operation_id: str
) -> dict[str, VolumeRequest]:
    """Return what is to be recorded on each volume that the VM writes, by its uid."""
    verbs.check_target(request.target)
    parts = tuple(
        BackupPart(volume_uid=volume.uid, target=f"{request.target.rstrip('/')}/{volume.key[2]}")
        for volume in _volumes(tables, vm)
    )
    wanted = VolumeRequest(
        operation_id=operation_id,
        verb=VolumeVerb.BACKUP.value,
        target=request.target,
        incremental=request.incremental,
        bps_max=request.bps_max,
        vm_uid=vm.uid,
        parts=parts,
    )
    return {part.volume_uid: wanted for part in parts}


def _volumes(tables: Tables, vm: StoredObject) -> list[StoredObject]:
    assert isinstance(vm.resource, VirtualMachine)
    names = [disk.volume for disk in vm.resource.spec.disks if not disk.read_only]
    if vm.deleting or not names:
        why = "it is being deleted" if vm.deleting else "the VM has no disk that it writes"
        raise FailedPrecondition(f"{why}, so no backup", resource=vm.title)
    found = []
    for name in names:
        volume = tables.find("Volume", vm.key[1], name)
        if volume is None:
            raise NotFound(f"there is no Volume {name!r}", resource=vm.title, field="spec.disks")
        if volume.deleting:
            raise FailedPrecondition("it is being deleted, so no backup", resource=volume.title)
        found.append(volume)
    return found


def under_way(tables: Tables, wanted: dict[str, VolumeRequest]) -> str:
    """Return the operation of the very same backup, '' for none; Conflict with another verb."""
    known = [verbs.under_way(tables.objects[uid], request) for uid, request in wanted.items()]
    return next((each for each in known if each), "")
