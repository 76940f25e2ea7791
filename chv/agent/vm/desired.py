"""What is wanted of a VM, read from the store's tables. Pure."""

from __future__ import annotations

from dataclasses import replace

from chv.agent.ports import VmHandle
from chv.agent.records import StoredObject, VmFacts
from chv.agent.tables import Tables
from chv.agent.vm.model import (
    DesiredDisk,
    DesiredNic,
    DesiredVm,
)
from chv.agent.vm.rebuild_rules import standing
from chv.common.ids import derived_uid
from chv.common.quantity import parse_bytes
from chv.common.wire.agent import VolumeVerb
from chv.common.wire.resources import (
    InterfaceSpec,
    RunStrategy,
    VirtualMachine,
    Volume,
    VolumeAccessMode,
)


def vm_of(stored: StoredObject) -> VirtualMachine:
    """Return the stored object as the VM that it is."""
    assert isinstance(stored.resource, VirtualMachine)
    return stored.resource


def facts_of(stored: StoredObject) -> VmFacts:
    """Return the facts of a stored VM."""
    assert stored.facts is not None
    return stored.facts


def handle_of(stored: StoredObject) -> VmHandle:
    """Return the VM as the ports know it."""
    metadata, facts = stored.resource.metadata, facts_of(stored)
    return VmHandle(
        uid=metadata.uid,
        namespace=metadata.namespace,
        name=metadata.name,
        slot=facts.slot,
        driver=facts.selection.name if facts.selection is not None else "",
    )


def nic_id(vm_uid: str, interface: InterfaceSpec, network_uid: str) -> str:
    """Return the uid of a NIC; another network makes it another NIC."""
    return derived_uid(vm_uid, f"nic/{interface.name}/{network_uid}")


def wants_to_run(vm: VirtualMachine, facts: VmFacts) -> bool:
    """Tell whether a VMM should run."""
    if vm.metadata.deletion_timestamp or facts.given_up:
        return False
    if facts.restore is not None:  # and afterwards as its run strategy says
        return True
    match vm.spec.run_strategy:
        case RunStrategy.HALTED:
            return False
        case RunStrategy.MANUAL:
            return facts.started
        case _:
            return True


def _held(tables: Tables, stored: StoredObject) -> str:
    """Say why a VM that is to run may not: the node lets none run.

    One that is being saved or restored comes to the end of that first: what is half done could
    leave it without its memory, or start it from disks that are not its own.
    """
    facts = facts_of(stored)
    if not wants_to_run(vm_of(stored), facts):
        return ""
    busy = stored.uid in tables.workers and (facts.restore is not None or facts.saving)
    return "" if busy else tables.node.words


def desired_vm(tables: Tables, stored: StoredObject) -> DesiredVm:
    """Return what is wanted."""
    vm, facts = vm_of(stored), facts_of(stored)
    held = _held(tables, stored)
    rebuild = standing(tables, stored) if facts.rebuild is not None else None
    return DesiredVm(
        uid=stored.uid,
        running=wants_to_run(vm, facts) and not held,
        held=held,
        deleting=stored.deleting,
        replace_worker=facts.replace_worker,
        force_stop=facts.force_stop,
        reset_request=facts.reset_request,
        storage_request=facts.storage_request,
        paused=facts.paused,
        saving=facts.saving,
        restore=facts.restore.snapshot_uid if facts.restore is not None else "",
        disks_restored=facts.restore is not None and facts.restore.disks_touched,
        cpus=vm.spec.cpus,
        memory_bytes=parse_bytes(vm.spec.memory, field="spec.memory"),
        lent=facts.lent,
        rebuild=rebuild.stage if rebuild is not None else None,
        rebuild_force=facts.rebuild is not None and facts.rebuild.force,
        boot_image=vm.spec.boot.image,
        disks=_disks(tables, vm),
        nics=_nics(tables, vm, facts),
    )


def same_wish(one: DesiredVm, other: DesiredVm) -> bool:
    """Compare but for requests, which are cleared when they are fulfilled."""
    cleared = {"force_stop": False, "reset_request": "", "storage_request": "", "lent": ""}
    return replace(one, **cleared) == replace(other, **cleared)  # type: ignore[arg-type]


def _disks(tables: Tables, vm: VirtualMachine) -> tuple[DesiredDisk, ...]:
    found = []
    for disk in vm.spec.disks:
        volume = tables.find("Volume", vm.metadata.namespace, disk.volume)
        shared = volume is not None and _is_shared(volume)
        found.append(
            DesiredDisk(
                name=disk.name,
                volume=disk.volume,
                volume_uid=volume.uid if volume is not None else "",
                generation=volume.resource.metadata.generation if volume is not None else 0,
                read_only=disk.read_only or shared,
                shared=shared,
                grow_now=_grow_now(volume) if volume is not None else "",
                held=_at_rest(volume) if volume is not None else "",
                failure=_failure(volume) if volume is not None else "",
            )
        )
    return tuple(found)


def _is_shared(volume: StoredObject) -> bool:
    assert isinstance(volume.resource, Volume)
    return volume.resource.spec.access_mode is VolumeAccessMode.READ_ONLY_MANY


def _grow_now(volume: StoredObject) -> str:
    """Return the operation that wants the guest to see the volume's new size at once."""
    request = volume.volume_facts.request if volume.volume_facts is not None else None
    if request is None or request.verb != VolumeVerb.GROW_NOW.value or request.cancelling:
        return ""
    return request.operation_id


def _at_rest(volume: StoredObject) -> str:
    """Say which verb must not see the volume attached: what a guest wrote since would be lost."""
    request = volume.volume_facts.request if volume.volume_facts is not None else None
    return _AT_REST.get(request.verb, "") if request is not None else ""


def _failure(volume: StoredObject) -> str:
    """Return why the volume has failed for good, as it is shown; empty: it has not."""
    status = volume.resource.status
    if status is None or status.phase != "Failed":
        return ""
    return next((each.message for each in status.conditions if each.type == "Ready"), "")


_AT_REST = {
    VolumeVerb.RESTORE.value: "is being restored",
    VolumeVerb.CHECK.value: "is being checked",
    VolumeVerb.REPAIR.value: "is being repaired",
}


def _nics(tables: Tables, vm: VirtualMachine, facts: VmFacts) -> tuple[DesiredNic, ...]:
    found = []
    for interface in vm.spec.interfaces:
        network = tables.find("Network", vm.metadata.namespace, interface.network)
        network_uid = network.uid if network is not None else ""
        found.append(
            DesiredNic(
                name=interface.name,
                nic_id=nic_id(vm.metadata.uid, interface, network_uid),
                network=interface.network,
                network_uid=network_uid,
                network_generation=network.resource.metadata.generation if network else 0,
                generation=facts.nic_generation,
                groups=_groups(tables, vm, interface),
            )
        )
    return tuple(found)


def _groups(
    tables: Tables, vm: VirtualMachine, interface: InterfaceSpec
) -> tuple[tuple[str, str], ...]:
    namespace = vm.metadata.namespace
    found = ((n, tables.find("SecurityGroup", namespace, n)) for n in interface.security_groups)
    return tuple((name, group.uid if group is not None else "") for name, group in found)


def first_nic(tables: Tables, stored: StoredObject) -> str:
    """Return the uid of the VM's first NIC, '' where it has none."""
    nics = _nics(tables, vm_of(stored), facts_of(stored))
    return nics[0].nic_id if nics and nics[0].network_uid else ""
