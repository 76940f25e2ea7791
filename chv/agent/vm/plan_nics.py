"""The planner's part about NICs: attach, plug, change, unplug, detach; what they wait for. Pure.

A NIC is attached with all that it is: what it may reach is in force before a guest can use it. So
its groups are made before, and a NIC whose groups are not there waits. What is recorded as plugged
counts as plugged until it was removed and the record with it: until then nwd keeps its tap.
"""

from __future__ import annotations

from dataclasses import replace

from chv.agent.vm.model import DesiredNic, DesiredVm, ObservedNic, ObservedVm, ObservedWorker
from chv.agent.vm.steps import (
    AddNicStep,
    AttachNicStep,
    DetachNicStep,
    RemoveNicStep,
    Step,
    WaitStep,
)
from chv.vmm.driver import VmmState


def unwanted_nics(desired: DesiredVm, observed: ObservedVm) -> list[Step]:
    """Let nwd remove what an earlier spec wanted and this one does not."""
    nics = {nic.nic_id for nic in desired.nics}
    return [DetachNicStep(nic_id) for nic_id in sorted(observed.nics) if nic_id not in nics]


def attach_nics(desired: DesiredVm, observed: ObservedVm) -> list[Step]:
    """Bring the NICs to what is wanted, those that can be."""
    return [
        AttachNicStep(nic.nic_id)
        for nic in desired.nics
        if not _is_right(nic, observed.nics.get(nic.nic_id)) and not _problem(nic, observed)
    ]


def settle_nics(desired: DesiredVm, observed: ObservedVm) -> list[Step]:
    """Bring the NICs of a VM that does not run, as far as they are there, to what is wanted.

    They keep their addresses while it stands; a group that they no longer name is free to go.
    """
    there = {nic_id for nic_id, seen in observed.nics.items() if seen.attached}
    kept = tuple(nic for nic in desired.nics if nic.nic_id in there)
    return attach_nics(replace(desired, nics=kept), observed)


def change_nics(desired: DesiredVm, observed: ObservedVm, worker: ObservedWorker) -> list[Step]:
    """Bring the NICs that the VM has to what is wanted; others come with `replug_nics`."""
    kept = tuple(nic for nic in desired.nics if nic.nic_id in worker.nics)
    return attach_nics(replace(desired, nics=kept), observed)


def replug_nics(desired: DesiredVm, observed: ObservedVm, worker: ObservedWorker) -> list[Step]:
    """Bring the NICs of a running VM to what is wanted: an address goes before it comes again."""
    plugged = worker.plugged_nics
    if not observed.network_known or plugged is None or worker.state is not VmmState.RUNNING:
        return []
    wanted = {nic.nic_id: nic for nic in desired.nics}
    steps: list[Step] = [RemoveNicStep(nic_id) for nic_id in sorted(worker.nics - wanted.keys())]
    steps += unwanted_nics(desired, observed)
    for nic_id, nic in wanted.items():
        if nic_id in worker.nics and nic_id in plugged:
            continue
        right = _is_right(nic, observed.nics.get(nic_id))
        if not right and _problem(nic, observed):
            continue
        if not right and nic_id not in worker.nics:
            steps.append(AttachNicStep(nic_id))
        steps.append(AddNicStep(nic_id))
    return steps


def nics_wait(desired: DesiredVm, observed: ObservedVm) -> WaitStep | None:
    """Return what a NIC that is not as wanted waits for."""
    for nic in desired.nics:
        problem = _problem(nic, observed)
        if problem is not None and not _is_right(nic, observed.nics.get(nic.nic_id)):
            return problem
    return None


def nics_blocked(desired: DesiredVm, observed: ObservedVm) -> WaitStep | None:
    """Return what a start has to wait for: every network, and the groups of NICs to be made."""
    waits = (_network_problem(nic, observed) for nic in desired.nics)
    return next((wait for wait in waits if wait is not None), nics_wait(desired, observed))


def _problem(nic: DesiredNic, observed: ObservedVm) -> WaitStep | None:
    for name, uid in nic.groups:
        if uid not in observed.groups:
            message = f"security group {name} is not ready"
            return WaitStep("NetworkReady", "GroupNotReady", message)
    return _network_problem(nic, observed)


def _network_problem(nic: DesiredNic, observed: ObservedVm) -> WaitStep | None:
    """What a NIC may have, such as a public address, is the network's in its newest form."""
    ready = observed.networks.get(nic.network_uid)
    if ready is not None and ready >= nic.network_generation:
        return None
    message = f"network {nic.network} is not ready"
    return WaitStep("NetworkReady", "NetworkNotReady", message)


def _is_right(nic: DesiredNic, seen: ObservedNic | None) -> bool:
    return seen is not None and seen.attached and seen.generation >= nic.generation
