"""The engine: the one door to desired state, operations and reconcilers.

The service (RPC handlers) and the agent's main module talk to this class and to nothing below
it. Reads answer from memory and never wait for a VMM. Mutations return once they are durable;
`wait_operation` and `wait_condition` wait for the world to follow. No task of the engine lives
outside of `run`; when it ends nothing in the world is touched.
"""

from __future__ import annotations

from collections.abc import Callable

import anyio
import anyio.to_thread
import msgspec
from anyio.abc import TaskStatus

from chv.agent import queries
from chv.agent.actors import Reconciler, Worker, Workers
from chv.agent.cancelling import Cancelling
from chv.agent.chores import Chores, Tell
from chv.agent.cloning import Cloning
from chv.agent.context import Context
from chv.agent.deadlines import EVERY_S
from chv.agent.draining import NodeDesk
from chv.agent.events_news import News, storage_news
from chv.agent.history import History
from chv.agent.image.imports import ImageImports, ImportRequest
from chv.agent.image.reconciler import ImageReconciler
from chv.agent.keys import Keys
from chv.agent.leak_records import LeakRecords
from chv.agent.ledger import Ledger
from chv.agent.metrics_operations import OperationCounts
from chv.agent.mutations import Mutations
from chv.agent.network.directory import Directory
from chv.agent.network.exposures import ExposureReconciler
from chv.agent.network.groups import GroupReconciler
from chv.agent.network.reconciler import NetworkReconciler
from chv.agent.operation_filter import OperationFilter
from chv.agent.operation_view import OperationView
from chv.agent.ports import World
from chv.agent.queries import VmAccess
from chv.agent.rebuilding import Rebuilding
from chv.agent.records import FINAL_STATES, AgentStore, Change, StoredObject
from chv.agent.recovery import RecoveryReport, take_census
from chv.agent.snapshot.reconciler import SnapshotReconciler
from chv.agent.snapshot.whole import VmSnapshotReconciler
from chv.agent.tables import Tables
from chv.agent.upstream.desk import UpstreamDesk
from chv.agent.vm.reconciler import VmReconciler
from chv.agent.volume.reconciler import VolumeReconciler
from chv.agent.why import Why
from chv.common import logs
from chv.common.clock import timestamp
from chv.common.errors import ChvError, DeadlineExceeded, NotFound
from chv.common.wire import agent as api
from chv.common.wire.agent import Operation
from chv.common.wire.agent_clone import CloneVm, CloneVmReply
from chv.common.wire.agent_rebuild import RebuildVm, RebuildVmReply
from chv.common.wire.nwd_policy import NetworkEvent
from chv.common.wire.stord import StorageEvent

__all__ = ["Engine", "RecoveryReport", "VmAccess"]

log = logs.get(__name__)

RECONCILERS: dict[str, Callable[[Context, str], Reconciler]] = {
    "VirtualMachine": VmReconciler,
    "Volume": VolumeReconciler,
    "VolumeSnapshot": SnapshotReconciler,
    "VirtualMachineSnapshot": VmSnapshotReconciler,
    "Network": NetworkReconciler,
    "SecurityGroup": GroupReconciler,
    "Exposure": ExposureReconciler,
    "Image": ImageReconciler,
}


