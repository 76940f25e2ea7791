"""The invariants at the end of a schedule: the world is what the store says, and nothing else.

Those that hold at every moment (one VMM per VM, intents, volumes under a VMM, resets) are
checked by the fakes themselves at each effect.
"""

from __future__ import annotations

import msgspec

from chv.agent.generations import GENERATIONS_MAX
from chv.agent.network.policy import wanted_exposure, wanted_group
from chv.agent.records import FINAL_STATES, StoredObject
from chv.agent.tables import Tables
from chv.agent.vm.desired import desired_vm, facts_of, vm_of, wants_to_run
from chv.agent.volume.source import has_failed, volume_of
from chv.agent.volume.wish import backend_of, same_place
from chv.common.wire.agent import OperationState
from chv.common.wire.resources import Volume
from chv.common.wire.stord import JobState
from chv.vmm.driver import VmmState
from tests.sim.client import Client
from tests.sim.copies import leftovers
from tests.sim.world import Machine


def problems(machine: Machine, client: Client) -> list[str]:
    """Return every broken invariant, in words."""
    tables = machine.store.tables
    return [
        *machine.violations,
        *_nothing_lost(tables, client),
        *_history(tables),
        *_operations(tables, client),
        *_vms(machine, tables),
        *_volumes(machine, tables),
        *_storage(machine, tables),
        *_networks(machine, tables),
        *_policy(machine, tables),
        *_files(machine, tables),
        *leftovers(tables),
    ]


def _nothing_lost(tables: Tables, client: Client) -> list[str]:
    """I2: what was acknowledged is there, or was deleted on request."""
    found = []
    for uid, generation in client.acknowledged.items():
        stored = tables.objects.get(uid)
        if stored is None and uid not in tables.tombstones:
            found.append(f"I2: {uid} is lost")
        elif stored is not None and stored.resource.metadata.generation < generation:
            found.append(f"I2: generation {generation} of {stored.title} is lost")
    return found


def _history(tables: Tables) -> list[str]:
    """I2: each generation of what is there has its row, and the newest says what is wanted."""
    found = []
    for uid, stored in tables.objects.items():
        newest = stored.resource.metadata.generation
        rows = tables.histories.get(uid, ())
        wanted = list(range(max(1, newest - GENERATIONS_MAX + 1), newest + 1))
        if [each.row.generation for each in rows] != wanted:
            found.append(f"I2: a generation of {stored.title} has no row in its history")
        elif rows[-1].spec != msgspec.json.encode(stored.resource.spec).decode():
            found.append(f"I2: the history of {stored.title} says something else than its spec")
    return found


def _operations(tables: Tables, client: Client) -> list[str]:
    """I10: each operation has ended, once."""
    found = []
    for operation_id in client.operations:
        operation = tables.operations.get(operation_id)
        if operation is None:
            found.append(f"I10: operation {operation_id} is lost")
    for operation in tables.operations.values():
        if operation.state not in FINAL_STATES:
            found.append(
                f"I10: {operation.verb} of {operation.kind} {operation.name} is "
                f"{operation.state.value}: {operation.message}"
            )
        running = [step.name for step in operation.steps if step.outcome == "running"]
        if operation.state is OperationState.SUCCEEDED and running:
            found.append(f"I10: {operation.id} has succeeded with {running} under way")
    return found


def _vms(machine: Machine, tables: Tables) -> list[str]:
    """I3: each VM is as wanted, and shown as it is; I1 and I4 with it."""
    found = []
    for stored in tables.of_kind("VirtualMachine"):
        vm, facts = vm_of(stored), facts_of(stored)
        process = machine.host.live(stored.uid)
        wanted = wants_to_run(vm, facts)
        phase = vm.status.phase.value if vm.status is not None else "none"
        if stored.deleting:
            found.append(f"I3: {stored.title} is still being deleted, phase {phase}")
        elif wanted and (process is None or process.state is not VmmState.RUNNING):
            found.append(f"I3: {stored.title} should run, phase {phase}, {process}")
        elif not wanted and process is not None:
            found.append(f"I3: {stored.title} should not run, phase {phase}, {process}")
        expected = "Running" if wanted else "Failed" if facts.given_up else "Stopped"
        if phase != expected and not stored.deleting:
            found.append(f"I3: {stored.title} is shown {phase}, not {expected}")
        if wanted and process is not None and process.reset_due:
            found.append(f"I3: {stored.title} still waits for a reset")
        if wanted and process is not None:
            disks = {d.disk_id: d.volume_uid for d in desired_vm(tables, stored).disks}
            if process.disks != disks:
                found.append(f"I3: {stored.title} has {process.disks} plugged, not {disks}")
            nics = {nic.nic_id for nic in desired_vm(tables, stored).nics}
            if process.nics != nics:
                found.append(f"I3: {stored.title} has NICs {process.nics}, not {nics}")
            if process.frozen:
                found.append(f"I3: {stored.title} is still frozen")
        if wanted and stored.uid not in machine.host.consoles:
            found.append(f"I3: {stored.title} has no console")
    known = {stored.uid for stored in tables.of_kind("VirtualMachine")}
    for process in machine.host.processes.values():
        if process.alive and process.vm_uid not in known:
            found.append(f"I4: VMM {process.pid} of a deleted VM lives")
    return found


