"""Changes of desired state: checked against everything, then durable in one transaction.

Whatever is refused has changed nothing. An Idempotency-Key answers a repeated request with what
was recorded for the first; an identical request on the same object joins the one under way.
"""

from __future__ import annotations

from typing import Protocol

import anyio.to_thread
import msgspec

from chv.agent import idempotency, queries
from chv.agent.actors import Workers
from chv.agent.admission import Admitted, admit, ordered
from chv.agent.admission_rules import check_delete
from chv.agent.apply_verbs import check_verbs
from chv.agent.cascade import marked_deleting
from chv.agent.context import Context
from chv.agent.keys import exists
from chv.agent.network.exposure_check import check_exposures
from chv.agent.network.reconciler import topology
from chv.agent.records import (
    PutObject,
    PutOperation,
    RequestRow,
    StoredObject,
)
from chv.agent.snapshot.saving import refuse_unable
from chv.agent.strategies import keep_stopped, silent
from chv.agent.tables import Tables
from chv.agent.upstream.rules import already_desired, check_force
from chv.agent.verbs import acted, before_start, joins, started
from chv.agent.vm.desired import vm_of
from chv.agent.vm.restoring import asked, find_snapshot, require_restorable, saved_of
from chv.agent.volume import together
from chv.agent.volume.verbs import requested, under_way, with_request
from chv.common.errors import (
    ChvError,
    Conflict,
    InvalidArgument,
    ResourceExhausted,
)
from chv.common.wire import agent as api
from chv.common.wire import nwd
from chv.common.wire.agent import Operation
from chv.common.wire.manifest import encode, parse
from chv.common.wire.resources import (
    Network,
    Resource,
    VirtualMachine,
    VirtualMachineSnapshot,
    Volume,
)
from chv.guest.user_data import check_user_data

_replace = msgspec.structs.replace

# YAML takes 30 microseconds a character at worst: more of it would hold up the event loop.
INLINE_CHARACTERS_MAX = 1024


