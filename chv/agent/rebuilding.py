"""The verb `rebuild`: checked, and stored with the new volume in one transaction."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec

from chv.agent import idempotency, queries
from chv.agent.actors import Workers
from chv.agent.admission import admit
from chv.agent.admission_rules import check_references
from chv.agent.context import Context
from chv.agent.rebuild_record import Rebuild
from chv.agent.records import PutFacts, StoredObject
from chv.agent.tables import Tables
from chv.agent.vm.desired import facts_of, vm_of
from chv.agent.vm.rebuild_rules import (
    FORMER,
    NEW,
    boot_image,
    is_busy,
    owned_by,
    root_of,
    users,
)
from chv.common.errors import Conflict, FailedPrecondition, InUse, NotFound, Unsupported
from chv.common.names import check_name
from chv.common.wire.agent import Operation
from chv.common.wire.agent_rebuild import RebuildVm, RebuildVmReply
from chv.common.wire.manifest import parse
from chv.common.wire.resources import (
    ObjectMeta,
    Volume,
    VolumeAccessMode,
    VolumeClass,
    VolumeSourceSpec,
)

VERB = "rebuild"
CLASSES = (VolumeClass.FILE, VolumeClass.LVM)
_replace = msgspec.structs.replace


class Rebuilding:
    """`refuse_when_short` refuses new objects where the store has no space."""

    def __init__(
        self, context: Context, workers: Workers, refuse_when_short: Callable[[], Awaitable[None]]
    ) -> None:
        self._context = context
        self._workers = workers
        self._refuse_when_short = refuse_when_short

    async def rebuild(self, request: RebuildVm) -> RebuildVmReply:
        """Store the wish and the new volume. Whatever is refused changes nothing."""
        context, ledger = self._context, self._context.ledger
        context.world.gate.check(VERB)
        digest = idempotency.digest_of(VERB, request)
        async with ledger.writing() as tables:
            known = await idempotency.recorded(ledger, request.idempotency_key, digest)
            if known is not None:
                return await self._as_it_is_now(known.reply)
            context.world.gate.check(VERB)  # it may have changed meanwhile
            vm = queries.require(context, "VirtualMachine", request.namespace, request.name)
            joined = _under_way(tables, vm, request)
            if joined is not None:
                reply = _reply(vm, joined, joined=True)
                await idempotency.remember(ledger, request.idempotency_key, digest, reply)
                return reply
            old = _root(tables, vm)
            volume = _new_root(tables, vm, old, request)
            parsed = parse(msgspec.json.encode(volume))
            admitted = admit(context, [parsed], request.requester, _why(request))
            _check_boot(tables, vm, old, volume)
            await self._refuse_when_short()
            operation = context.operations.new(VERB, vm, request.requester, request.reason)
            wish = Rebuild(
                operation_id=operation.id,
                old_uid=old.uid,
                new_uid=admitted.stored[0].uid,
                keep_old=request.keep_old,
                force=request.force,
            )
            reply = _reply(vm, operation)
            await ledger.commit_held(
                *admitted.changes,
                PutFacts(uid=vm.uid, facts=_replace(facts_of(vm), rebuild=wish)),
                *context.operations.superseding(operation),
                *idempotency.remembered(request.idempotency_key, digest, reply),
            )
        self._workers.ensure(admitted.stored[0])
        self._workers.ensure(vm)
        return reply

    async def _as_it_is_now(self, known: bytes) -> RebuildVmReply:
        reply = msgspec.json.decode(known, type=RebuildVmReply)
        now = await self._context.ledger.operation(reply.operation.id)
        return _replace(reply, operation=now or reply.operation, joined=True)


def _reply(vm: StoredObject, operation: Operation, *, joined: bool = False) -> RebuildVmReply:
    root = root_of(vm)
    return RebuildVmReply(operation=operation, volume=root, former=f"{root}{FORMER}", joined=joined)


def _under_way(tables: Tables, vm: StoredObject, request: RebuildVm) -> Operation | None:
    """Return the operation that does this very thing already; refuse another one beside it."""
    if vm.deleting:
        raise FailedPrecondition("it is being deleted, so it cannot rebuild", resource=vm.title)
    facts = facts_of(vm)
    if facts.restore is not None or facts.saving:
        what = "restored" if facts.restore is not None else "saved"
        raise Conflict(f"it is being {what}", resource=vm.title, hint="wait for it")
    wish = facts.rebuild
    if wish is None or wish.swapped:
        return None
    new = tables.objects.get(wish.new_uid)
    source = new.resource.spec.source if new and isinstance(new.resource, Volume) else None
    asked = request.image or (source.image if source is not None else "")
    same = wish.keep_old == request.keep_old and source is not None and source.image == asked
    current = tables.active_operation(vm.uid)
    if same and current is not None and current.id == wish.operation_id:
        return current
    raise Conflict("it is being rebuilt", resource=vm.title, hint="wait for it, or chv stop it")


def _root(tables: Tables, vm: StoredObject) -> StoredObject:
    """Return the present root volume; refuse one that cannot be replaced."""
    disks, field = vm_of(vm).spec.disks, "spec.disks[0].volume"
    if not disks:
        raise FailedPrecondition("it has no disk", resource=vm.title, field="spec.disks")
    old = tables.find("Volume", vm.key[1], disks[0].volume)
    if old is None:
        raise NotFound(f"there is no Volume {disks[0].volume!r}", resource=vm.title, field=field)
    assert isinstance(old.resource, Volume)
    spec = old.resource.spec
    if disks[0].read_only or spec.access_mode is VolumeAccessMode.READ_ONLY_MANY:
        raise FailedPrecondition(
            f"its root volume {disks[0].volume!r} is read only, perhaps others have it as well",
            resource=vm.title,
            field=field,
            hint="give the VM another root volume in its manifest",
        )
    if spec.class_ not in CLASSES:
        raise Unsupported(
            f"a volume of class {spec.class_.value} has a place of its own, "
            "beside which no other can be made from an image",
            resource=old.title,
            field="spec.class",
            hint="move it to class file first",
        )
    if others := users(tables, old, vm):
        raise InUse(f"it is used by {others}", resource=old.title, hint=f"delete {others} first")
    if old.deleting or is_busy(old):
        what = "being deleted" if old.deleting else "busy with another operation"
        raise Conflict(f"it is {what}", resource=old.title, hint="wait for it")
    return old


def _new_root(tables: Tables, vm: StoredObject, old: StoredObject, request: RebuildVm) -> Volume:
    assert isinstance(old.resource, Volume)
    source = old.resource.spec.source
    image = request.image or (source.image if source is not None else "")
    if not image:
        raise FailedPrecondition(
            "its root volume was not made from an image",
            resource=vm.title,
            field="image",
            hint="name one: chv rebuild VM --image NAME",
        )
    namespace, name = vm.key[1], old.key[2]
    for taken in (f"{name}{NEW}", f"{name}{FORMER}"):
        check_name(taken, field="name")
        if (there := tables.find("Volume", namespace, taken)) is not None:
            raise Conflict(
                "it is there already, and the rebuild would need its name",
                resource=there.title,
                hint=_freeing(vm, there),
            )
    metadata = ObjectMeta(
        name=f"{name}{NEW}",
        namespace=namespace,
        labels=old.resource.metadata.labels,
        owner_references=[owned_by(vm)],
    )
    spec = _replace(old.resource.spec, source=VolumeSourceSpec(image=image))
    return Volume(metadata=metadata, spec=spec)


def _freeing(vm: StoredObject, there: StoredObject) -> str:
    wish = facts_of(vm).rebuild
    delete = f"chv delete volume {there.key[2]}"
    if there.deleting:
        return "wait until it is gone"
    waits = wish is not None and wish.old_uid == there.uid
    return f"{delete}, or start the VM: then it goes by itself" if waits else delete


def _check_boot(tables: Tables, vm: StoredObject, old: StoredObject, volume: Volume) -> None:
    """Refuse an image without a kernel for a VM that boots the kernel of its image."""
    assert isinstance(old.resource, Volume) and volume.spec.source is not None
    resource = vm_of(vm)
    image = boot_image(resource, old.resource, volume.spec.source.image)
    spec = _replace(resource.spec, boot=_replace(resource.spec.boot, image=image))
    check_references(_replace(vm, resource=_replace(resource, spec=spec)), tables.find)


def _why(request: RebuildVm) -> str:
    words = f"rebuild of {request.name}"
    return f"{words}: {request.reason}"[:256] if request.reason else words