def _volumes(machine: Machine, tables: Tables) -> list[str]:
    found = []
    stord = machine.host.stord
    for stored in tables.of_kind("Volume"):
        volume = stord.volumes.get(stored.uid)
        if volume is None and _is_hopeless(stored, tables):
            continue
        if volume is None or volume.generation != stored.resource.metadata.generation:
            found.append(f"I3: {stored.title} is not as wanted: {volume}")
    for uid in stord.volumes.keys() - {stored.uid for stored in tables.of_kind("Volume")}:
        found.append(f"I4: volume {uid} is left")
    for stored in tables.of_kind("VirtualMachine"):
        desired = desired_vm(tables, stored)
        wanted = {disk.volume_uid for disk in desired.disks} if desired.running else set()
        session = stord.sessions.get(stored.uid)
        attached = set(session.attachments) if session is not None else set()
        if attached != wanted:
            found.append(f"I3: {stored.title} has {attached} attached, not {wanted}")
        if session is not None and not session.serving:
            found.append(f"I3: {stored.title} has a dead storage daemon")
    for vm_id in stord.sessions.keys() - tables.objects.keys():
        found.append(f"I4: a storage daemon of {vm_id} is left")
    return found


def _is_hopeless(stored: StoredObject, tables: Tables) -> bool:
    """A clone of a snapshot that was never taken, or is of several, is shown as failed."""
    volume = stored.resource
    assert isinstance(volume, Volume)
    source = volume.spec.source
    if source is None or volume.status is None or volume.status.phase != "Failed":
        return False
    snapshot = tables.find("VolumeSnapshot", volume.metadata.namespace, source.snapshot)
    if snapshot is None:
        return False
    return has_failed(snapshot) or not volume_of(snapshot, source.snapshot_volume)


def _storage(machine: Machine, tables: Tables) -> list[str]:
    """Each volume is where and as large as wanted, each snapshot is there; nothing goes on."""
    found, sim = [], machine.host.stord
    for stored in tables.of_kind("Volume"):
        volume, facts = sim.volumes.get(stored.uid), stored.volume_facts
        assert isinstance(stored.resource, Volume)
        wanted = backend_of(stored.resource, None)
        if facts is not None and facts.request is not None:
            found.append(f"I10: {facts.request.verb} of {stored.title} is still recorded")
        if volume is None:
            continue
        move = facts.move if facts is not None else None
        stays = volume.snapshots or (move is not None and move.failed)
        if not same_place(volume.backend, wanted) and not stays:
            found.append(f"I3: {stored.title} is not where it is wanted")
        if volume.backend.size_bytes != wanted.size_bytes:
            found.append(f"I3: {stored.title} has not the size that is wanted")
        if stored.deleting:
            found.append(f"I3: {stored.title} is still being deleted")
    there = {uid for volume in sim.volumes.values() for uid in volume.snapshots}
    snapshots = [*tables.of_kind("VolumeSnapshot"), *tables.of_kind("VirtualMachineSnapshot")]
    for stored in snapshots:
        taken = stored.snapshot_facts is not None and stored.snapshot_facts.taken
        if taken and stored.uid not in there:
            found.append(f"I2: {stored.title} is lost")
        if stored.deleting:
            found.append(f"I3: {stored.title} is still being deleted")
    for uid in sorted(there - {stored.uid for stored in snapshots}):
        found.append(f"I4: snapshot {uid} is left")
    running = [job.info for job in sim.jobs.values() if job.info.state is JobState.RUNNING]
    found += [f"I10: job {job.job_id} ({job.kind.value}) still runs" for job in running]
    return found


