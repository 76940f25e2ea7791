"""Reads on the ledger: objects, counts, and whether a waiter's condition holds. From memory."""

from __future__ import annotations

from collections import Counter

import msgspec

from chv.agent.conditions import holds
from chv.agent.context import Context, phase_of
from chv.agent.operation_filter import OperationFilter
from chv.agent.records import FINAL_STATES, StoredObject
from chv.agent.vm.desired import facts_of, nic_id, wants_to_run
from chv.common import pages
from chv.common.errors import FailedPrecondition, InvalidArgument, NotFound
from chv.common.wire import agent as api
from chv.common.wire.agent import Operation
from chv.common.wire.manifest import encode
from chv.common.wire.resources import (
    CONDITIONS,
    PHASES,
    VM_CONDITIONS,
    Resource,
    VirtualMachine,
)

SSH_NEEDS = {  # reason of SSHReady -> what is missing, and in which field
    "PortNotDeclared": ("22 is not in spec.guestPorts", "spec.guestPorts"),
    "NoInterface": ("the VM has no interface", "spec.interfaces"),
}
NEEDS_A_VMM = frozenset(VM_CONDITIONS) - {"Paused", "StorageLost"}


class VmAccess(msgspec.Struct, frozen=True, kw_only=True):
    """How to reach into a VM."""

    vm_uid: str
    nic_id: str
    address: str
    host_key: str
    guest_ports: tuple[int, ...]


def require(context: Context, kind: str, namespace: str, name: str) -> StoredObject:
    """Return the object of that name; NotFound."""
    stored = context.ledger.tables.find(kind, namespace, name)
    if stored is None:
        raise NotFound(f"there is no {kind} {name!r} in namespace {namespace}")
    return stored


def reply(context: Context, stored: StoredObject) -> api.ObjectReply:
    """Return the object as JSON with the age of what it says, and of each of its conditions."""
    shown = msgspec.Raw(encode(_probed(context, stored)))
    return api.ObjectReply(object=shown, age_s=age_s(context, stored))


def _probed(context: Context, stored: StoredObject) -> Resource:
    """Return the object with the moments when its evidence was seen last, also if it was as before.

    A list has those of the last change: there the age of the object tells how old it is.
    """
    resource, probed = stored.resource, context.probed.get(stored.uid)
    if resource.status is None or not probed:
        return resource
    conditions = [
        msgspec.structs.replace(each, last_probe_time=probed.get(each.type, each.last_probe_time))
        for each in resource.status.conditions
    ]
    status = msgspec.structs.replace(resource.status, conditions=conditions)
    return msgspec.structs.replace(resource, status=status)


def _encoded(context: Context, stored: StoredObject) -> msgspec.Raw:
    """Return the object as JSON, made once for each of its versions: long lists are asked for."""
    known = context.encoded.get(stored.uid)
    if known is None or known[0] is not stored.resource:
        known = (stored.resource, msgspec.Raw(encode(stored.resource)))
        context.encoded[stored.uid] = known
    return known[1]


def listing(context: Context, request: api.ListObjects) -> api.ListReply:
    """Return a page of the objects of a kind; the age is that of the oldest observation in it."""
    found = [
        (_page_key(stored), stored)
        for stored in context.ledger.tables.of_kind(request.kind)
        if request.namespace in ("", stored.resource.metadata.namespace)
    ]
    behind = [(key, stored) for key, stored in found if key > request.after]
    encoded = ((key, _encoded(context, stored)) for key, stored in behind)
    items, after = pages.page(encoded, request.after)
    ages = [age_s(context, stored) for _, stored in behind[: len(items)]]
    return api.ListReply(items=items, age_s=max(ages, default=0.0), ages_s=ages, next=after)


def _page_key(stored: StoredObject) -> str:
    """Return a text that sorts as namespace and name do: a space comes before all of theirs."""
    metadata = stored.resource.metadata
    return f"{metadata.namespace} {metadata.name}"


def age_s(context: Context, stored: StoredObject) -> float:
    """Return how long ago the object was looked at; -1 where it was not since the agent came."""
    seen_at = context.seen_at.get(stored.uid)
    return -1.0 if seen_at is None else context.world.clock.monotonic() - seen_at


def active_operations(context: Context, request: api.ListOperations) -> list[Operation]:
    """Return the operations under way, newest first, without steps."""
    wanted = (request.kind, request.namespace, request.name)
    others = OperationFilter(request.verb, tuple(request.states), request.since)
    tables = context.ledger.tables
    found = []
    for operation in reversed(tables.operations.values()):
        if operation.state in FINAL_STATES or not others.takes(operation):
            continue
        target = (operation.kind, operation.namespace, operation.name)
        if all(not want or want == have for want, have in zip(wanted, target, strict=True)):
            found.append(msgspec.structs.replace(operation, steps=[]))
    return found[: request.limit]


def counts(context: Context) -> dict[str, int]:
    """Return the number of objects by kind, and of VMs by phase."""
    found: Counter[str] = Counter()
    for stored in context.ledger.tables.objects.values():
        found[stored.resource.kind] += 1
        if stored.resource.kind == "VirtualMachine":
            found[f"vm.{phase_of(stored.resource.status)}"] += 1
    return dict(found)


