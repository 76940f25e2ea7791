"""Which VMM is connected to a volume's export now, for whoever has to know before a growth."""

from __future__ import annotations

from chv.agent.context import Context
from chv.agent.vm.config import served_disks
from chv.agent.vm.desired import handle_of
from chv.agent.vm.observe import SILENT
from chv.common.errors import FailedPrecondition
from chv.common.wire.stord import BackendState, VmmClient

# Clients that take up a disk's new size while they are connected.
CLIENTS = {"qemu": VmmClient.QEMU}


async def connected_client(context: Context, volume_uid: str) -> VmmClient:
    """Return the VMM that is seen to be connected to the volume; NONE in any doubt."""
    sessions = (await context.sessions.fresh()).sessions
    holders = [
        session
        for session in sessions
        if any(each.volume_id == volume_uid for each in session.attachments)
    ]
    if len(holders) != 1 or holders[0].backend is not BackendState.SERVING:
        return VmmClient.NONE
    vm_uid = holders[0].vm_id
    stored, row = context.stored(vm_uid), context.ledger.tables.workers.get(vm_uid)
    if stored is None or row is None or row.driver not in CLIENTS or row.recovering:
        return VmmClient.NONE
    ids = {disk.id for disk in served_disks(row.config) if disk.volume_id == volume_uid}
    try:
        plugged = await context.world.vmm.disks(handle_of(stored))
    except (*SILENT, FailedPrecondition):
        return VmmClient.NONE
    if any(disk.connected and disk.id in ids for disk in plugged):
        return CLIENTS[row.driver]
    return VmmClient.NONE
