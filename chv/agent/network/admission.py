"""Rules of admission about networks, exposures and interfaces that look at other objects. Pure.

What only nwd knows (the node's addresses, addresses that it has given out) it says itself, when
it is asked to make the object so; that is shown on the object.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import msgspec

from chv.agent.records import StoredObject
from chv.agent.references import referrers
from chv.agent.tables import Tables
from chv.agent.vm.desired import nic_id
from chv.common.errors import FailedPrecondition, InUse, InvalidArgument
from chv.common.names import shown
from chv.common.wire.network_rules import contains
from chv.common.wire.resources import (
    Exposure,
    ExposureTarget,
    InterfaceBandwidth,
    InterfaceSpec,
    Network,
    UplinkModeSpec,
    VirtualMachine,
)
from chv.vmm.driver import HOT_PLUG

Find = Callable[[str, str, str], StoredObject | None]
# What nwd changes under a guest that uses the NIC.
LIVE = ("security_groups", "bandwidth", "max_connections", "public_address")


# --- changes


def check_network_change(tables: Tables, before: StoredObject, after: Network) -> None:
    """Refuse what would pull the ground from under guests and exposures."""
    old, new = before.resource, after
    assert isinstance(old, Network)
    running = [vm for vm in referrers(tables, before.key) if vm.uid in tables.workers]
    for field, was, now in (
        # A guest has its MTU from its start and from DHCP: larger packets would vanish.
        ("spec.mtu", old.spec.mtu, new.spec.mtu),
        ("spec.l2", old.spec.l2, new.spec.l2),
    ):
        if was != now and running:
            raise FailedPrecondition(
                f"it changes only while no VM runs on it, and {running[0].title} does",
                resource=before.title,
                field=field,
                hint=f"chv stop {running[0].key[2]}, then apply again",
            )
    _check_public_kept(tables, before, old, new)
    if new.spec.uplink is UplinkModeSpec.NONE is not old.spec.uplink:
        _check_uplink_free(tables, before, new)


def _check_uplink_free(tables: Tables, before: StoredObject, new: Network) -> None:
    """Without an uplink nothing but addresses of the subnets can be exposed."""
    for holder in referrers(tables, before.key):
        if not isinstance(holder.resource, Exposure):
            continue
        for text in holder.resource.spec.addresses:
            address = ipaddress.ip_address(text)
            if not any(contains(subnet, address) for subnet in _subnets(new)):
                raise InUse(
                    f"by it {text} of {holder.title} is reached",
                    resource=before.title,
                    field="spec.uplink",
                    hint=f"change or delete {holder.title} first",
                )


def _check_public_kept(tables: Tables, before: StoredObject, old: Network, new: Network) -> None:
    gone = set(old.spec.public_addresses) - set(new.spec.public_addresses)
    for holder in referrers(tables, before.key):
        for address in _public_used(holder, before.key[2]):
            if address in gone:
                raise InUse(
                    f"{address} is used by {holder.title}",
                    resource=before.title,
                    field="spec.publicAddresses",
                    hint=f"keep it, or take it out of {holder.title} first",
                )


def _public_used(holder: StoredObject, network: str) -> Iterable[str]:
    match holder.resource:
        case VirtualMachine(spec=vm):
            return [nic.public_address for nic in vm.interfaces if nic.network == network]
        case Exposure(spec=exposure):
            return exposure.addresses
        case _:
            return ()


def check_interfaces_change(before: StoredObject, old: VirtualMachine, new: VirtualMachine) -> None:
    """A running VM takes up and lets go of interfaces; one that it keeps changes in `LIVE` alone.

    Another network makes it another interface.
    """
    was, now = (
        {(each.name, each.network): each for each in _at_rest(vm.spec.interfaces)}
        for vm in (old, new)
    )
    if changed := [each.name for key, each in was.items() if now.get(key, each) != each]:
        raise _only_stopped(
            before,
            f"{', '.join(changed)} cannot change while the VM runs, but for securityGroups, "
            "bandwidth, maxConnections and publicAddress",
        )
    facts = before.facts
    can = facts is not None and facts.selection is not None and facts.selection.name in HOT_PLUG
    if was.keys() != now.keys() and not can:
        raise _only_stopped(before, "its VMM takes up and lets go of interfaces only at a start")


def check_interfaces_plug(
    tables: Tables, before: StoredObject, old: VirtualMachine, new: VirtualMachine
) -> None:
    """Refuse what the running VMM cannot do with its NICs as they are recorded."""
    plugged = {nic.id: nic for nic in tables.workers[before.uid].config.nics}
    had, has = ({each[0]: each[1] for each in _nic_ids(tables, vm)} for vm in (old, new))
    for uid, name in had.items():
        if uid not in has and uid in plugged and not plugged[uid].on_port:
            raise _only_stopped(
                before, f"{name} is from a start by an older version and cannot be unplugged"
            )
    for uid, name in has.items():
        if uid not in had and uid in plugged:
            raise FailedPrecondition(
                f"the guest is still letting go of the {name} that it had",
                resource=before.title,
                field="spec.interfaces",
                hint="apply again when NetworkReady is True",
            )


def _nic_ids(tables: Tables, vm: VirtualMachine) -> Iterable[tuple[str, str]]:
    for each in vm.spec.interfaces:
        network = tables.find("Network", vm.metadata.namespace, each.network)
        if network is not None:
            yield nic_id(vm.metadata.uid, each, network.uid), each.name


def _only_stopped(before: StoredObject, problem: str) -> FailedPrecondition:
    return FailedPrecondition(
        problem,
        resource=before.title,
        field="spec.interfaces",
        hint=f"chv stop {before.key[2]}, then apply again",
    )


def _at_rest(interfaces: list[InterfaceSpec]) -> list[InterfaceSpec]:
    bare = {
        "security_groups": [],
        "bandwidth": InterfaceBandwidth(),
        "max_connections": 0,
        "public_address": "",
    }
    assert tuple(bare) == LIVE
    return [msgspec.structs.replace(each, **bare) for each in interfaces]


# --- references


def check_on_network(stored: StoredObject, network: Network, field: str) -> None:
    """Refuse addresses of an interface that its network cannot give."""
    assert isinstance(stored.resource, VirtualMachine)
    for index, nic in enumerate(stored.resource.spec.interfaces):
        where = f"spec.interfaces[{index}]"
        if not field.startswith(f"{where}."):
            continue
        if nic.address:
            _check_guest_address(stored, network, nic.address, f"{where}.address")
        if nic.address6:
            _check_guest_address6(stored, network, nic.address6, f"{where}.address6")
        if nic.public_address and nic.public_address not in network.spec.public_addresses:
            raise InvalidArgument(
                f"{nic.public_address} is not a public address of network "
                f"{network.metadata.name!r}",
                resource=stored.title,
                field=f"{where}.publicAddress",
                hint="add it to the network's publicAddresses first",
            )


def _check_guest_address(stored: StoredObject, network: Network, text: str, field: str) -> None:
    subnet = ipaddress.IPv4Network(network.spec.subnet)
    if ipaddress.IPv4Address(text) not in subnet or text in _taken(network):
        raise InvalidArgument(
            f"{text} is not a guest address of {subnet}",
            resource=stored.title,
            field=field,
            hint="leave it empty to have one chosen",
        )


def _check_guest_address6(stored: StoredObject, network: Network, text: str, field: str) -> None:
    if not network.spec.subnet6:
        raise InvalidArgument(
            f"{text} on network {network.metadata.name!r}, which has no IPv6",
            resource=stored.title,
            field=field,
            hint="leave it out, or take a network with a subnet6",
        )
    if not contains(ipaddress.ip_network(network.spec.subnet6), ipaddress.ip_address(text)) or (
        text in _taken(network)
    ):
        raise InvalidArgument(
            f"{text} is not a guest address of {network.spec.subnet6}",
            resource=stored.title,
            field=field,
            hint="leave it empty to have one chosen",
        )


def _taken(network: Network) -> set[str]:
    """Return the addresses of the subnets that are no guest's."""
    subnet = ipaddress.IPv4Network(network.spec.subnet)
    gateway = network.spec.gateway or str(subnet.network_address + 1)
    taken = {str(subnet.network_address), str(subnet.broadcast_address), gateway}
    if network.spec.subnet6:
        subnet6 = ipaddress.IPv6Network(network.spec.subnet6)
        taken |= {str(subnet6.network_address), str(subnet6.network_address + 1)}
    return taken


