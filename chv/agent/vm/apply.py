"""The effects: one idempotent effect per step of the plan, journalled before it is begun.

`Applier.apply` is used by one worker for one VM. A crash at any point leaves either the journal
without the effect or the effect with its intent; the next pass sees which. Fails with the error
of the port; the worker decides what that means.
"""

from __future__ import annotations

from contextlib import suppress
from typing import assert_never

import anyio
import msgspec

from chv.agent.cascade import finish_delete
from chv.agent.context import Context
from chv.agent.ports import WORKER_KIND, SeedNic, SeedRequest, SpawnRequest, VmHandle
from chv.agent.records import (
    Change,
    PutFacts,
    PutWorker,
    StoredObject,
    WorkerRow,
)
from chv.agent.vm import holding, model, plugging, rebuilding, restoring, steps, stopping
from chv.agent.vm.config import Parts, served_disks, vmm_config
from chv.agent.vm.desired import desired_vm, facts_of, handle_of, same_wish, vm_of
from chv.agent.vm.disks import Asker, attach, detach
from chv.agent.vm.ending import forget_worker
from chv.agent.vm.journal import NAMES, title
from chv.agent.vm.nics import attach_request, hostname_of
from chv.agent.vm.observe import Memory, Sight, observe
from chv.agent.vm.restarting import restart_storage
from chv.common.errors import Conflict, FailedPrecondition, NotFound
from chv.common.failpoint import failpoint
from chv.common.wire import nwd, stord
from chv.common.wire.resources import CloudInitSpec, VirtualMachine

STEP_S = 90.0  # no single effect but the stop ladder may take longer
RESTORE_S = 600.0  # memory is read from the disk
AWAIT_DISKS_S = 20.0

_replace = msgspec.structs.replace


