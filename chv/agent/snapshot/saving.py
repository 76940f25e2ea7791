"""What saving a VM takes of it: what must hold before, the writing itself, and letting it run on.

A VM is saved while its vCPUs stand and nothing else is done to it. `require_still` proves that
for the whole time: the same VMM stands, was neither reset nor told to end. Fails with
FailedPrecondition or Unsupported before anything is touched, with Conflict where that may pass.
"""

from __future__ import annotations

import anyio

from chv.agent.context import Context
from chv.agent.ports import VmHandle
from chv.agent.records import SavedVm, SnapshotPart, StoredObject, WorkerRow
from chv.agent.vm.config import served_disks
from chv.agent.vm.desired import desired_vm, facts_of, handle_of, vm_of
from chv.agent.vm.holding import run_on
from chv.common import logs
from chv.common.errors import (
    ChvError,
    Conflict,
    FailedPrecondition,
    NotFound,
    Unsupported,
)
from chv.common.failpoint import failpoint
from chv.common.wire.resources import VirtualMachineSnapshot
from chv.vmm.driver import VmmState

SAVE_S_MAX = 570.0
RESUME_S_MAX = 15.0
STANDS_OR_RUNS = (VmmState.RUNNING, VmmState.PAUSED)

log = logs.get(__name__)


def vm_named(context: Context, snapshot: VirtualMachineSnapshot) -> StoredObject:
    """Return the VM that a snapshot is of."""
    name, namespace = snapshot.spec.virtual_machine, snapshot.metadata.namespace
    vm = context.ledger.tables.find("VirtualMachine", namespace, name)
    if vm is None:
        raise NotFound(f"there is no VM {name!r}")
    return vm


async def saveable(context: Context, vm: StoredObject) -> tuple[SavedVm, tuple[SnapshotPart, ...]]:
    """Return what is to be saved, and its volumes that are written; refuse what cannot be."""
    row = _running(context, vm)
    if row.record is None or row.spec is None:
        raise Conflict("its VMM is not adopted yet", resource=vm.title)
    seen = await context.world.vmm.observe(handle_of(vm))
    if seen.state not in STANDS_OR_RUNS:
        raise FailedPrecondition(f"the VM is {seen.state}", resource=vm.title)
    selection = facts_of(vm).selection
    saved = SavedVm(
        vm_uid=vm.uid,
        name=vm.key[2],
        driver=row.driver,
        version=seen.version or (selection.version if selection is not None else ""),
        sha256=await context.world.vmm.identify(row.record),
        config=row.config,
        spec=row.spec,
        created_at="",
        storage_resets=row.storage_resets,
    )
    return saved, _written(context, vm, row)


def _running(context: Context, vm: StoredObject) -> WorkerRow:
    row, name = context.ledger.tables.workers.get(vm.uid), vm.key[2]
    if row is None or not row.booted or row.ending is not None:
        raise FailedPrecondition(
            "it does not run, so it has no memory to save",
            resource=vm.title,
            hint=f"start it, or take its disks alone: chv snapshot create NAME --vm {name}",
        )
    refuse_unable(context, vm)
    if not row.config.save_dir:
        raise FailedPrecondition(
            "its VMM was started without a place for snapshots",
            resource=vm.title,
            hint=f"chv restart {name} first",
        )
    if row.recovering or row.frozen or facts_of(vm).saving or facts_of(vm).restore is not None:
        raise Conflict("it is being recovered, frozen, saved or restored", resource=vm.title)
    return row


def refuse_unable(context: Context, vm: StoredObject) -> None:
    """Refuse a VM whose VMM, where it has one yet, cannot save it."""
    driver = handle_of(vm).driver
    if driver and not context.world.vmm.can_save(driver):
        raise Unsupported(
            f"{driver} cannot save memory and devices",
            resource=vm.title,
            field="spec.virtualMachine",
            hint=f"take its disks alone: chv snapshot create NAME --vm {vm.key[2]}",
        )


def _written(context: Context, vm: StoredObject, row: WorkerRow) -> tuple[SnapshotPart, ...]:
    """Return the volumes that the VM writes; its VMM must have just those that it is to have."""
    disks = desired_vm(context.ledger.tables, vm).disks
    has = {(disk.id, disk.volume_id) for disk in served_disks(row.config)}
    if has != {(disk.disk_id, disk.volume_uid) for disk in disks}:
        raise Conflict("its disks are being changed", resource=vm.title)
    return tuple(
        SnapshotPart(volume_uid=disk.volume_uid, volume=disk.volume)
        for disk in disks
        if not disk.read_only
    )


async def write(context: Context, vm: VmHandle, saved: SavedVm, snapshot_uid: str) -> int:
    """Stop the VM, write memory and devices; return the bytes on disk. It stands afterwards."""
    port, saves = context.world.vmm, context.world.saves
    path = await saves.prepare(vm, snapshot_uid, saved.config.memory_bytes)
    await failpoint("agent.vm_snapshot.save")
    with anyio.fail_after(SAVE_S_MAX):
        await port.pause(vm)
        await _require_devices(context, vm, saved)
        await port.save(vm, path)
    await failpoint("agent.vm_snapshot.written")
    kept_bytes = await saves.keep(vm, snapshot_uid)
    await failpoint("agent.vm_snapshot.kept")
    return kept_bytes


async def _require_devices(context: Context, vm: VmHandle, saved: SavedVm) -> None:
    disks = {disk.id for disk in await context.world.vmm.disks(vm)}
    nics = set(await context.world.vmm.nics(vm))
    recorded = {disk.id for disk in served_disks(saved.config)}
    if disks != recorded or nics != {nic.id for nic in saved.config.nics}:
        raise Conflict("its disks or NICs were being changed")


async def require_still(context: Context, saved: SavedVm) -> None:
    """Raise unless the VM has stood still since it was saved."""
    stored = context.stored(saved.vm_uid)
    row = context.ledger.tables.workers.get(saved.vm_uid)
    if stored is None or row is None or row.config != saved.config or row.ending is not None:
        raise FailedPrecondition("the VM was stopped or changed while it was saved")
    if row.recovering or row.storage_resets != saved.storage_resets:
        raise FailedPrecondition("the VM has lost its disks while it was saved")
    seen = await context.world.vmm.observe(handle_of(stored))
    if seen.state is not VmmState.PAUSED:
        raise FailedPrecondition(f"the VM is {seen.state}, it did not stand still")


async def let_run(context: Context, vm: VmHandle) -> None:
    """Let the VM run on at once, where its owner does not want it paused; else its worker will."""
    try:
        with anyio.move_on_after(RESUME_S_MAX):
            stored, row = context.stored(vm.uid), context.ledger.tables.workers.get(vm.uid)
            free = row is not None and row.ending is None and not row.recovering
            if not free or stored is None or _is_held(stored):
                return
            if (await context.world.vmm.observe(vm)).state is VmmState.PAUSED:
                await run_on(context, vm)
    except ChvError as error:
        log.info("agent.vm_snapshot.not_resumed", vm_id=vm.uid, error=str(error))
    finally:
        context.wake(vm.uid)


def _is_held(stored: StoredObject) -> bool:
    return facts_of(stored).paused or bool(vm_of(stored).metadata.deletion_timestamp)