def check_exposure(stored: StoredObject, find: Find) -> None:
    """Refuse addresses that the network has otherwise, and targets that are not on it."""
    exposure = stored.resource
    assert isinstance(exposure, Exposure)
    namespace, spec = exposure.metadata.namespace, exposure.spec
    network = find("Network", namespace, spec.network)
    assert network is not None and isinstance(network.resource, Network)
    for index, address in enumerate(spec.addresses):
        if address in _taken(network.resource):
            raise InvalidArgument(
                f"{address} is not a free address of network {spec.network!r}",
                resource=stored.title,
                field=f"spec.addresses[{index}]",
                hint="an address of the node, a public one of the network, or a free one",
            )
    for index, target in enumerate(spec.targets):
        vm = find("VirtualMachine", namespace, target.virtual_machine)
        assert vm is not None and isinstance(vm.resource, VirtualMachine)
        _check_target(stored, vm.resource, target, f"spec.targets[{index}]")


def _check_target(
    stored: StoredObject, vm: VirtualMachine, target: ExposureTarget, where: str
) -> None:
    assert isinstance(stored.resource, Exposure)
    network = stored.resource.spec.network
    names = [nic.name for nic in vm.spec.interfaces if nic.network == network]
    if not names:
        raise InvalidArgument(
            f"{target.virtual_machine!r} has no interface on network {network!r}",
            resource=stored.title,
            field=f"{where}.virtualMachine",
            hint=f"a VM with an interface on {network}",
        )
    if target.interface and target.interface not in names:
        raise InvalidArgument(
            f"{shown(target.interface)} is no interface of {target.virtual_machine} on {network}",
            resource=stored.title,
            field=f"{where}.interface",
            hint=f"one of {', '.join(names)}",
        )
    if not target.interface and len(names) > 1:
        raise InvalidArgument(
            f"{target.virtual_machine!r} has several interfaces on network {network!r}",
            resource=stored.title,
            field=f"{where}.interface",
            hint=f"one of {', '.join(names)}",
        )