class Applier:
    """The effects on one VM, for one pass."""

    def __init__(
        self, context: Context, desired: model.DesiredVm, sight: Sight, memory: Memory
    ) -> None:
        self._context = context
        self._desired = desired  # what the plan was made for
        self._uid = desired.uid
        self._sight = sight
        self._memory = memory
        self._operation_id = ""
        self._served = dict(sight.attachments)
        self._nics = dict(sight.nics)
        self._seeded: CloudInitSpec | None = None  # what the seed disk was written from

    async def apply(self, step: steps.Step) -> None:
        """Journal the step and do it."""
        name = NAMES[type(step)]
        verb = "drain" if self._desired.held else "reconcile"
        operation = await self._context.operations.require(self._stored, verb, self._desired.held)
        self._operation_id = operation.id
        await self._context.operations.begin_step(operation.id, title(name, step))
        await failpoint(f"agent.vm.{name}.before")
        if isinstance(step, steps.SpawnStep | steps.StopStep):
            await self._effect(step)  # has deadlines of its own
        else:
            with anyio.fail_after(RESTORE_S if self._reads_memory(step) else STEP_S):
                await self._effect(step)
        await failpoint(f"agent.vm.{name}.after")

    def _reads_memory(self, step: steps.Step) -> bool:
        return isinstance(step, steps.CreateStep) and bool(self._row.config.restore_dir)

    async def _effect(self, step: steps.Step) -> None:
        match step:
            case steps.AdoptStep():
                await self._adopt()
            case steps.SelectVmmStep():
                await self._select()
            case steps.PrepareStep():
                await self._prepare()
            case steps.AttachVolumeStep():
                await self._attach_volumes(step)
            case steps.AttachVolumesStep(volumes=volumes):
                await self._attach_volumes(*volumes)
            case steps.RestartStorageStep():
                await restart_storage(self._context, self._uid, self._desired.storage_request)
            case steps.AttachNicStep(nic_id=nic_id):
                await self._attach_nic(nic_id)
            case steps.EnsureSeedStep():
                await self._seed()
            case steps.RestoreDisksStep():
                await restoring.restore_disks(self._context, self._uid, self._operation_id)
            case steps.WithdrawStep(snapshot_uid=snapshot_uid):
                await self._context.world.saves.withdraw(self._uid, snapshot_uid)
                await self._put_facts(lent="")
            case steps.RunRestoredStep():
                await restoring.run_restored(self._context, self._uid)
            case steps.SpawnStep():
                await self._spawn()
            case steps.StopStep():
                await self._stop(step)
            case steps.DetachVolumeStep(volume_uid=volume_uid):
                await self._detach_volume(volume_uid)
            case steps.ForgetWorkerStep():
                await forget_worker(self._context, self._uid, self._memory)
            case steps.DetachNicStep(nic_id=nic_id):
                await self._detach_nic(nic_id)
            case steps.RemoveFilesStep():
                await self._remove_files()
            case steps.FinishDeleteStep():
                await finish_delete(self._context, self._uid)
            case steps.SwapRootStep():
                await rebuilding.swap(self._context, self._uid)
            case steps.DropRootStep():
                await rebuilding.drop(self._context, self._uid)
            case steps.AbandonRebuildStep():
                await rebuilding.abandon(self._context, self._uid)
            case steps.WaitStep():
                raise AssertionError("a WaitStep has no effect")
            case _:
                await self._on_vmm(step)

    async def _on_vmm(self, step: steps.VmmStep) -> None:
        """The effects on a VMM that is there."""
        port, vm = self._context.world.vmm, self._handle
        match step:
            case steps.CreateStep():
                await restoring.create(self._context, vm, self._row)
            case steps.AttachConsoleStep():
                await port.attach_console(vm)
            case steps.BootStep():
                await holding.boot(self._context, vm)
                await self._put_worker(booted=True, recovering=False)
            case steps.MarkRecoveringStep():
                await self._put_worker(recovering=True)
                # While the disks are away: QEMU starts a disk that comes back where the guest
                # left it, and under vCPUs that stand the storage daemon refuses its rings.
                await port.reset(vm)
            case steps.PauseStep():
                await port.pause(vm)
            case steps.HaltStep():
                await port.halt(vm)
            case steps.RecoverBackendStep():
                await self._recover_backend()
            case steps.AwaitDisksStep():
                await self._await_disks()
            case steps.ResetStep():
                await self._reset()
            case steps.ResumeStep():
                await holding.run_on(self._context, vm)
            case steps.AddDiskStep():
                await plugging.plug(self._context, vm, self._desired, step, self._served)
            case steps.RemoveDiskStep(disk_id=disk_id):
                await plugging.unplug(self._context, vm, disk_id)
            case steps.AddNicStep():
                await plugging.plug_nic(self._context, vm, step, self._nics)
            case steps.RemoveNicStep():
                await plugging.unplug_nic(self._context, vm, step.nic_id)
            case steps.SetCpusStep(cpus=cpus):
                await port.set_cpus(vm, cpus)
                await self._put_sizes(cpus=cpus)
            case steps.SetMemoryStep(memory_bytes=memory_bytes):
                await port.set_memory(vm, memory_bytes)
                await self._put_sizes(memory_bytes=memory_bytes)
            case steps.ThawStep():
                await port.thaw_guest(vm)
                await self._put_worker(frozen=False)
            case steps.CleanupStep():
                await port.detach_console(vm)
                await port.cleanup(vm, self._row.record)
            case _:
                assert_never(step)

    # --- what the effects need; always read anew

    @property
    def _stored(self) -> StoredObject:
        stored = self._context.stored(self._uid)
        if stored is None:
            raise Conflict("the VM is gone", resource=self._uid)
        return stored

    @property
    def _vm(self) -> VirtualMachine:
        return vm_of(self._stored)

    @property
    def _handle(self) -> VmHandle:
        return handle_of(self._stored)

    @property
    def _row(self) -> WorkerRow:
        row = self._context.ledger.tables.workers.get(self._uid)
        if row is None:
            raise Conflict("the VMM was forgotten", resource=self._uid)
        return row

    async def _put_worker(self, **changes: object) -> None:
        """Change the row as it is by then: others mark a freeze in it."""
        async with self._context.ledger.writing():
            row = _replace(self._row, **changes)
            await self._context.ledger.commit_held(PutWorker(row=row))

    async def _put_sizes(self, **sizes: int) -> None:
        """Record what the VMM was given, and so what its spec has by now."""
        async with self._context.ledger.writing():
            row = _replace(self._row, config=_replace(self._row.config, **sizes))
            if row.spec is not None:
                now = self._vm.spec
                row = _replace(row, spec=_replace(row.spec, cpus=now.cpus, memory=now.memory))
            await self._context.ledger.commit_held(PutWorker(row=row))

    async def _put_facts(self, **changes: object) -> None:
        """Change facts on top of what they are by then."""
        async with self._context.ledger.writing():
            facts = _replace(facts_of(self._stored), **changes)
            await self._context.ledger.commit_held(PutFacts(uid=self._uid, facts=facts))

    # --- start

    async def _select(self) -> None:
        selection = await self._context.world.vmm.select(self._vm.spec.vmm)
        await self._put_facts(selection=selection)

    async def _prepare(self) -> None:
        await self._put_facts(files_made=True)
        await self._context.world.vmm.prepare(self._handle)

    async def _attach_volumes(self, *volumes: steps.AttachVolumeStep) -> None:
        vm = Asker(
            vm_id=self._uid,
            slot=facts_of(self._stored).slot,
            layout=self._context.world.layout,
            # The storage daemon starts with the first disk and must suit all of them.
            network=any(each.network for each in self._sight.volumes.values()),
        )
        self._served |= await attach(self._context, vm, volumes, self._operation_id)

    async def _attach_nic(self, nic_id: str) -> None:
        desired = desired_vm(self._context.ledger.tables, self._stored)
        if (nic := next((n for n in desired.nics if n.nic_id == nic_id), None)) is None:
            raise Conflict("the interface is not wanted any more", resource=nic_id)
        request = attach_request(
            self._context.ledger.tables,
            self._vm,
            nic,
            self._context.meta(self._operation_id, nic.generation),
            self._context.world.layout.vmm_uid(facts_of(self._stored).slot),
        )
        self._nics[nic_id] = await self._context.nwd.call(nwd.ATTACH_NIC, request)
        self._wake_network(nic.network_uid, [*nic.group_uids, *self._groups_seen(nic_id)])

    def _groups_seen(self, nic_id: str) -> list[str]:
        seen = self._sight.nics.get(nic_id)
        return seen.security_groups if seen is not None else []

    def _wake_network(self, network_uid: str, groups: list[str]) -> None:
        """Let those be looked at who count this NIC."""
        for uid in dict.fromkeys((network_uid, *groups)):
            self._context.wake(uid)

    async def _seed(self) -> None:
        desired = desired_vm(self._context.ledger.tables, self._stored)
        known = {nic.nic_id: nic for nic in (await self._context.nics.fresh()).nics}
        cloud_init = self._vm.spec.cloud_init
        request = SeedRequest(
            hostname=hostname_of(self._vm),
            instance=facts_of(self._stored).rebuilds,
            ssh_authorized_keys=tuple(cloud_init.ssh_authorized_keys),
            user_data=cloud_init.user_data,
            nics=tuple(
                SeedNic(
                    name=nic.name,
                    mac=known[nic.nic_id].mac,
                    address6=known[nic.nic_id].address6,
                )
                for nic in desired.nics
                if nic.nic_id in known
            ),
        )
        seed = await self._context.world.seeds.ensure(self._handle, request)
        self._seeded = cloud_init
        await self._put_facts(seed_path=seed.path, host_key=seed.host_key_public)

    async def _spawn(self) -> None:
        """Record the intent, start the process, record it. In this order, whatever happens."""
        with anyio.fail_after(STEP_S):
            lent = await restoring.hand_over(self._context, self._handle, self._desired.restore)
            row = await self._intend(lent)
        request = SpawnRequest(vm=self._handle, config=row.config)
        await failpoint("agent.vm.spawn_process.before")
        # Not to be cut short: a process that appears after `find` denied it would be a second one.
        with anyio.CancelScope(shield=True):
            record = await self._context.world.vmm.spawn(request)
        await failpoint("agent.vm.spawn_process.after")
        await failpoint("agent.vm.spawn_record.before")
        await self._put_worker(record=record)
        await failpoint("agent.vm.spawn_record.after")

    async def _intend(self, handed_over: tuple[str, str]) -> WorkerRow:
        """Store the spawn intent, unless anything is not as it was when the start was planned."""
        sight = await observe(self._context, self._stored, self._desired, self._memory)
        async with self._context.ledger.writing() as tables:
            now = self._stored
            changed = self._seeded not in (None, vm_of(now).spec.cloud_init)
            if changed or not same_wish(desired_vm(tables, now), self._desired):
                raise Conflict("the VM was changed while it was starting", resource=now.title)
            if self._uid in tables.workers or sight.vm.stranger:
                raise Conflict("an earlier VMM is not forgotten yet", resource=now.title)
            self._context.budget.refuse_start(tables, now)
            row = self._intent(now, sight)
            if self._desired.restore:
                _, saved = restoring.saved_of(tables, self._desired.restore)
                config = restoring.restored_config(row.config, saved, *handed_over)
                row = _replace(row, config=config, spec=saved.spec)
            await self._context.ledger.commit_held(PutWorker(row=row))
        return row

    def _intent(self, stored: StoredObject, sight: Sight) -> WorkerRow:
        facts, world = facts_of(stored), self._context.world
        if facts.selection is None or not facts.seed_path:
            raise FailedPrecondition("the start was not prepared", resource=stored.title)
        worker_id = world.layout.worker_id(WORKER_KIND, self._uid, world.ids.nonce())
        parts = Parts(
            attachments=sight.attachments,
            nics=sight.nics,
            image=sight.image,
            seed_path=facts.seed_path,
            selection=facts.selection,
            worker_id=worker_id,
        )
        return WorkerRow(
            vm_uid=self._uid,
            worker_id=worker_id,
            driver=facts.selection.name,
            config=vmm_config(vm_of(stored), self._desired, parts, world.layout),
            generation=stored.resource.metadata.generation,
            spec=vm_of(stored).spec,
            boot_id=world.boot_id,
        )

    async def _adopt(self) -> None:
        record = self._sight.record
        if record is None:
            raise Conflict("the process to adopt is not there", resource=self._uid)
        await self._put_worker(record=record)

    # --- storage loss and reset

    async def _recover_backend(self) -> None:
        request = stord.RecoverVmBackend(
            meta=self._context.meta(self._operation_id, 0), vm_id=self._uid
        )
        self._memory.recovery_failures += 1  # taken back where it works
        await self._context.stord.call(stord.RECOVER_VM_BACKEND, request)
        self._memory.recovery_failures -= 1

    async def _await_disks(self) -> None:
        port, vm = self._context.world.vmm, self._handle
        self._memory.recovery_failures += 1
        with anyio.fail_after(AWAIT_DISKS_S):
            plugged = {disk.id for disk in await port.disks(vm)}
            served = served_disks(self._row.config)
            await port.await_disks(vm, tuple(d.id for d in served if d.id in plugged))
        self._memory.recovery_failures = 0

    async def _reset(self) -> None:
        """Fulfil what asks for a reset; only then may the vCPUs run on."""
        await self._context.world.vmm.reset(self._handle)
        async with self._context.ledger.writing():
            facts = _replace(facts_of(self._stored), reset_request="")
            row = self._row
            resets = row.storage_resets + row.recovering
            row = _replace(row, recovering=False, frozen=False, storage_resets=resets)
            changes: list[Change] = [PutFacts(uid=self._uid, facts=facts), PutWorker(row=row)]
            await self._context.ledger.commit_held(*changes)

    # --- stop and delete

    async def _stop(self, step: steps.StopStep) -> None:
        record = self._sight.record
        if record is None:
            raise Conflict("the process to stop is not there", resource=self._uid)
        await stopping.stop(self._context, self._uid, record, step)

    async def _detach_volume(self, volume_uid: str) -> None:
        await detach(self._context, self._uid, volume_uid, self._operation_id)
        self._memory.regrown |= {
            disk.grow_now
            for disk in self._desired.disks
            if disk.grow_now and disk.volume_uid == volume_uid
        }
        self._context.wake(volume_uid)

    async def _detach_nic(self, nic_id: str) -> None:
        seen = self._sight.nics.get(nic_id)
        known = seen.generation if seen is not None else 0
        generation = max(facts_of(self._stored).nic_generation, known)
        request = nwd.NicRef(meta=self._context.meta(self._operation_id, generation), nic_id=nic_id)
        with suppress(NotFound):  # that is what we want
            await self._context.nwd.call(nwd.DETACH_NIC, request)
        if seen is not None:
            self._wake_network(seen.network_id, seen.security_groups)

    async def _remove_files(self) -> None:
        await self._context.world.seeds.remove(self._handle)
        await self._context.world.vmm.remove(self._handle)
        await self._put_facts(files_made=False, seed_path="")
