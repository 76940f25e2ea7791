"""A VM brought back to a snapshot: what must match, disks first, then memory, then it runs.

All that can be refused is refused before anything is touched, and once more right before the
disks are. From then on the VM either goes on from the snapshot or stays down and says why: it is
never booted by itself from disks that it did not leave so. Fails with FailedPrecondition.
"""

from __future__ import annotations

import msgspec

from chv.agent.context import Context
from chv.agent.ports import VmHandle
from chv.agent.records import (
    Change,
    Ending,
    EndKind,
    PutFacts,
    PutWorker,
    RestoreRequest,
    SavedVm,
    SnapshotPart,
    StoredObject,
    WorkerRow,
)
from chv.agent.tables import Tables
from chv.agent.vm.answering import await_answer
from chv.agent.vm.config import served_disks
from chv.agent.vm.desired import desired_vm, facts_of, handle_of, vm_of
from chv.agent.vm.holding import run_on
from chv.common.errors import (
    ChvError,
    Conflict,
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    NotFound,
    OutcomeUnknown,
    Unavailable,
)
from chv.common.failpoint import failpoint
from chv.common.wire import stord
from chv.common.wire.agent import OperationState
from chv.vmm.driver import DiskConfig, VmmConfig

FAILPOINTS = tuple(
    f"agent.vm_restore.{name}"
    for name in ("disks", "disk_done", "withdrawn", "resuming", "resumed")
)

RETRIED = (Unavailable, DeadlineExceeded, OutcomeUnknown, Conflict)

_replace = msgspec.structs.replace


# --- what must match


def saved_of(tables: Tables, uid: str) -> tuple[StoredObject, SavedVm]:
    """Return a snapshot that can be restored."""
    stored = tables.objects.get(uid)
    facts = stored.snapshot_facts if stored is not None else None
    if stored is None or facts is None:
        raise NotFound("the snapshot is gone", resource=uid)
    if not facts.taken or facts.saved is None or stored.deleting:
        raise FailedPrecondition(f"{stored.title} is not ready", resource=stored.title)
    return stored, facts.saved


def find_snapshot(tables: Tables, namespace: str, name: str) -> StoredObject:
    """Return the snapshot of a VM by name."""
    stored = tables.find("VirtualMachineSnapshot", namespace, name)
    if stored is None:
        raise NotFound(
            f"there is no VirtualMachineSnapshot {name!r} in namespace {namespace}",
            hint="chv get vmsnap",
        )
    return stored


def refuse_mismatch(tables: Tables, vm: StoredObject, saved: SavedVm) -> None:
    """Refuse a VM that is not as it was: its guest knows all of its devices."""
    if vm.uid != saved.vm_uid:
        raise FailedPrecondition(
            f"the snapshot is of VM {saved.name} with uid {saved.vm_uid}", resource=vm.title
        )
    desired, spec = desired_vm(tables, vm), vm_of(vm).spec
    _same(vm, "spec.boot.image", saved.spec.boot.image, spec.boot.image)
    disks = {f"{d.disk_id.removeprefix('disk-')}": d.volume_uid for d in desired.disks}
    had = {d.id.removeprefix("disk-"): d.volume_id for d in served_disks(saved.config)}
    _same(vm, "spec.disks", had, disks, "other disks, or volumes made anew under their names")
    nics = {nic.nic_id for nic in desired.nics}
    _same(vm, "spec.interfaces", {nic.id for nic in saved.config.nics}, nics, "on other networks")


def _same(vm: StoredObject, field: str, was: object, now: object, words: str = "") -> None:
    if was != now:
        raise FailedPrecondition(
            words or f"it was {was!r} and is {now!r} now",
            resource=vm.title,
            field=field,
            hint="give the VM what it had when the snapshot was taken",
        )


async def require_restorable(context: Context, vm: StoredObject, snapshot_uid: str) -> str:
    """Refuse whatever would fail later; return the VMM's binary that reads the memory back."""
    tables = context.ledger.tables
    stored, saved = saved_of(tables, snapshot_uid)
    refuse_mismatch(tables, vm, saved)
    if not await context.world.saves.is_kept(snapshot_uid):
        raise FailedPrecondition("its memory is gone from this node", resource=stored.title)
    assert stored.snapshot_facts is not None
    await _require_parts(context, stored, stored.snapshot_facts.parts)
    selection = facts_of(vm).selection
    if selection is not None and selection.name != saved.driver:
        raise FailedPrecondition(
            f"{saved.driver} wrote it, and the VM has {selection.name}", resource=stored.title
        )
    try:
        return await context.world.vmm.find_binary(saved.driver, saved.sha256, saved.config.binary)
    except FailedPrecondition as error:
        raise FailedPrecondition(
            f"{saved.driver} {saved.version} wrote it, and only that very file reads it: "
            f"{error.message}",
            resource=stored.title,
            field="status.vmm.sha256",
            hint=error.hint,
        ) from error