class _Named(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def namespace(self) -> str: ...


class Mutations:
    """See the module."""

    def __init__(self, context: Context, workers: Workers) -> None:
        self._context = context
        self._workers = workers

    # --- apply

    async def apply(self, request: api.Apply, digest: str = "") -> api.ApplyReply:
        """Check all objects, then store all. `digest`: of what was asked for, if not of this."""
        parsed = [parse(raw) for raw in request.objects]
        unsaid = silent(parsed, request.objects)
        resources = ordered(parsed)
        tables, gate = self._context.ledger.tables, self._context.world.gate
        check_verbs(gate, tables, keep_stopped(tables, resources, unsaid))
        key = "" if request.dry_run else request.idempotency_key
        digest = digest or idempotency.digest("apply", *map(encode, resources))
        await self.check(resources)
        ledger = self._context.ledger
        async with ledger.writing():
            known = await idempotency.recorded(ledger, key, digest)
            if known is not None:
                return msgspec.json.decode(known.reply, type=api.ApplyReply)
            meant = keep_stopped(ledger.tables, resources, unsaid)
            check_verbs(gate, ledger.tables, meant)  # the node may be in another state by now
            admitted = admit(self._context, meant, request.requester, request.reason)
            if admitted.changes:
                await self.refuse_when_short()
            reply = api.ApplyReply(results=list(admitted.results))
            if request.dry_run:
                return _dry(reply)
            remembered = idempotency.remembered(key, digest, reply)
            if admitted.changes or remembered:
                await ledger.commit_held(*admitted.changes, *remembered)
        self.begin(admitted)
        return reply

    async def check(self, resources: list[Resource]) -> None:
        """Refuse what others than the tables know to be impossible; before the lock is taken."""
        await self._check_networks(resources)
        await check_exposures(self._context, resources)
        await self._check_user_data(resources)
        self._check_keys(resources)
        self._check_saves(resources)

    async def refuse_when_short(self) -> None:
        """The reserve is for deletions and for the VMs that run."""
        shortage = await self._context.ledger.store.shortage()
        if shortage:
            raise ResourceExhausted(
                f"no space for new objects: {shortage}",
                hint="free space there, or delete objects, then apply again",
            )

    def begin(self, admitted: Admitted) -> None:
        """Let the workers of what was stored, and of who refers to it, look."""
        for stored in admitted.stored:
            self._workers.ensure(stored)
            self._context.wake_referrers(stored)

    async def _check_networks(self, resources: list[Resource]) -> None:
        """Ask nwd whether new networks fit with what the node has."""
        for resource in resources:
            if not isinstance(resource, Network):
                continue
            metadata = resource.metadata
            known = self._context.ledger.tables.find("Network", metadata.namespace, metadata.name)
            if known is not None:  # its subnet does not change
                continue
            probe = _replace(metadata, uid=self._context.world.ids.uid())
            wanted = topology(_replace(resource, metadata=probe))
            try:
                await self._context.nwd.call(
                    nwd.CHECK_NETWORK, nwd.CheckNetworkTopology(topology=wanted)
                )
            except ChvError as error:
                error.resource = f"Network {metadata.namespace}/{metadata.name}"
                raise

    def _check_keys(self, resources: list[Resource]) -> None:
        """Refuse the name of a key that this node does not have."""
        for resource in resources:
            if not isinstance(resource, Volume) or resource.spec.encryption is None:
                continue
            metadata, name = resource.metadata, resource.spec.encryption.key
            if not exists(self._context.world.layout, metadata.namespace, name):
                raise InvalidArgument(
                    f"there is no key {name!r} in namespace {metadata.namespace}",
                    resource=f"Volume {metadata.namespace}/{metadata.name}",
                    field="spec.encryption.key",
                    hint=f"chv key create {name} -n {metadata.namespace}",
                )

    def _check_saves(self, resources: list[Resource]) -> None:
        """Refuse to save a VM whose VMM cannot."""
        for resource in resources:
            if not isinstance(resource, VirtualMachineSnapshot):
                continue
            metadata, tables = resource.metadata, self._context.ledger.tables
            name = resource.spec.virtual_machine
            vm = tables.find("VirtualMachine", metadata.namespace, name)
            there = tables.find(resource.kind, metadata.namespace, metadata.name)
            if vm is not None and there is None:
                refuse_unable(self._context, vm)

    async def _check_user_data(self, resources: list[Resource]) -> None:
        """Refuse now what would fail each start."""
        for resource in resources:
            if not isinstance(resource, VirtualMachine):
                continue
            metadata, text = resource.metadata, resource.spec.cloud_init.user_data
            key = ("VirtualMachine", metadata.namespace, metadata.name)
            known = self._context.ledger.tables.find(*key)
            if known is not None and vm_of(known).spec.cloud_init.user_data == text:
                continue
            try:
                if len(text) > INLINE_CHARACTERS_MAX:
                    await anyio.to_thread.run_sync(check_user_data, text)
                else:
                    check_user_data(text)
            except InvalidArgument as error:
                error.resource = f"VirtualMachine {metadata.namespace}/{metadata.name}"
                raise

    # --- delete

    async def delete(self, request: api.DeleteObject) -> api.OperationReply:
        """Mark an object for deletion."""
        check_force(self._context.world.upstream, request)
        forced_by = request.requester if request.force else ""
        self._check_gate("delete", request.kind, request, forced_by)
        ledger, digest = self._context.ledger, idempotency.digest_of("delete", request)
        async with ledger.writing() as tables:
            self._check_gate("delete", request.kind, request, forced_by)  # it may have changed
            known = await idempotency.recorded(ledger, request.idempotency_key, digest)
            if known is not None:
                return await self._replayed(known)
            stored = queries.require(self._context, request.kind, request.namespace, request.name)
            if request.uid and request.uid != stored.uid:
                raise Conflict(
                    f"the object of that name is {stored.uid}, not {request.uid}",
                    resource=stored.title,
                )
            current = tables.active_operation(stored.uid)
            if stored.deleting and current is not None:
                return await self._join(current, request.idempotency_key, digest)
            check_delete(tables, stored)
            marked = stored
            if not stored.deleting:
                revision = ledger.next_revision()
                marked = marked_deleting(_going(stored, request), self._context.now(), revision)
            operation = self._context.operations.new(
                "delete", marked, request.requester, request.reason
            )
            reply = api.OperationReply(operation=operation)
            await ledger.commit_held(
                PutObject(object=marked),
                *self._context.operations.superseding(operation),
                *idempotency.remembered(request.idempotency_key, digest, reply),
            )
        self._workers.ensure(marked)
        self._context.wake_referrers(marked)
        return reply

    # --- verbs

    async def act(self, request: api.ActOnVm) -> api.OperationReply:
        """Start, stop, restart or reset a VM."""
        self._check_gate(request.verb.value, "VirtualMachine", request)
        if request.verb is api.VmVerb.RESTORE:
            await self._check_restore(request)
        elif request.snapshot:
            raise InvalidArgument("it belongs to restore", field="snapshot")
        digest = idempotency.digest_of("act", request)
        ledger = self._context.ledger
        async with ledger.writing() as tables:
            known = await idempotency.recorded(ledger, request.idempotency_key, digest)
            if known is not None:
                return await self._replayed(known)
            stored = queries.require(
                self._context, "VirtualMachine", request.namespace, request.name
            )
            self._check_gate(request.verb.value, "VirtualMachine", request)  # may have changed
            operation = self._context.operations.new(
                request.verb.value, stored, request.requester, request.reason
            )
            after = self._after_verb(tables, stored, request, operation.id)
            self._context.budget.refuse_verb(tables, after, request.verb)
            current = tables.active_operation(stored.uid)
            if current is not None and joins(current, request, stored, after):
                return await self._join(current, request.idempotency_key, digest)
            after = self._versioned(stored, after)
            generation = after.resource.metadata.generation
            operation = _replace(operation, generation=generation)
            if request.verb is api.VmVerb.START:
                operation = _replace(operation, request=before_start(stored))
            reply = api.OperationReply(operation=operation)
            await ledger.commit_held(
                PutObject(object=after),
                *self._context.operations.superseding(operation),
                *idempotency.remembered(request.idempotency_key, digest, reply),
            )
        self._workers.ensure(after)
        return reply

    def _check_gate(self, verb: str, kind: str, what: _Named, forced_by: str = "") -> None:
        """Refuse what the node's state or its being cut off forbids."""
        tables = self._context.ledger.tables
        stored = tables.find(kind, what.namespace, what.name)
        desired = already_desired(tables, stored, verb)
        self._context.world.gate.check(verb, desired=desired, forced_by=forced_by)

    async def _check_restore(self, request: api.ActOnVm) -> None:
        """Refuse what would fail later, before a VM is stopped for it."""
        vm = queries.require(self._context, "VirtualMachine", request.namespace, request.name)
        tables = self._context.ledger.tables
        snapshot = find_snapshot(tables, request.namespace, request.snapshot)
        saved_of(tables, snapshot.uid)
        await require_restorable(self._context, vm, snapshot.uid)

    @staticmethod
    def _after_verb(
        tables: Tables, stored: StoredObject, request: api.ActOnVm, operation_id: str
    ) -> StoredObject:
        """Return the VM with what the verb wants."""
        if request.verb is not api.VmVerb.RESTORE or stored.deleting:
            return acted(stored, tables.workers.get(stored.uid), request, operation_id)
        snapshot = find_snapshot(tables, request.namespace, request.snapshot)
        return asked(tables, started(stored), snapshot, operation_id, force=request.force)

    def _versioned(self, before: StoredObject, after: StoredObject) -> StoredObject:
        if before.resource.spec == after.resource.spec:
            return after
        metadata = before.resource.metadata
        metadata = _replace(
            metadata,
            generation=metadata.generation + 1,
            resource_version=str(self._context.ledger.next_revision()),
        )
        return _replace(after, resource=_replace(after.resource, metadata=metadata))

    async def _join(self, current: Operation, key: str, digest: str) -> api.OperationReply:
        """Answer with the one under way, also once it has ended; the caller holds `writing`."""
        reply = api.OperationReply(operation=current, joined=True)
        await idempotency.remember(self._context.ledger, key, digest, reply)
        return reply

    async def _replayed(self, known: RequestRow) -> api.OperationReply:
        """Answer a repeated request with the operation as it is by now."""
        reply = msgspec.json.decode(known.reply, type=api.OperationReply)
        operation = await self._context.ledger.operation(reply.operation.id)
        return api.OperationReply(operation=operation or reply.operation, joined=True)

    # --- verbs on a volume

    async def act_on_volume(self, request: api.ActOnVolume) -> api.OperationReply:
        """Check, repair, back up, restore, grow now: an operation of its own beside the spec's."""
        self._check_gate(request.verb.value, "Volume", request)
        digest = idempotency.digest_of("act", request)
        ledger = self._context.ledger
        async with ledger.writing() as tables:
            self._check_gate(request.verb.value, "Volume", request)  # it may have changed
            known = await idempotency.recorded(ledger, request.idempotency_key, digest)
            if known is not None:
                return await self._replayed(known)
            stored = queries.require(self._context, "Volume", request.namespace, request.name)
            operation = self._context.operations.new(
                request.verb.value, stored, request.requester, request.reason
            )
            wanted = requested(tables, stored, request, operation.id)
            joined = under_way(stored, wanted)
            if joined:
                current = tables.operations[joined]
                return await self._join(current, request.idempotency_key, digest)
            await self.refuse_when_short()
            reply = api.OperationReply(operation=operation)
            await ledger.commit_held(
                with_request(stored, wanted),
                PutOperation(operation=operation),
                *idempotency.remembered(request.idempotency_key, digest, reply),
            )
        self._workers.ensure(stored)
        return reply

    async def back_up_vm(self, request: api.BackUpVm) -> api.OperationReply:
        """Back up all disks of a VM: an operation of the VM's own beside the spec's."""
        verb = api.VolumeVerb.BACKUP.value
        self._context.world.gate.check(verb)
        digest = idempotency.digest_of("back_up", request)
        ledger = self._context.ledger
        async with ledger.writing() as tables:
            known = await idempotency.recorded(ledger, request.idempotency_key, digest)
            if known is not None:
                return await self._replayed(known)
            vm = queries.require(self._context, "VirtualMachine", request.namespace, request.name)
            operation = self._context.operations.new(verb, vm, request.requester, request.reason)
            wanted = together.requested(tables, vm, request, operation.id)
            joined = together.under_way(tables, wanted)
            if joined:
                current = tables.operations[joined]
                return await self._join(current, request.idempotency_key, digest)
            await self.refuse_when_short()
            reply = api.OperationReply(operation=operation)
            volumes = [tables.objects[uid] for uid in wanted]
            await ledger.commit_held(
                *(with_request(volume, wanted[volume.uid]) for volume in volumes),
                PutOperation(operation=operation),
                *idempotency.remembered(request.idempotency_key, digest, reply),
            )
        for volume in volumes:
            self._workers.ensure(volume)
        return reply


def _dry(reply: api.ApplyReply) -> api.ApplyReply:
    results = [_replace(result, operation_id="") for result in reply.results]
    return api.ApplyReply(results=results)


def _going(stored: StoredObject, request: api.DeleteObject) -> StoredObject:
    if stored.facts is None:
        return stored
    reason = f"deleted by {request.requester}"
    return _replace(stored, facts=_replace(stored.facts, stop_reason=reason))
