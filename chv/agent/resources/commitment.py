"""What VMs are promised of the machine's memory and CPUs, and what may not be promised. Pure.

Two sums: of the VMs that are wanted running, for requests; and of those whose VMM may live, for
a start, since a VM that is being stopped holds its memory to the end. Both are taken under the
ledger's lock together with what is stored then, so two requests cannot both have the last of it.
Only what asks for more is refused: VMs that run are never touched where a limit has shrunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

from chv.agent.ports import VmmSelection
from chv.agent.records import StoredObject, WorkerRow
from chv.agent.resources.capacity import Capacity, about
from chv.agent.resources.overhead import Shape, overhead_bytes, qcow2_cache_bytes
from chv.agent.tables import Tables
from chv.agent.vm.desired import facts_of, vm_of, wants_to_run
from chv.common.errors import ResourceExhausted
from chv.common.quantity import parse_bytes
from chv.common.wire.agent import VmVerb
from chv.common.wire.resources import (
    ImageFormat,
    VirtualMachineSpec,
    VmmChoice,
    Volume,
    VolumeSpec,
)

Expect = Callable[[VmmChoice], VmmSelection | None]
Find = Callable[[str, str, str], StoredObject | None]
KNOWN_MAX = 20_000
_bytes = lru_cache(maxsize=1024)(parse_bytes)
_overhead = lru_cache(maxsize=4096)(overhead_bytes)


@dataclass(frozen=True, slots=True)
class Claim:
    """On memory, of which `overhead_bytes` are not the guest's, and on virtual CPUs."""

    memory_bytes: int = 0
    overhead_bytes: int = 0
    vcpus: int = 0

    def __add__(self, other: Claim) -> Claim:
        return Claim(
            self.memory_bytes + other.memory_bytes,
            self.overhead_bytes + other.overhead_bytes,
            self.vcpus + other.vcpus,
        )


NOTHING = Claim()


