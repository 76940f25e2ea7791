"""The planner's part about NICs: attach, change, detach, and what they wait for. Pure.

A NIC is attached with all that it is: what it may reach is in force before a guest can use it. So
its groups are made before, and a NIC whose groups are not there waits.
"""

from __future__ import annotations

from chv.agent.vm.model import DesiredNic, DesiredVm, ObservedNic, ObservedVm
from chv.agent.vm.steps import AttachNicStep, DetachNicStep, Step, WaitStep


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