class Engine:
    """See the module. Made with a store and a world; works inside `run`."""

    def __init__(self, store: AgentStore, world: World) -> None:
        self._ledger = Ledger(store, lambda: timestamp(world.clock.now()))
        self._workers = Workers(self._worker)
        self._context = Context(world, self._ledger, self._workers.wake)
        self._mutations = Mutations(self._context, self._workers)
        self.chores = Chores(self._context)
        self._imports = ImageImports(
            self._context, self.chores, self._mutations.apply, self._mutations.refuse_when_short
        )
        self._cloning = Cloning(self._context, self._workers, self._mutations.refuse_when_short)
        self._rebuilding = Rebuilding(
            self._context, self._workers, self._mutations.refuse_when_short
        )
        self.keys = Keys(self._context, self.chores)
        self.history = History(self._context, self._mutations.apply)
        self.why = Why(self._context, self.history)
        self.leak_records = LeakRecords(self._context)
        self.node = NodeDesk(self._context)
        self._cancelling = Cancelling(self._context, self._workers, self.chores, self.node)
        self._view = OperationView(self._context, self.chores, self.node)
        self.news = News(self._ledger)
        self.operation_counts = OperationCounts()
        self.upstream = UpstreamDesk(self._context, self._workers, self._mutations)
        self._ledger.on_commit = self._committed
        self._ledger.on_reload = self._look_at_all

    async def load(self) -> None:
        """Read the store into memory: from here on reads answer. No effect on the world."""
        await self._ledger.load()
        await self.node.after_boot()

    async def recover(self) -> RecoveryReport:
        """Judge every worker record and open spawn intent before any action; adopt what lives."""
        return await take_census(self._context)

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Reconcile until cancelled. Call `load`, then `recover`, then start this in a group."""
        async with anyio.create_task_group() as group:
            self._workers.attach(group)
            self._context.begin_round()
            self._look_at_all()
            group.start_soon(self.news.run)
            group.start_soon(self.node.run)
            group.start_soon(self.upstream.run)
            group.start_soon(self.chores.run)
            group.start_soon(self._watch_deadlines)
            task_status.started()
            await anyio.sleep_forever()

    async def _watch_deadlines(self) -> None:
        """Show what has become overdue; what the store refuses now is tried again soon."""
        while True:
            await self._context.world.clock.sleep(EVERY_S)
            try:
                await self._context.tell_overdue()
            except ChvError as error:
                log.warning("agent.deadlines.untold", error=str(error))

    def _committed(self, tables: Tables, changes: tuple[Change, ...]) -> None:
        self.operation_counts.committed(tables, changes)
        self.upstream.committed(changes)

    def _look_at_all(self) -> None:
        """Memory was read: node and objects follow it, also what was stored without a reply."""
        self.node.follow()
        self.chores.follow()
        self.upstream.look()
        for stored in self._ledger.tables.objects.values():
            self._workers.ensure(stored)

    def _worker(self, stored: StoredObject) -> Worker:
        reconciler = RECONCILERS[stored.resource.kind](self._context, stored.uid)
        return Worker(self._context, stored.uid, reconciler)

    # --- mutations: durable when they return

    async def apply(self, request: api.Apply) -> api.ApplyReply:
        """Check all objects, then store all in one transaction, an operation per change."""
        return await self._mutations.apply(request)

    async def delete(self, request: api.DeleteObject) -> api.OperationReply:
        """Mark for deletion; IN_USE names who still needs it."""
        return await self._mutations.delete(request)

    async def act(self, request: api.ActOnVm) -> api.OperationReply:
        """Start, stop, restart or reset."""
        return await self._mutations.act(request)

    async def act_on_volume(self, request: api.ActOnVolume) -> api.OperationReply:
        """Check, repair, back up, restore, grow now."""
        return await self._mutations.act_on_volume(request)

    async def back_up_vm(self, request: api.BackUpVm) -> api.OperationReply:
        """Back up all disks of a VM as they are in one instant."""
        return await self._mutations.back_up_vm(request)

    async def clone(self, request: CloneVm) -> CloneVmReply:
        """Make a VM like another, with its disks as they are in one instant."""
        return await self._cloning.clone(request)

    async def rebuild(self, request: RebuildVm) -> RebuildVmReply:
        """Give a VM a new root disk."""
        return await self._rebuilding.rebuild(request)

    async def cancel(self, request: api.CancelOperation) -> api.OperationReply:
        """Ask for the end of an operation where that is safe."""
        return await self._cancelling.cancel(request)

    async def import_image(
        self, request: ImportRequest, tell: Tell | None = None
    ) -> api.ImportImageReply:
        """Store an artifact and (re)define the Image that has it; goes on without its caller."""

        async def seen(operation: Operation) -> None:
            if tell is not None:
                await tell(self._view.seen(operation))

        return await self._imports.take(request, seen if tell is not None else None)

    async def open_upload(self, request: api.OpenUpload) -> tuple[str, int]:
        """Begin an upload; the descriptor is the caller's."""
        return await self._imports.open_upload(request)

    async def collect_images(self, request: api.CollectImages) -> api.CollectImagesReply:
        """Remove artifacts that no Image has, and old partial downloads."""
        return await self._imports.collect(request)

    async def unused(self) -> dict[str, int]:
        """How many stored artifacts and keys nothing needs."""
        artifacts = (await self._imports.unneeded(dry_run=True)).removed
        keys = await anyio.to_thread.run_sync(self.keys.unused)
        return {"image artifact": len(artifacts), "key": keys}

    # --- reads: from memory

    def get(self, request: api.ObjectRef) -> api.ObjectReply:
        """One object."""
        stored = queries.require(self._context, request.kind, request.namespace, request.name)
        return queries.reply(self._context, stored)

    def list(self, request: api.ListObjects) -> api.ListReply:
        """All objects of a kind, by namespace and name."""
        return queries.listing(self._context, request)

    async def get_operation(self, request: api.OperationRef) -> api.OperationReply:
        """One operation with its steps."""
        return api.OperationReply(operation=await self._operation(request.operation_id))

    async def list_operations(self, request: api.ListOperations) -> api.ListOperationsReply:
        """Newest first, without steps."""
        if request.active_only:
            found = queries.active_operations(self._context, request)
        else:
            found = await self._ledger.store.operations(
                kind=request.kind,
                namespace=request.namespace,
                name=request.name,
                limit=request.limit,
                others=OperationFilter(request.verb, tuple(request.states), request.since),
            )
        return api.ListOperationsReply(operations=[self._view.listed(each) for each in found])

    async def wait_operation(self, request: api.WaitOperation) -> api.OperationReply:
        """The operation once it is final; DeadlineExceeded before."""
        with anyio.move_on_after(request.timeout_s):
            while True:
                changed = self._ledger.operations.event(request.operation_id)
                operation = await self._operation(request.operation_id)
                if operation.state in FINAL_STATES:
                    return api.OperationReply(operation=operation)
                await changed.wait()
        raise DeadlineExceeded(
            f"not final within {request.timeout_s:g} s", resource=request.operation_id
        )

    async def wait_condition(self, request: api.WaitCondition) -> api.ObjectReply:
        """The object once the condition holds; FailedPrecondition when it no longer can.

        `deleted` answers with the object as it was last seen, or null where there never was one.
        """
        queries.check_condition(request)
        if request.condition == "deleted" and queries.is_absent(self._context, request):
            return api.ObjectReply(object=msgspec.Raw(b"null"))
        stored = queries.require(self._context, request.kind, request.namespace, request.name)
        uid = stored.uid
        with anyio.move_on_after(request.timeout_s):
            while True:
                changed = self._ledger.objects.event(uid)
                now = self._context.stored(uid)
                if now is None:
                    if request.condition == "deleted":
                        return queries.reply(self._context, stored)
                    raise NotFound("it was deleted meanwhile", resource=stored.title)
                stored = now
                if request.condition != "deleted" and queries.fulfilled(stored, request):
                    return queries.reply(self._context, stored)
                held = self._ledger.tables.node.holds_vms
                queries.refuse_hopeless(stored, request, held=held)
                await changed.wait()
        raise DeadlineExceeded(
            f"{queries.current(stored, request)} after {request.timeout_s:g} s",
            resource=stored.title,
        )

    def vm_access(self, name: str, namespace: str, interface: str = "") -> VmAccess:
        """NIC, address and pinned host key of a VM; NotFound, FailedPrecondition."""
        return queries.vm_access(self._context, name, namespace, interface)

    def directory(self, namespace: str) -> Directory:
        """Names of NICs, networks and groups; empty: of every namespace."""
        return Directory.of(self._ledger.tables, namespace)

    def vm_uid(self, name: str, namespace: str) -> str:
        """The uid of a VM by name; NotFound."""
        return queries.require(self._context, "VirtualMachine", namespace, name).uid

    @property
    def ledger(self) -> Ledger:
        """The memory of the store, for those who read its log of events."""
        return self._ledger

    def tables(self) -> Tables:
        """Return the records in memory, to read at once: a reload replaces them."""
        return self._ledger.tables

    def counts(self) -> dict[str, int]:
        """Objects by kind, and VMs by phase (`vm.Running`), for the node's status."""
        return queries.counts(self._context)

    # --- hints from outside; safe at any time, in any order, any number of times

    def notify_vmm_exit(self, vm_uid: str) -> None:
        """A VMM seems to have ended or changed: look at that VM now."""
        self._workers.wake(vm_uid)

    def notify_storage_event(self, event: StorageEvent) -> None:
        """A storage daemon was lost or is back, space is short, a job has ended: look there."""
        self._workers.wake(event.vm_id)
        vm = self._context.stored(event.vm_id)
        seen = storage_news(vm, event) if vm is not None else None
        if seen is not None:
            self.news.tell(seen)
        volume = self._context.stored(event.volume_id)
        if volume is not None:
            self._workers.wake(event.volume_id)
            self._context.wake_referrers(volume)

    def notify_network_event(self, event: NetworkEvent) -> None:
        """nwd shows something in another way: look there, or at all that nwd makes."""
        if event.uid:
            self._workers.wake(event.uid)
            return
        for kind in ("Network", "SecurityGroup", "Exposure"):
            for stored in self._ledger.tables.of_kind(kind):
                self._workers.insist(stored.uid)

    def notify_daemon_lost(self, name: str) -> None:
        """stord or nwd does not answer: what rests on it is to be shown as Unknown now."""
        for stored in self._ledger.tables.objects.values():
            self._workers.wake(stored.uid)

    def notify_daemon_ready(self, name: str) -> None:
        """stord or nwd (or the node's readiness) came back: look at everything now."""
        self._workers.insist_all()

    def bugs(self) -> tuple[str, ...]:
        """What the firewall between objects caught last: bugs of ours, for the node's status."""
        return tuple(self._context.bugs)

    async def _operation(self, operation_id: str) -> Operation:
        operation = await self._ledger.operation(operation_id)
        if operation is None:
            raise NotFound(f"there is no operation {operation_id!r}")
        return self._view.seen(operation)
