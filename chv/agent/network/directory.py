"""Names of what nwd knows by uid: NICs, networks, security groups. From memory, pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from chv.agent.network import policy
from chv.agent.tables import Tables
from chv.agent.vm.desired import nic_id
from chv.common.errors import FailedPrecondition, NotFound
from chv.common.wire.resources import VirtualMachine


@dataclass(frozen=True, slots=True)
class NamedNic:
    """An interface of a VM. `addresses` as they are observed, perhaps none yet."""

    nic_id: str
    namespace: str
    vm: str
    interface: str
    network: str
    network_id: str
    addresses: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """The VM and its interface."""
        return f"{self.vm}/{self.interface}"


@dataclass(frozen=True)
class Directory:
    """Names of one namespace, or of all."""

    nics: Sequence[NamedNic]
    networks: Mapping[tuple[str, str], str]  # (namespace, name) to uid
    groups: Mapping[str, str]  # uid to name
    rules: Mapping[str, Sequence[str]]  # uid to the place of each rule in its manifest
    vms: frozenset[tuple[str, str]]

    @classmethod
    def of(cls, tables: Tables, namespace: str = "") -> Directory:
        """Read it from the tables."""
        networks = {
            (stored.resource.metadata.namespace, stored.resource.metadata.name): stored.uid
            for stored in tables.of_kind("Network")
        }
        groups = {
            stored.uid: stored.resource.metadata.name for stored in tables.of_kind("SecurityGroup")
        }
        rules = {
            stored.uid: policy.rule_places(tables, stored)
            for stored in tables.of_kind("SecurityGroup")
        }
        vms = [
            (stored.uid, stored.resource)
            for stored in tables.of_kind("VirtualMachine")
            if isinstance(stored.resource, VirtualMachine)
            and namespace in ("", stored.resource.metadata.namespace)
        ]
        nics = [nic for uid, vm in vms for nic in _nics(uid, vm, networks)]
        names = frozenset((vm.metadata.namespace, vm.metadata.name) for _, vm in vms)
        return cls(sorted(nics, key=_order), networks, groups, rules, names)

    def network(self, name: str, namespace: str) -> str:
        """Return the uid of a network; NotFound."""
        uid = self.networks.get((namespace, name))
        if uid is None:
            raise NotFound(f"there is no Network {name!r} in namespace {namespace}")
        return uid

    def of_vm(self, name: str, namespace: str, interface: str = "") -> list[NamedNic]:
        """Return the NICs of a VM, one where an interface is named; NotFound for none."""
        if (namespace, name) not in self.vms:
            raise NotFound(f"there is no VirtualMachine {name!r} in namespace {namespace}")
        found = [
            nic
            for nic in self.nics
            if (nic.namespace, nic.vm) == (namespace, name) and interface in ("", nic.interface)
        ]
        title = f"VirtualMachine/{namespace}/{name}"
        if not found and interface:
            raise NotFound(f"it has no interface {interface!r}", resource=title)
        if not found:
            raise FailedPrecondition("it has no interface on a network", resource=title)
        return found

    def place(self, group_id: str, rule: int) -> str:
        """Return where a rule stands in its group's manifest; empty where it is not known."""
        places = self.rules.get(group_id, ())
        return places[rule] if 0 <= rule < len(places) else ""

    def titles(self, uids: set[str]) -> dict[str, str]:
        """Return the names of those NICs and groups that are known."""
        named = {nic.nic_id: nic.title for nic in self.nics} | dict(self.groups)
        return {uid: named[uid] for uid in uids if uid in named}


def _order(nic: NamedNic) -> tuple[str, str, str]:
    return nic.namespace, nic.vm, nic.interface


def _nics(
    vm_uid: str, vm: VirtualMachine, networks: Mapping[tuple[str, str], str]
) -> list[NamedNic]:
    namespace = vm.metadata.namespace
    seen = {each.name: each for each in (vm.status.interfaces if vm.status is not None else [])}
    found = []
    for interface in vm.spec.interfaces:
        network_id = networks.get((namespace, interface.network))
        if network_id is None:
            continue
        status = seen.get(interface.name)
        addresses = (status.address, status.address6) if status is not None else ()
        found.append(
            NamedNic(
                nic_id=nic_id(vm_uid, interface, network_id),
                namespace=namespace,
                vm=vm.metadata.name,
                interface=interface.name,
                network=interface.network,
                network_id=network_id,
                addresses=tuple(each for each in addresses if each),
            )
        )
    return found