def _networks(machine: Machine, tables: Tables) -> list[str]:
    found = []
    nwd = machine.host.nwd
    for stored in tables.of_kind("Network"):
        network = nwd.networks.get(stored.uid)
        if network is None or network.generation != stored.resource.metadata.generation:
            found.append(f"I3: {stored.title} is not as wanted: {network}")
    for uid in nwd.networks.keys() - {stored.uid for stored in tables.of_kind("Network")}:
        found.append(f"I4: network {uid} is left")
    wanted_nics = set()
    for stored in tables.of_kind("VirtualMachine"):
        desired = desired_vm(tables, stored)
        ids = {nic.nic_id for nic in desired.nics}
        wanted_nics |= ids
        if desired.running and not ids <= nwd.nics.keys():
            found.append(f"I3: {stored.title} lacks NICs")
    for uid in nwd.nics.keys() - wanted_nics:
        found.append(f"I4: NIC {uid} of {nwd.nics[uid].vm_id} is left")
    taken = [nic.address for nic in nwd.nics.values()]
    if len(taken) != len(set(taken)):
        found.append("I6: an address has two owners")
    return found


def _policy(machine: Machine, tables: Tables) -> list[str]:
    """Groups, exposures and what NICs are told are as the store says."""
    found = []
    nwd = machine.host.nwd
    for stored in tables.of_kind("SecurityGroup"):
        group = nwd.groups.get(stored.uid)
        if group is None or group.group != wanted_group(tables, stored):
            found.append(f"I3: {stored.title} is not as wanted: {group}")
    for stored in tables.of_kind("Exposure"):
        exposure = nwd.exposures.get(stored.uid)
        if exposure is None or exposure.exposure != wanted_exposure(tables, stored):
            found.append(f"I3: {stored.title} is not as wanted: {exposure}")
    stored_groups = {stored.uid for stored in tables.of_kind("SecurityGroup")}
    found += [f"I4: group {uid} is left" for uid in nwd.groups.keys() - stored_groups]
    stored_exposures = {stored.uid for stored in tables.of_kind("Exposure")}
    found += [f"I4: exposure {uid} is left" for uid in nwd.exposures.keys() - stored_exposures]
    for stored in tables.of_kind("VirtualMachine"):
        desired = desired_vm(tables, stored)
        for nic in desired.nics if desired.running else ():
            seen = nwd.nics.get(nic.nic_id)
            network = nwd.networks.get(nic.network_uid)
            if seen is None or network is None:
                continue
            if seen.groups != nic.group_uids:
                found.append(f"I3: {nic.name} of {stored.title} is in {seen.groups}")
            if (seen.metadata is not None) is not network.topology.metadata:
                found.append(f"I3: {nic.name} of {stored.title} has metadata {seen.metadata}")
    return found


def _files(machine: Machine, tables: Tables) -> list[str]:
    """I4: no file, socket, seed, console of a VM that is gone; no artifact without an image."""
    found = []
    host = machine.host
    for what, uids in (
        ("directories", host.dirs),
        ("a seed", set(host.seeds)),
        ("a console", host.consoles),
        ("remains of a VMM", host.remains),
    ):
        for uid in sorted(uids - tables.objects.keys()):
            found.append(f"I4: {what} of {uid} left")
    kept = {
        o.uid
        for o in tables.of_kind("VirtualMachineSnapshot")
        if o.snapshot_facts is not None and o.snapshot_facts.taken
    }
    found += [f"I4: memory of snapshot {uid} is left" for uid in sorted(host.saved.keys() - kept)]
    found += [f"I2: memory of snapshot {uid} is lost" for uid in sorted(kept - host.saved.keys())]
    found += [f"I4: {uid} may still read a snapshot" for uid in sorted(host.given)]
    alive = {p.vm_uid for p in host.processes.values() if p.alive}
    for uid in sorted(host.remains - alive):
        found.append(f"I4: remains of a dead VMM of {uid}")
    slots = [o.facts.slot for o in tables.objects.values() if o.facts is not None]
    if len(slots) != len(set(slots)):
        found.append("I6: a slot has two owners")
    if not tables.of_kind("Image") and host.artifacts:
        # A builtin's files may stay as a cache where the agent was killed while making them.
        extra = host.artifacts.keys() - {"a" * 64, "b" * 64, *_imported(tables)}
        if extra:
            found.append(f"I4: artifacts are left: {extra}")
    return found


def _imported(tables: Tables) -> set[str]:
    """What failed imports were to store: the hourly collection takes what is left of them."""
    imports = (each for each in tables.operations.values() if each.verb == "import")
    return {str(each.request["sha256"]) for each in imports if not each.result}