async def _require_parts(
    context: Context, stored: StoredObject, parts: tuple[SnapshotPart, ...]
) -> None:
    listed = {each.volume_id: each for each in (await context.volumes.fresh()).volumes}
    for part in parts:
        volume = listed.get(part.volume_uid)
        ids = [each.snapshot_id for each in volume.snapshots] if volume is not None else []
        if volume is None or stored.uid not in ids:
            raise FailedPrecondition(f"volume {part.volume} has it no more", resource=stored.title)
        if volume.job:
            raise Unavailable(f"job {volume.job} is under way on volume {part.volume}")
        if later := ids[ids.index(stored.uid) + 1 :]:
            known = [context.stored(uid) for uid in reversed(later)]
            names = ", ".join(each.title for each in known if each is not None) or str(later)
            raise FailedPrecondition(
                f"volume {part.volume} has later snapshots, which would be lost: {names}",
                resource=stored.title,
                hint="delete them first, the newest first",
            )


def asked(
    tables: Tables, stored: StoredObject, snapshot: StoredObject, operation_id: str, *, force: bool
) -> StoredObject:
    """Return the VM with the restore recorded; generation and revision are the caller's."""
    saved_of(tables, snapshot.uid)
    row, facts = tables.workers.get(stored.uid), facts_of(stored)
    if facts.saving:
        raise Conflict("it is being saved", resource=stored.title)
    if row is not None and not force and facts.restore is None:
        raise FailedPrecondition(
            "it runs: what it did since would be lost",
            resource=stored.title,
            hint=f"chv stop {stored.key[2]} first, or --force",
        )
    running = row is not None and facts.restore is None
    facts = _replace(
        facts,
        restore=RestoreRequest(operation_id=operation_id, snapshot_uid=snapshot.uid),
        replace_worker=row.worker_id if row is not None and running else facts.replace_worker,
        force_stop=running or facts.force_stop,
    )
    return _replace(stored, facts=facts)


def restores(stored: StoredObject) -> str:
    """Return the snapshot that a VM is being brought back to; empty: none."""
    request = facts_of(stored).restore
    return request.snapshot_uid if request is not None else ""


# --- disks


async def restore_disks(context: Context, vm_uid: str, operation_id: str) -> None:
    """Bring all disks back. A refusal before the first is touched ends the restore without harm."""
    stored = _vm(context, vm_uid)
    request = _request(stored)
    refusal: ChvError | None = None
    try:
        await require_restorable(context, stored, request.snapshot_uid)
    except (FailedPrecondition, NotFound) as error:
        refusal = error
    if refusal is not None:
        await give_up(context, vm_uid, refusal)
        return
    snapshot = context.stored(request.snapshot_uid)
    assert snapshot is not None and snapshot.snapshot_facts is not None
    await failpoint("agent.vm_restore.disks")
    for part in snapshot.snapshot_facts.parts:
        volume = context.stored(part.volume_uid)
        generation = volume.resource.metadata.generation if volume is not None else 0
        reference = stord.SnapshotRef(
            meta=context.meta(operation_id, generation),
            volume_id=part.volume_uid,
            snapshot_id=request.snapshot_uid,
        )
        await context.stord.call(stord.RESTORE_SNAPSHOT, reference)
        await failpoint("agent.vm_restore.disk_done")
    await _put(context, vm_uid, _replace(request, disks_touched=True))


async def give_up(context: Context, vm_uid: str, error: ChvError) -> None:
    """End a restore before a VMM has it: the VM stays down until somebody has looked."""
    async with context.ledger.writing() as tables:
        stored = tables.objects.get(vm_uid)
        if stored is None or facts_of(stored).restore is None:
            return
        request = _request(stored)
        touched = "; its disks are those of the snapshot" if request.disks_touched else ""
        given_up = f"it was not restored: {error}{touched}"
        facts = _replace(facts_of(stored), restore=None, given_up=given_up)
        operation = tables.operations.get(request.operation_id)
        await context.ledger.commit_held(
            PutFacts(uid=vm_uid, facts=facts),
            *context.operations.ending_open(
                operation, OperationState.FAILED, str(error), error.data()
            ),
        )


# --- memory


