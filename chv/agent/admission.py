"""What may become desired state: parsed objects against those that are there.

`admit` checks all objects of a request and returns the changes for all of them, or raises and
changes nothing. Pure but for `Context`'s ids and clock; the question to nwd whether a network
fits is asked by the engine, before. Errors name object, field, value and fix.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from chv.agent.admission_rules import check_change, check_references, check_shared
from chv.agent.context import Context
from chv.agent.network.admission import check_exposed
from chv.agent.network.apart import check_apart
from chv.agent.owners import with_owners
from chv.agent.records import Change, PutFacts, PutObject, StoredObject, VmFacts
from chv.agent.references import references, referrers
from chv.agent.resources.ports import refuse_full
from chv.agent.strategies import BY_FILE
from chv.agent.tables import Tables
from chv.agent.vm.crashes import forgiven
from chv.common.errors import (
    Conflict,
    FailedPrecondition,
    InvalidArgument,
    ResourceExhausted,
)
from chv.common.wire.agent import AppliedObject
from chv.common.wire.resources import (
    APPLY_ORDER,
    Network,
    ObjectMeta,
    Resource,
    RunStrategy,
    VirtualMachine,
)

MAKING = frozenset({"create", "update", "clone"})  # verbs that an apply of the same joins
_replace = msgspec.structs.replace
Key = tuple[str, str, str]  # kind, namespace, name


@dataclass(frozen=True, slots=True)
class Admitted:
    """What a request leads to, in the order in which the objects are applied."""

    changes: tuple[Change, ...]
    results: tuple[AppliedObject, ...]
    stored: tuple[StoredObject, ...]  # as they will be, changed ones only


def ordered(resources: list[Resource]) -> list[Resource]:
    """Return the objects in the order of apply; refuse one object given twice."""
    seen: set[tuple[str, str, str]] = set()
    for resource in resources:
        key = (resource.kind, resource.metadata.namespace, resource.metadata.name)
        if key in seen:
            raise InvalidArgument(
                f"{key[0]} {key[1]}/{key[2]} is there twice",
                resource=f"{key[0]} {key[1]}/{key[2]}",
                field="metadata.name",
                hint="give each object once",
            )
        seen.add(key)
    return sorted(resources, key=lambda resource: APPLY_ORDER.index(resource.kind))


def admit(
    context: Context,
    resources: list[Resource],
    requester: str,
    reason: str,
    uids: Mapping[Key, str] | None = None,
) -> Admitted:
    """Check all objects against the tables and each other; return what is to be stored.

    `uids`: of new objects that have one elsewhere already, by kind, namespace and name.
    """
    tables = context.ledger.tables
    resources, uids = with_owners(tables, resources, uids or {}, context.world.ids.uid)
    future = _Future(context, tables, uids)
    for resource in resources:
        future.add(resource)
    for stored in future.after.values():
        check_references(stored, future.find)
    check_shared(tables, future.after, future.find)
    check_exposed(tables, future.after, future.find)
    check_apart(tables, future.after)
    refuse_full(tables, future.after)
    context.budget.refuse_excess(tables, future.after)
    return future.admitted(requester, reason)


class _Future:
    """The objects as they will be, on top of those that are."""

    def __init__(self, context: Context, tables: Tables, uids: Mapping[Key, str]) -> None:
        self._context = context
        self._uids = uids
        self._tables = tables
        self._actions: list[tuple[StoredObject, str]] = []
        self.after: dict[str, StoredObject] = {}  # changed or new ones by uid
        self._told: list[StoredObject] = []  # networks that say something else of their NICs
        self._slots = {o.facts.slot for o in tables.objects.values() if o.facts is not None}

    def add(self, resource: Resource) -> None:
        metadata = resource.metadata
        before = self._tables.find(resource.kind, metadata.namespace, metadata.name)
        if before is None:
            self._add(self._created(resource), "created")
            return
        if before.deleting:
            raise FailedPrecondition(
                "it is being deleted",
                resource=before.title,
                hint="wait until it is gone, then apply again",
            )
        self._compare_and_set(before, metadata)
        after = self._updated(before, resource)
        if after is before:
            self._actions.append((before, "unchanged"))
            return
        check_change(self._tables, before, after)
        self._add(after, "configured")
        if _tells_otherwise(before.resource, resource):
            self._told.append(after)

    def find(self, kind: str, namespace: str, name: str) -> StoredObject | None:
        """Return the object as it will be."""
        for stored in self.after.values():
            if stored.key == (kind, namespace, name):
                return stored
        return self._tables.find(kind, namespace, name)

    def admitted(self, requester: str, reason: str) -> Admitted:
        changes: list[Change] = list(self._new_nics())
        results = []
        for stored, action in self._actions:
            metadata = stored.resource.metadata
            operation_id = self._joined(stored)
            if action != "unchanged":
                verb = "create" if action == "created" else "update"
                operation = self._context.operations.new(verb, stored, requester, reason)
                operation_id = operation.id
                changes += [
                    PutObject(object=stored),
                    *self._context.operations.superseding(operation),
                ]
            results.append(
                AppliedObject(
                    kind=stored.resource.kind,
                    namespace=metadata.namespace,
                    name=metadata.name,
                    uid=metadata.uid,
                    generation=metadata.generation,
                    action=action,
                    operation_id=operation_id,
                )
            )
        return Admitted(tuple(changes), tuple(results), tuple(self.after.values()))

    def _joined(self, stored: StoredObject) -> str:
        """Return the operation that makes an unchanged object so, where it is under way."""
        current = self._context.operations.current(stored.uid)
        same = current is not None and current.generation == stored.resource.metadata.generation
        return current.id if current is not None and same and current.verb in MAKING else ""

    def _new_nics(self) -> list[PutFacts]:
        """VMs that do not change, yet of whose NICs something else is to be told."""
        found = {
            vm.uid: vm.facts
            for network in self._told
            for vm in referrers(self._tables, network.key)
            if vm.facts is not None and vm.uid not in self.after
        }
        return [
            PutFacts(uid=uid, facts=_replace(facts, nic_generation=facts.nic_generation + 1))
            for uid, facts in found.items()
        ]

    def _add(self, stored: StoredObject, action: str) -> None:
        self.after[stored.uid] = stored
        self._actions.append((stored, action))

    def _revision(self) -> str:
        return str(self._context.ledger.next_revision(len(self.after) + 1))

    def _created(self, resource: Resource) -> StoredObject:
        given = resource.metadata
        if given.uid or given.resource_version:
            raise Conflict(
                "there is no such object, yet the file names its uid or resourceVersion",
                resource=f"{resource.kind} {given.namespace}/{given.name}",
                field="metadata.uid" if given.uid else "metadata.resourceVersion",
                hint="leave both out to create it",
            )
        key = (resource.kind, given.namespace, given.name)
        metadata = ObjectMeta(
            name=given.name,
            namespace=given.namespace,
            uid=self._uids.get(key) or self._context.world.ids.uid(),
            generation=1,
            resource_version=self._revision(),
            labels=given.labels,
            annotations=given.annotations,
            finalizers=given.finalizers,
            owner_references=given.owner_references,
            creation_timestamp=self._context.now(),
        )
        made = _replace(resource, metadata=metadata, status=None)
        return StoredObject(resource=made, facts=self._facts(made))

    def _facts(self, resource: Resource) -> VmFacts | None:
        if not isinstance(resource, VirtualMachine):
            return None
        vms_max = self._context.world.limits.vms_max
        slot = next((n for n in range(vms_max) if n not in self._slots), None)
        if slot is None:
            raise ResourceExhausted(
                f"there are {vms_max} VMs, as many as limits.vms_max allows",
                resource=f"VirtualMachine {resource.metadata.name}",
                hint="delete one, or raise limits.vms_max",
            )
        self._slots.add(slot)
        strategy = resource.spec.run_strategy
        reason = BY_FILE if strategy is RunStrategy.HALTED else ""
        return VmFacts(slot=slot, last_strategy=_running(strategy), stop_reason=reason)

    def _compare_and_set(self, before: StoredObject, given: ObjectMeta) -> None:
        current = before.resource.metadata
        if given.uid and given.uid != current.uid:
            raise Conflict(
                f"the object of that name is {current.uid}, not {given.uid}",
                resource=before.title,
                field="metadata.uid",
                hint="it was deleted and made again; get it afresh",
            )
        if given.resource_version and given.resource_version != current.resource_version:
            raise Conflict(
                f"resourceVersion is {current.resource_version}, not {given.resource_version}",
                resource=before.title,
                field="metadata.resourceVersion",
                hint="somebody changed it; get it afresh and apply again",
            )

    def _updated(self, before: StoredObject, resource: Resource) -> StoredObject:
        old, new = before.resource.metadata, resource.metadata
        same_spec = before.resource.spec == resource.spec
        metadata = _replace(
            old,
            generation=old.generation if same_spec else old.generation + 1,
            labels=new.labels,
            annotations=new.annotations,
            finalizers=new.finalizers,
            owner_references=new.owner_references,
        )
        if same_spec and metadata == old:
            return before
        metadata = _replace(metadata, resource_version=self._revision())
        made = _replace(resource, metadata=metadata, status=before.resource.status)
        named = {reference.key for reference in references(made)}
        told = any(network.key in named for network in self._told)
        facts = _facts_after(before, made, new_nics=told)
        return _replace(before, resource=made, facts=facts)


def _tells_otherwise(before: Resource, after: Resource) -> bool:
    """Tell whether a network now serves metadata of its NICs, or no longer does."""
    if not isinstance(before, Network) or not isinstance(after, Network):
        return False
    return before.spec.metadata is not after.spec.metadata


def _facts_after(before: StoredObject, after: Resource, *, new_nics: bool) -> VmFacts | None:
    """A new spec takes back that the node gave up; changed interfaces are a new NIC generation."""
    facts = before.facts
    if facts is None or not isinstance(after, VirtualMachine):
        return None
    assert isinstance(before.resource, VirtualMachine)
    generation = facts.nic_generation
    if new_nics or _nic_part(before.resource) != _nic_part(after):
        generation = max(generation + 1, after.metadata.generation)
    if before.resource.spec == after.spec:
        return _replace(facts, nic_generation=generation)
    strategy = after.spec.run_strategy
    halted = strategy is RunStrategy.HALTED
    return _replace(
        forgiven(facts),
        nic_generation=generation,
        last_strategy=facts.last_strategy if halted else strategy,
        force_stop=False,
        stop_reason=_stop_reason(before, halted=halted),
    )


def _stop_reason(before: StoredObject, *, halted: bool) -> str:
    """Return who stops it; of a VM that is stopped already that is known."""
    assert isinstance(before.resource, VirtualMachine) and before.facts is not None
    if halted and before.resource.spec.run_strategy is RunStrategy.HALTED:
        return before.facts.stop_reason
    return BY_FILE if halted else ""


def _nic_part(vm: VirtualMachine) -> object:
    spec = vm.spec
    return (spec.interfaces, spec.guest_ports, spec.cloud_init)


def _running(strategy: RunStrategy) -> RunStrategy:
    return RunStrategy.RERUN_ON_FAILURE if strategy is RunStrategy.HALTED else strategy