# --- what only one may have


@dataclass(frozen=True, slots=True)
class _Claim:
    """Ports of an address. `place`: the network in whose subnet it is; empty: of the node."""

    holder: StoredObject
    field: str
    place: str
    address: str
    protocol: str
    first: int
    last: int

    def meets(self, other: _Claim) -> bool:
        """Tell whether two claims are about the same ports."""
        same = (self.place, self.address, self.protocol) == (
            other.place,
            other.address,
            other.protocol,
        )
        return same and self.first <= other.last and other.first <= self.last

    @property
    def words(self) -> str:
        """The claim as a person would say it."""
        ports = str(self.first) if self.first == self.last else f"{self.first}-{self.last}"
        return f"{self.address} {self.protocol} {ports}"


def check_exposed(tables: Tables, after: dict[str, StoredObject], find: Find) -> None:
    """Refuse ports of one address that two exposures would have, and addresses of two networks."""
    if not any(isinstance(o.resource, Exposure | Network) for o in after.values()):
        return
    _check_public(_newest_last(tables, after, "Network"))
    claims: dict[tuple[str, str], list[_Claim]] = {}
    for stored in _newest_last(tables, after, "Exposure"):
        for claim in _claims(stored, find):
            others = claims.setdefault((claim.place, claim.address), [])
            other = next((o for o in others if o.holder is not stored and o.meets(claim)), None)
            if other is not None:
                raise InUse(
                    f"{claim.words} is exposed by {other.holder.title}",
                    resource=stored.title,
                    field=claim.field,
                    hint=f"take another address or port, or delete {other.holder.title} first",
                )
            others.append(claim)


def _newest_last(
    tables: Tables, after: dict[str, StoredObject], kind: str
) -> Iterator[StoredObject]:
    """Those that are there come first: the newcomer is the one that is refused."""
    yield from (o for o in tables.of_kind(kind) if o.uid not in after)
    yield from (o for o in after.values() if o.resource.kind == kind)


def _check_public(networks: Iterator[StoredObject]) -> None:
    holders: dict[str, StoredObject] = {}
    for stored in networks:
        assert isinstance(stored.resource, Network)
        for index, address in enumerate(stored.resource.spec.public_addresses):
            holder = holders.setdefault(address, stored)
            if holder is not stored:
                raise InUse(
                    f"{address} is a public address of {holder.title}",
                    resource=stored.title,
                    field=f"spec.publicAddresses[{index}]",
                    hint=f"take another, or take it out of {holder.title} first",
                )


def _claims(stored: StoredObject, find: Find) -> Iterator[_Claim]:
    exposure = stored.resource
    assert isinstance(exposure, Exposure)
    namespace, spec = exposure.metadata.namespace, exposure.spec
    network = find("Network", namespace, spec.network)
    subnets = _subnets(network.resource) if network is not None else []
    for index, text in enumerate(spec.addresses):
        address = ipaddress.ip_address(text)
        inside = any(contains(subnet, address) for subnet in subnets)
        yield _Claim(
            holder=stored,
            field=f"spec.addresses[{index}]",
            place=f"{namespace}/{spec.network}" if inside else "",
            address=text,
            protocol=spec.protocol.value,
            first=spec.port,
            last=spec.end_port or spec.port,
        )


def _subnets(network: object) -> list[ipaddress.IPv4Network | ipaddress.IPv6Network]:
    assert isinstance(network, Network)
    texts = filter(None, (network.spec.subnet, network.spec.subnet6))
    return [ipaddress.ip_network(text) for text in texts]


def guest_addresses(
    resource: VirtualMachine,
) -> Iterator[tuple[str, tuple[str, str, str], str]]:
    """Yield what only one VM may have of its networks: field, key, words."""
    namespace = resource.metadata.namespace
    for index, nic in enumerate(resource.spec.interfaces):
        place, where = f"{namespace}/{nic.network}", f"spec.interfaces[{index}]"
        if nic.address:
            yield f"{where}.address", ("address", place, nic.address), f"address {nic.address}"
        if nic.address6:
            yield f"{where}.address6", ("address", place, nic.address6), f"address {nic.address6}"
        if nic.mac:
            yield f"{where}.mac", ("mac", place, str(nic.mac)), f"MAC address {nic.mac}"