@dataclass(frozen=True, slots=True)
class Budget:
    """The capacity, and what is expected of a VM whose VMM is not chosen yet."""

    capacity: Capacity
    expect: Expect
    # What was claimed last, by uid, and the very objects that this rests on.
    _known: dict[str, tuple[tuple[object, ...], Claim]] = field(default_factory=dict, repr=False)

    # --- claims

    def wanted(self, tables: Tables, stored: StoredObject, find: Find | None = None) -> Claim:
        """Return what a VM claims as it is wanted: nothing where it is not to run.

        `find`: volumes as they will be, where they are not in the tables yet.
        """
        vm, facts = vm_of(stored), facts_of(stored)
        if not wants_to_run(vm, facts):
            return NOTHING
        find = find or tables.find
        row = tables.workers.get(stored.uid)
        expected = facts.selection or self.expect(vm.spec.vmm)
        parts = _volumes(vm.metadata.namespace, vm.spec, find)
        rests_on: tuple[object, ...] = (vm.spec, facts.restore, expected, *parts)
        if row is not None:
            parts = _volumes(vm.metadata.namespace, row.spec or vm.spec, find)
            rests_on = (*rests_on, row.config, row.spec, *parts)
        known = self._known.get(stored.uid)
        if known is not None and _same(known[0], rests_on):
            return known[1]
        wish = self._of_wish(tables, stored, find)
        claim = wish if row is None else _larger(wish, _of_row(stored, row, find))
        if len(self._known) > KNOWN_MAX:
            self._known.clear()
        if facts.restore is None:
            self._known[stored.uid] = (rests_on, claim)
        return claim

    def held(self, tables: Tables, stored: StoredObject) -> Claim:
        """Return what a VM claims whose VMM may live: what it has, and what it is to grow to."""
        row = tables.workers.get(stored.uid)
        if row is None:
            return NOTHING
        return _larger(_of_row(stored, row, tables.find), self.wanted(tables, stored))

    def committed(self, tables: Tables) -> Claim:
        """Return what all VMs claim that are wanted running."""
        return _sum(self.wanted(tables, vm) for vm in _vms(tables))

    def of_kind(self, shape: Shape, choice: VmmChoice) -> Claim:
        """Return what a new VM of that shape would claim."""
        return claim_of(chosen(shape, self.expect(choice), choice), shape.memory_bytes)

    # --- refusals

    def refuse_excess(self, tables: Tables, after: Mapping[str, StoredObject]) -> None:
        """Refuse objects that would lead to more than there is: ResourceExhausted."""
        changed = self._changed(tables, after)
        more_bytes = sum(now.memory_bytes - was.memory_bytes for _, was, now in changed)
        more_vcpus = sum(now.vcpus - was.vcpus for _, was, now in changed)
        if more_bytes <= 0 and more_vcpus <= 0:
            return
        total = self.committed(tables)
        memory, vcpus = self.capacity.memory_bytes, self.capacity.vcpus
        if memory is not None and more_bytes > 0 and total.memory_bytes + more_bytes > memory:
            first = next(each for each in changed if each[2].memory_bytes > each[1].memory_bytes)
            raise self._no_memory(first[0], total.memory_bytes, more_bytes, first[2])
        if vcpus is not None and more_vcpus > 0 and total.vcpus + more_vcpus > vcpus:
            first = next(each for each in changed if each[2].vcpus > each[1].vcpus)
            raise self._no_vcpus(first[0], total.vcpus, more_vcpus)

    def _changed(
        self, tables: Tables, after: Mapping[str, StoredObject]
    ) -> list[tuple[StoredObject, Claim, Claim]]:
        """Return the VMs of a request with their claims before and after it."""
        future = {stored.key: stored for stored in after.values()}

        def find(kind: str, namespace: str, name: str) -> StoredObject | None:
            return future.get((kind, namespace, name)) or tables.find(kind, namespace, name)

        found = []
        for stored in after.values():
            if stored.facts is not None:
                known = tables.objects.get(stored.uid)
                was = self.wanted(tables, known) if known is not None else NOTHING
                found.append((stored, was, self.wanted(tables, stored, find)))
        return found

    def refuse_verb(self, tables: Tables, after: StoredObject, verb: VmVerb) -> None:
        """Refuse a verb before a VM is stopped for it that could not come back."""
        self.refuse_excess(tables, {after.uid: after})
        if verb in (VmVerb.RESTART, VmVerb.RESTORE):
            self.refuse_start(tables, after)

    def refuse_start(self, tables: Tables, stored: StoredObject) -> None:
        """Refuse a VMM for which there is no memory beside those that may live."""
        others = _sum(
            self.held(tables, tables.objects[uid]) for uid in tables.workers if uid != stored.uid
        )
        own = self.wanted(tables, stored)
        memory, vcpus = self.capacity.memory_bytes, self.capacity.vcpus
        if memory is not None and others.memory_bytes + own.memory_bytes > memory:
            raise self._no_memory(stored, others.memory_bytes, own.memory_bytes, own)
        if vcpus is not None and others.vcpus + own.vcpus > vcpus:
            raise self._no_vcpus(stored, others.vcpus, own.vcpus)

    def _no_memory(
        self, stored: StoredObject, committed: int, asked: int, claim: Claim
    ) -> ResourceExhausted:
        memory = self.capacity.memory_bytes
        assert memory is not None
        left = max(0, memory - committed)
        return ResourceExhausted(
            f"{about(asked)} of memory is asked for ({about(claim.overhead_bytes)} of it around "
            f"the guest), {about(committed)} is committed to other VMs, and {about(left)} of "
            f"{about(memory)} is left ({self.capacity.words})",
            resource=stored.title,
            field="spec.memory",
            hint="stop a VM, give this one less, or raise limits.memory_overcommit in chv.toml; "
            "chv fit says what has room",
        )

    def _no_vcpus(self, stored: StoredObject, committed: int, asked: int) -> ResourceExhausted:
        capacity = self.capacity
        return ResourceExhausted(
            f"{asked} vCPUs are asked for, {committed} are committed to other VMs, and at most "
            f"{capacity.vcpus} may be ({capacity.cpus} CPUs times {capacity.vcpu_overcommit:g})",
            resource=stored.title,
            field="spec.cpus",
            hint="stop a VM, give this one fewer, or raise limits.vcpu_overcommit in chv.toml",
        )

    # --- what a claim consists of

    def _of_wish(self, tables: Tables, stored: StoredObject, find: Find) -> Claim:
        """What the next VMM is to have: that of the snapshot while the VM is being restored."""
        vm, facts = vm_of(stored), facts_of(stored)
        selection = facts.selection or self.expect(vm.spec.vmm)
        claim = _claim(vm.metadata.namespace, vm.spec, selection, find)
        snapshot = tables.objects.get(facts.restore.snapshot_uid) if facts.restore else None
        known = snapshot.snapshot_facts if snapshot is not None else None
        if known is None or known.saved is None:
            return claim
        config = known.saved.config
        return _larger(claim, _sized(claim, config.memory_bytes, config.cpus))


