"""What the agent's records say of a thing that was found: whose it is, whether they explain it.

And the one thing that can be taken up again: a VMM whose VM is recorded, while the record of the
process is not (a store that was restored from an older copy, or lost that row). It is recorded as
the VM's worker, with what the VM says that it runs; from then on it is observed as any other.
"""

from __future__ import annotations

from dataclasses import dataclass

from chv.agent.context import Context
from chv.agent.ports import VmHandle, VmmSelection
from chv.agent.records import FINAL_STATES, PutWorker, StoredObject, WorkerRow
from chv.agent.vm.config import Parts, vmm_config
from chv.agent.vm.desired import desired_vm, facts_of, handle_of, vm_of
from chv.agent.vm.observe import Memory, look_at_monitor, observe
from chv.common import logs
from chv.common.errors import Conflict, Unsupported
from chv.common.ids import short_uid
from chv.common.process.records import WorkerRecord
from chv.vmm.driver import VmmState

log = logs.get(__name__)
TAKEN_UP = frozenset({VmmState.RUNNING, VmmState.PAUSED})


@dataclass(frozen=True, slots=True)
class Explained:
    """What the records had at one moment, for other threads: VMMs recorded or intended, and uids
    of VMs and of their snapshots, those under deletion included.
    """

    worker_ids: frozenset[str]
    vms: frozenset[str]
    snapshots: frozenset[str]


class LeakRecords:
    """See the module."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def explained(self) -> Explained:
        """Return what the records have now."""
        workers = self._context.ledger.tables.workers.values()
        return Explained(
            worker_ids=frozenset(row.worker_id for row in workers),
            vms=self._uids("VirtualMachine"),
            snapshots=self._uids("VirtualMachineSnapshot"),
        )

    def _uids(self, kind: str) -> frozenset[str]:
        return frozenset(stored.uid for stored in self._context.ledger.tables.of_kind(kind))

    def handles(self) -> list[VmHandle]:
        """Every VM for which a VMM was chosen."""
        found = self._context.ledger.tables.of_kind("VirtualMachine")
        return [handle for stored in found if (handle := handle_of(stored)).driver]

    def busy(self) -> set[str]:
        """Uids, and short ones, of objects with an operation under way."""
        active = {
            operation.uid
            for operation in self._context.ledger.tables.operations.values()
            if operation.state not in FINAL_STATES
        }
        return active | {short_uid(uid) for uid in active}

    def title(self, owner: str) -> str:
        """Return the object that a uid, or a short one, stands for; empty: there is none."""
        stored = self._object(owner)
        return "" if stored is None else stored.title

    def _object(self, owner: str) -> StoredObject | None:
        if not owner:
            return None
        objects = self._context.ledger.tables.objects
        if owner in objects:
            return objects[owner]
        return next((each for each in objects.values() if short_uid(each.uid) == owner), None)

    async def begin_step(self, operation_id: str, name: str) -> None:
        """Journal what is about to be done to a leak."""
        await self._context.operations.begin_step(operation_id, name)

    def forget_stranger(self, worker_id: str) -> None:
        """A VMM that nobody recorded has ended: its VM may be started."""
        short = worker_id.split(":")[3]
        if self._context.strangers.get(short) == worker_id:
            del self._context.strangers[short]
        stored = self._object(short)
        if stored is not None:
            self._context.wake(stored.uid)

    # --- taking up
    def refusal(self, owner: str) -> str:
        """Return why a VMM of this owner cannot be taken up; empty: it can."""
        stored = self._object(owner)
        if stored is None or stored.resource.kind != "VirtualMachine":
            return "no VM of this node has its id"
        if stored.uid in self._context.ledger.tables.workers:
            return f"{stored.title} has another VMM on record"
        if stored.deleting:
            return f"{stored.title} is being deleted"
        facts, status = facts_of(stored), vm_of(stored).status
        if facts.selection is None or not facts.seed_path:
            return f"{stored.title} was never prepared to start"
        if status is None or status.observed_generation != stored.resource.metadata.generation:
            return f"the spec of {stored.title} has changed since it was last observed"
        return ""

    async def adopt(self, record: WorkerRecord) -> None:
        """Record a VMM as the worker of its VM. Unsupported with the reason, Conflict; or
        FailedPrecondition where a disk or NIC of it is not there.
        """
        stored = self._object(record.worker_id.split(":")[3])
        if why := self.refusal(stored.uid if stored is not None else ""):
            raise Unsupported(f"not to be taken up: {why}", resource=record.worker_id)
        assert stored is not None
        facts = facts_of(stored)
        assert facts.selection is not None
        state = (await look_at_monitor(self._context, stored)).state
        if state not in TAKEN_UP:
            raise Unsupported(
                f"not to be taken up: its monitor says {state}", resource=record.worker_id
            )
        row = await self._row(stored, record, facts.selection)
        async with self._context.ledger.writing():
            if why := self.refusal(stored.uid):
                raise Conflict(f"not to be taken up: {why}", resource=record.worker_id)
            await self._context.ledger.commit_held(PutWorker(row=row))
        log.warning("agent.taken_up", vm_id=stored.uid, worker_id=record.worker_id, pid=record.pid)
        self._context.strangers.pop(short_uid(stored.uid), None)
        self._context.wake(stored.uid)

    async def _row(
        self, stored: StoredObject, record: WorkerRecord, selection: VmmSelection
    ) -> WorkerRow:
        desired = desired_vm(self._context.ledger.tables, stored)
        sight = await observe(self._context, stored, desired, Memory())
        parts = Parts(
            attachments=sight.attachments,
            nics=sight.nics,
            image=sight.image,
            seed_path=facts_of(stored).seed_path,
            selection=selection,
            worker_id=record.worker_id,
        )
        return WorkerRow(
            vm_uid=stored.uid,
            worker_id=record.worker_id,
            driver=selection.name,
            config=vmm_config(vm_of(stored), desired, parts, self._context.world.layout),
            generation=stored.resource.metadata.generation,
            record=record,
            booted=True,
            spec=vm_of(stored).spec,
        )