def vm_access(context: Context, name: str, namespace: str, interface: str) -> VmAccess:
    """Return NIC, address and pinned host key of a VM."""
    stored = require(context, "VirtualMachine", namespace, name)
    vm = stored.resource
    assert isinstance(vm, VirtualMachine)
    chosen = [each for each in vm.spec.interfaces if not interface or each.name == interface]
    if not chosen:
        raise NotFound(f"it has no interface {interface!r}", resource=stored.title)
    network = context.ledger.tables.find("Network", namespace, chosen[0].network)
    shown = vm.status.interfaces if vm.status is not None else []
    seen = next((each for each in shown if each.name == chosen[0].name), None)
    if network is None or seen is None:
        raise FailedPrecondition("its NIC is not there yet", resource=stored.title)
    return VmAccess(
        vm_uid=stored.uid,
        nic_id=nic_id(stored.uid, chosen[0], network.uid),
        address=seen.address,
        host_key=facts_of(stored).host_key,
        guest_ports=tuple(vm.spec.guest_ports),
    )


def is_absent(context: Context, request: api.WaitCondition) -> bool:
    """Tell whether there is no such object."""
    return context.ledger.tables.find(request.kind, request.namespace, request.name) is None


def check_condition(request: api.WaitCondition) -> None:
    """Refuse what an object of this kind never shows: nobody should wait for a slip of the pen."""
    kind, equals, value = request.condition.partition("=")
    if equals and kind == "phase":
        known, asked = PHASES[request.kind], value
    else:
        known, asked = (*CONDITIONS[request.kind], "phase=NAME", "deleted"), request.condition
    if asked not in known or request.condition == "phase=NAME":
        what = "phase" if equals and kind == "phase" else "condition"
        raise InvalidArgument(
            f"{asked!r} is not a {what} of a {request.kind}",
            field="condition",
            hint=f"one of {', '.join(known)}",
        )


def current(stored: StoredObject, request: api.WaitCondition) -> str:
    """Return how the object is as to the condition that is waited for."""
    status, phase = stored.resource.status, phase_of(stored.resource.status)
    if request.condition == "deleted":
        return f"it is still there, in phase {phase}"
    if status is None or status.observed_generation < stored.resource.metadata.generation:
        return f"generation {stored.resource.metadata.generation} was not looked at yet"
    if request.condition.startswith("phase="):
        return f"its phase is {phase}, not {request.condition.removeprefix('phase=')},"
    found = next((each for each in status.conditions if each.type == request.condition), None)
    if found is None:
        return f"{request.condition} was not observed yet"
    why = ": ".join(filter(None, (found.reason, found.message)))
    return f"{request.condition} is {found.status.value} ({why}), not {request.status},"


def fulfilled(stored: StoredObject, request: api.WaitCondition) -> bool:
    """Tell whether the object is as the waiter wants it, as observed for its generation."""
    status = stored.resource.status
    kind, equals, value = request.condition.partition("=")
    if status is None or status.observed_generation < stored.resource.metadata.generation:
        return False
    if equals:
        return phase_of(status) == value
    return holds(status.conditions, kind, request.status)


def refuse_hopeless(stored: StoredObject, request: api.WaitCondition, *, held: bool) -> None:
    """Raise FailedPrecondition where the object cannot get there without somebody's help.

    `held`: the node lets no VM run by now; a status may still show what is over.
    """
    if request.condition == "deleted":
        return
    phase = phase_of(stored.resource.status)
    if stored.deleting:
        raise FailedPrecondition("it is being deleted", resource=stored.title)
    status = stored.resource.status
    current = (
        status is not None and status.observed_generation == stored.resource.metadata.generation
    )
    if not current or request.condition == f"phase={phase}":
        return
    if phase == "Failed":
        raise FailedPrecondition(f"it has failed: {_why(stored)}", resource=stored.title)
    _refuse_held(stored, request, held=held)
    if phase == "Stopped" and not _runs_by_itself(stored) and _needs_a_vmm(request):
        raise FailedPrecondition(
            "it is stopped", resource=stored.title, hint=f"chv start {stored.key[2]}"
        )


def _refuse_held(stored: StoredObject, request: api.WaitCondition, *, held: bool) -> None:
    """Raise where only an operator changes what is in the way."""
    status = stored.resource.status
    conditions = status.conditions if status is not None else []
    reasons = {each.type: each.reason for each in conditions}
    if held and reasons.get("VMMRunning") == "HeldByNode" and _needs_a_vmm(request):
        shown = next(each for each in conditions if each.type == "VMMRunning")
        raise FailedPrecondition(shown.message, resource=stored.title, hint="chv node resume")
    missing = SSH_NEEDS.get(reasons.get("SSHReady", ""))
    if missing is not None and request.condition == "SSHReady" and request.status == "True":
        why, field = missing
        raise FailedPrecondition(
            f"SSH is not looked for: {why}", resource=stored.title, field=field
        )


def _needs_a_vmm(request: api.WaitCondition) -> bool:
    running = request.condition in NEEDS_A_VMM and request.status == "True"
    return running or request.condition == "phase=Running"


def _runs_by_itself(stored: StoredObject) -> bool:
    vm = stored.resource
    return isinstance(vm, VirtualMachine) and wants_to_run(vm, facts_of(stored))


def _why(stored: StoredObject) -> str:
    status = stored.resource.status
    conditions = status.conditions if status is not None else []
    telling = [each for each in conditions if each.type in ("Ready", "VMMRunning")]
    return telling[0].message if telling else "see its conditions"