def _of_row(stored: StoredObject, row: WorkerRow, find: Find) -> Claim:
    """What a VMM has, whose sizes may have changed since its start."""
    vm, config = vm_of(stored), row.config
    selection = VmmSelection(name=row.driver, accelerator=config.accelerator)
    claim = _claim(vm.metadata.namespace, row.spec or vm.spec, selection, find)
    return _sized(claim, config.memory_bytes, config.cpus)


def _claim(
    namespace: str, spec: VirtualMachineSpec, selection: VmmSelection | None, find: Find
) -> Claim:
    memory_bytes = _bytes(spec.memory, field="spec.memory")
    volumes = _volumes(namespace, spec, find)
    layered = [each for each in volumes if each is None or each.format is ImageFormat.QCOW2]
    shape = Shape(
        vcpus=max(spec.cpus, spec.max_cpus),
        memory_bytes=max(memory_bytes, _bytes(spec.max_memory) if spec.max_memory else 0),
        disks=len(volumes),
        proxies=0 if layered else len(volumes),  # a VM's disks are all behind one, or none is
        nics=len(spec.interfaces),
        cache_bytes=sum(qcow2_cache_bytes(_bytes(each.size) if each else 0) for each in layered),
    )
    claim = claim_of(chosen(shape, selection, spec.vmm), memory_bytes)
    return _sized(claim, memory_bytes, spec.cpus)


def chosen(shape: Shape, selection: VmmSelection | None, choice: VmmChoice) -> Shape:
    """Return the shape with its VMM, as far as that is known."""
    if selection is not None:
        return replace(shape, driver=selection.name, accelerator=selection.accelerator)
    return replace(shape, driver="" if choice is VmmChoice.AUTO else choice.value)


def claim_of(shape: Shape, guest_bytes: int) -> Claim:
    """Return a claim with the bound of what is around the guest."""
    overhead = _overhead(shape)
    return Claim(guest_bytes + overhead, overhead, shape.vcpus)


def _volumes(namespace: str, spec: VirtualMachineSpec, find: Find) -> list[VolumeSpec | None]:
    """Return the volumes of a VM's disks; None for one that is not there."""
    found = (find("Volume", namespace, disk.volume) for disk in spec.disks)
    volumes = (stored.resource if stored is not None else None for stored in found)
    return [each.spec if isinstance(each, Volume) else None for each in volumes]


def _same(one: tuple[object, ...], other: tuple[object, ...]) -> bool:
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))


def _sized(claim: Claim, guest_bytes: int, vcpus: int) -> Claim:
    """Return the claim of the same devices with other sizes."""
    return Claim(guest_bytes + claim.overhead_bytes, claim.overhead_bytes, vcpus)


def _larger(one: Claim, other: Claim) -> Claim:
    return Claim(
        max(one.memory_bytes, other.memory_bytes),
        max(one.overhead_bytes, other.overhead_bytes),
        max(one.vcpus, other.vcpus),
    )


def _sum(claims: Iterable[Claim]) -> Claim:
    total = NOTHING
    for claim in claims:
        total += claim
    return total


def _vms(tables: Tables) -> Iterable[StoredObject]:
    return (stored for stored in tables.objects.values() if stored.facts is not None)