async def hand_over(context: Context, vm: VmHandle, snapshot_uid: str) -> tuple[str, str]:
    """Return the binary and the directory to start from; both empty where it is a plain start."""
    if not snapshot_uid:
        return "", ""
    failure: ChvError | None = None
    try:
        binary = await require_restorable(context, _vm(context, vm.uid), snapshot_uid)
        await _lend(context, vm.uid, snapshot_uid)
        return binary, await context.world.saves.hand_over(vm, snapshot_uid)
    except (FailedPrecondition, NotFound, DataLoss) as error:
        failure = error
    await give_up(context, vm.uid, failure)
    raise Conflict("the restore was given up", resource=vm.uid)


async def _lend(context: Context, vm_uid: str, snapshot_uid: str) -> None:
    """Record it first: whoever finds it there takes the files back."""
    async with context.ledger.writing():
        facts = _replace(facts_of(_vm(context, vm_uid)), lent=snapshot_uid)
        await context.ledger.commit_held(PutFacts(uid=vm_uid, facts=facts))


async def create(context: Context, vm: VmHandle, row: WorkerRow) -> None:
    """Make the VM in its VMM; a snapshot that the VMM refuses is not offered to it again."""
    refusal = ""
    await await_answer(context, vm)
    try:
        await context.world.vmm.create(vm, row.config)
    except RETRIED:
        raise
    except ChvError as error:
        if not row.config.restore_dir:
            raise
        refusal = str(error)
    if refusal:
        async with context.ledger.writing() as tables:
            now = tables.workers.get(vm.uid, row)
            ending = Ending(kind=EndKind.RESTORE_FAILED, reason=refusal)
            await context.ledger.commit_held(PutWorker(row=_replace(now, ending=ending)))
        raise Conflict("the VMM did not take the snapshot", resource=vm.uid)


def restored_config(fresh: VmmConfig, saved: SavedVm, binary: str, directory: str) -> VmmConfig:
    """Return what to start: this start's paths, and the machine as it was saved."""
    was = saved.config
    return _replace(
        fresh,
        binary=binary,
        restore_dir=directory,
        accelerator=was.accelerator,
        machine=was.machine,
        cpus=was.cpus,
        cpus_max=was.cpus_max,
        memory_bytes=was.memory_bytes,
        memory_max_bytes=was.memory_max_bytes,
        kernel=was.kernel,
        initramfs=was.initramfs,
        cmdline=was.cmdline,
        disks=_in_order(fresh, was),
        nics=was.nics,
    )


def _in_order(fresh: VmmConfig, was: VmmConfig) -> tuple[DiskConfig, ...]:
    by_id = {disk.id: disk for disk in fresh.disks}
    return tuple(
        _replace(by_id[disk.id], boot_index=disk.boot_index)
        for disk in was.disks
        if disk.id in by_id
    )


async def run_restored(context: Context, vm_uid: str) -> None:
    """Let the guest run on. That it may have is recorded first: it is never restored again."""
    stored = _vm(context, vm_uid)
    request, row = _request(stored), context.ledger.tables.workers.get(vm_uid)
    if row is None:
        raise Conflict("the VMM was forgotten", resource=stored.title)
    await context.world.saves.withdraw(vm_uid, request.snapshot_uid)
    await failpoint("agent.vm_restore.withdrawn")
    row = _replace(row, config=_replace(row.config, restore_dir=""))
    resuming = _replace(request, resuming=row.worker_id)
    await _put(context, vm_uid, resuming, row)
    await failpoint("agent.vm_restore.resuming")
    await run_on(context, handle_of(stored))
    await failpoint("agent.vm_restore.resumed")
    await _put(context, vm_uid, None, _replace(row, booted=True))


async def _put(
    context: Context, vm_uid: str, request: RestoreRequest | None, row: WorkerRow | None = None
) -> None:
    async with context.ledger.writing():
        stored = _vm(context, vm_uid)
        if facts_of(stored).restore is None:
            raise Conflict("the restore was given up", resource=stored.title)
        facts = _replace(facts_of(stored), restore=request)
        if row is not None:  # whose VMM has read it
            facts = _replace(facts, lent="")
        changes: list[Change] = [PutFacts(uid=vm_uid, facts=facts)]
        if row is not None:
            changes.append(PutWorker(row=row))
        await context.ledger.commit_held(*changes)


def _vm(context: Context, uid: str) -> StoredObject:
    stored = context.stored(uid)
    if stored is None:
        raise Conflict("the VM is gone", resource=uid)
    return stored


def _request(stored: StoredObject) -> RestoreRequest:
    request = facts_of(stored).restore
    if request is None:
        raise Conflict("the restore was given up", resource=stored.title)
    return request
