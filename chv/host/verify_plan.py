"""What `chv verify` makes on a node and tells the probe. Pure: objects in, manifests out.

Nothing of the user's is changed: his VM is copied with fresh volumes, addresses and names, his
network gets two throw-away NICs, his volume is attached read-only or not at all. Everything that is
made carries the label `chv.dev/verify`, whose value names the process that will remove it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv4Network
from typing import Any

import msgspec

from chv.common.errors import FailedPrecondition
from chv.common.quantity import parse_bytes, parse_cpus
from chv.common.wire.network_resources import Network, NetworkSpec, UplinkModeSpec
from chv.common.wire.resources import VirtualMachine, Volume, VolumeClass
from chv.common.wire.types import API_VERSION
from chv.probe.command import DiskPlan, NetCheck, NicPlan, ProbeCommand

LABEL = "chv.dev/verify"
NAMESPACE = "chv-verify"
# TEST-NET-1 (RFC 5737): nobody's real network.
SUBNET = "192.0.2.0/24"
DOMAIN = "verify.internal"
RECORD, RECORD_ADDRESS = "record", "192.0.2.77"
METADATA = "169.254.169.254"
DISK_BYTES = 16 << 20
SECTOR_BYTES = 512
SECTORS = 64
SEED = 20_260
LEASE_MS = 4000
OPEN_MS = 2000
CLOSED_MS = 500  # a neighbour on the same machine answers within milliseconds
CLOSED_PORT = 9
NICS_WHOLE_MAX = 3  # more would not fit on the command line: the rest pings its gateway
COPYABLE = (VolumeClass.FILE, VolumeClass.LVM, VolumeClass.RBD)


@dataclass(frozen=True, slots=True)
class NicWanted:
    """A NIC of the trial. `address`: what was asked for; empty: the node chooses."""

    name: str
    mac: str
    network: str
    address: str = ""


@dataclass(frozen=True, slots=True)
class DiskWanted:
    """A disk of the trial, told from others by its size. `what`: whose class it proves."""

    sectors: int
    what: str
    read_only: bool = False


@dataclass(frozen=True, slots=True)
class Target:
    """A check of the probe's, and what must come of it. `words`: what that is to people."""

    id: str
    mac: str
    check: NetCheck
    words: str
    addresses: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Trial:
    """Everything of one run. `notes`: what is not proven, and why."""

    namespace: str
    vm: str
    documents: tuple[dict[str, Any], ...]
    first: ProbeCommand
    second: ProbeCommand | None = None
    nics: tuple[NicWanted, ...] = ()
    disks: tuple[DiskWanted, ...] = ()
    targets: tuple[Target, ...] = ()
    cpus: int = 1
    memory_bytes: int = 0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Names:
    """Names and numbers of one run: `token` is 8 hexadecimal digits."""

    token: str
    owner: str
    vmm: str = "auto"
    uplink: str = ""  # the address that proves the way out; empty: there is none to ask

    def of(self, what: str) -> str:
        """Return the name of an object."""
        return f"verify-{self.token}-{what}"

    def mac(self, number: int) -> str:
        """Return the MAC of a NIC: locally administered, of this run."""
        pairs = [self.token[at : at + 2] for at in range(0, 8, 2)]
        return ":".join(["06", *pairs, f"{number:02x}"])

    def document(self, kind: str, what: str, namespace: str, spec: object) -> dict[str, Any]:
        """Return a manifest of an object of this run."""
        return {
            "apiVersion": API_VERSION,
            "kind": kind,
            "metadata": {
                "name": self.of(what), "namespace": namespace, "labels": {LABEL: self.owner},
            },
            "spec": spec,
        }  # fmt: skip

    def image(self, namespace: str) -> dict[str, Any]:
        """Return the image of the probe."""
        return self.document("Image", "probe", namespace, {"builtin": "probe"})


@dataclass(slots=True)
class _Parts:
    """A trial under construction."""

    names: Names
    namespace: str
    documents: list[dict[str, Any]] = field(default_factory=list)
    interfaces: list[dict[str, Any]] = field(default_factory=list)
    nics: list[NicWanted] = field(default_factory=list)
    plans: list[NicPlan] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)
    plugged: list[dict[str, Any]] = field(default_factory=list)
    disks: list[DiskWanted] = field(default_factory=list)
    read: list[DiskPlan] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def finish(self, spec: Mapping[str, Any]) -> Trial:
        """Return the trial of a VM with these parts and what else its spec says."""
        writes = [DiskPlan(kind=_kind, sectors=SECTORS, seed=SEED) for _kind in ("check", "verify")]
        written = any(not disk.read_only for disk in self.disks)
        first = ProbeCommand(disks=(writes[0], *self.read), nics=tuple(self.plans))
        off = tuple(NicPlan(nic=nic.mac, off=True) for nic in self.nics)
        second = ProbeCommand(disks=(writes[1], *self.read), nics=off)
        vm = self.names.document("VirtualMachine", "vm", self.namespace, {
            "memory": "128Mi",
            "vmm": self.names.vmm,
            **spec,
            "runStrategy": "RerunOnFailure",
            "shutdownTimeout": "10s",
            "boot": {"image": self.names.of("probe"), "cmdline": first.render()},
            "disks": self.plugged,
            "interfaces": self.interfaces,
        })  # fmt: skip
        return Trial(
            namespace=self.namespace,
            vm=self.names.of("vm"),
            documents=(self.names.image(self.namespace), *self.documents, vm),
            first=first,
            second=second if written else None,
            nics=tuple(self.nics),
            disks=tuple(self.disks),
            targets=tuple(self.targets),
            cpus=parse_cpus(vm["spec"].get("cpus", 1)),
            memory_bytes=parse_bytes(vm["spec"]["memory"]),
            notes=tuple(self.notes),
        )


def of_node(names: Names) -> Trial:
    """Return a VM with a raw volume on a network of its own."""
    parts = _Parts(names, NAMESPACE)
    _new_volume(parts, {"format": "raw"}, "a raw volume of the node")
    spec = {
        "subnet": SUBNET,
        "metadata": True,
        "dns": {
            "domain": DOMAIN, "records": [{"name": RECORD, "addresses": [RECORD_ADDRESS]}],
        },
    }  # fmt: skip
    parts.documents.append(names.document("Network", "net", NAMESPACE, spec))
    _two_nics(parts, names.of("net"), ("192.0.2.11", "192.0.2.12"))
    ways = _ways(names, parts.nics[0], DOMAIN, msgspec.convert(spec, NetworkSpec))
    record = f"{RECORD}.{DOMAIN}"
    ways.append(_target("dns", parts.nics[0], "dns", record, f"{record} resolves", RECORD_ADDRESS))
    _pair(parts, ways)
    return parts.finish({})


def of_network(names: Names, network: Network, taken: frozenset[str]) -> Trial:
    """Return a VM with two NICs on a network; `taken`: addresses that others have."""
    parts = _Parts(names, network.metadata.namespace)
    pair = free_addresses(network, taken, 2)
    _two_nics(parts, network.metadata.name, (pair[0], pair[1]))
    domain = network.status.domain if network.status else ""
    _pair(parts, _ways(names, parts.nics[0], domain, network.spec))
    return parts.finish({})


def of_volume(names: Names, volume: Volume, in_use_by: str) -> Trial:
    """Return a VM with an empty volume of the same kind, and the volume itself, read-only."""
    parts = _Parts(names, volume.metadata.namespace)
    name, kind = volume.metadata.name, volume.spec.class_
    if kind in COPYABLE:
        _new_volume(parts, _kept(volume), f"an empty {kind} volume beside {name}")
    else:
        parts.notes.append(f"a {kind} volume cannot be made beside {name}: nothing was written")
    if in_use_by:
        parts.notes.append(f"{name} is in use by {in_use_by}: its own data was not touched")
    else:
        size = parse_bytes(volume.spec.size)
        parts.plugged.append({"name": "subject", "volume": name, "readOnly": True})
        parts.disks.append(DiskWanted(size // SECTOR_BYTES, f"{name}, read-only", read_only=True))
        # The seed disk is the first one.
        subject = str(len(parts.disks))
        parts.read.append(DiskPlan(kind="verify", disk=subject, sectors=SECTORS, first=0, seed=0))
    if not parts.disks:
        raise FailedPrecondition(
            f"nothing of {name} can be verified while {in_use_by} uses it",
            hint="stop that VM first",
        )
    return parts.finish({})


def of_vm(names: Names, vm: VirtualMachine, found: Found) -> Trial:
    """Return a copy of a VM that boots the probe, on the same networks, with empty volumes."""
    namespace = vm.metadata.namespace
    parts = _Parts(names, namespace)
    for index, disk in enumerate(vm.spec.disks):
        _copied_disk(parts, disk.volume, found.volumes.get(disk.volume), index)
    named: dict[str, str] = {}
    for network in dict.fromkeys(nic.network for nic in vm.spec.interfaces):
        named[network] = _copied_network(parts, network, found, len(named))
    for index, nic in enumerate(vm.spec.interfaces):
        spec = msgspec.to_builtins(nic)
        groups = [name for name in nic.security_groups if name in found.groups]
        for group in sorted(set(nic.security_groups) - set(groups)):
            parts.notes.append(f"group {group} is not on the node yet: {nic.name} is without it")
        for key in ("address", "address6", "publicAddress", "securityGroups"):
            spec.pop(key, None)
        made = NicWanted(nic.name, names.mac(index), named[nic.network])
        spec |= {"mac": made.mac, "network": made.network, "securityGroups": groups}
        parts.interfaces.append(spec)
        parts.nics.append(made)
        network_spec = found.networks[nic.network].spec
        domain = found.domain(nic.network)
        ways = _ways(names, made, domain, network_spec, open_out=not groups)
        whole = [*ways, _closed_port(made)]
        _plan(parts, made, whole if index < NICS_WHOLE_MAX else whole[:1])
    kept = msgspec.to_builtins(vm.spec)
    sizes = {key: kept[key] for key in ("cpus", "memory", "maxCpus", "maxMemory") if key in kept}
    vmm = names.vmm if names.vmm != "auto" else str(vm.spec.vmm)
    return parts.finish({**sizes, "vmm": vmm})


@dataclass(frozen=True, slots=True)
class Found:
    """What a VM refers to, of the node or else of the file, by name."""

    networks: Mapping[str, Network]
    volumes: Mapping[str, Volume]
    groups: frozenset[str]

    def domain(self, network: str) -> str:
        """Return the domain of a network; empty while only a file knows it."""
        status = self.networks[network].status
        return status.domain if status else self.networks[network].spec.dns.domain


def free_addresses(network: Network, taken: frozenset[str], count: int) -> list[str]:
    """Return free addresses of a network, from its end; FailedPrecondition where there are none."""
    subnet = IPv4Network(network.spec.subnet)
    gateway = network.spec.gateway or str(subnet.network_address + 1)
    free: list[str] = []
    for number in range(int(subnet.broadcast_address) - 1, int(subnet.network_address), -1):
        address = str(IPv4Address(number))
        if address not in taken and address != gateway:
            free.append(address)
        if len(free) == count:
            return free
    raise FailedPrecondition(
        f"{network.metadata.name} has no {count} free addresses", resource=network.spec.subnet
    )


def _kept(volume: Volume) -> dict[str, Any]:
    """Return what of a volume's spec says where and how its bytes are kept."""
    spec = msgspec.to_builtins(volume.spec)
    keys = ("class", "format", "pool", "lvm", "rbd", "encryption")
    return {key: spec[key] for key in keys if spec.get(key)}


def _new_volume(parts: _Parts, spec: Mapping[str, Any], what: str) -> None:
    # Each has a size of its own: that is how the probe's words on it are told from others.
    size = DISK_BYTES + len(parts.disks) * (4 << 20)
    name = f"disk{len(parts.disks)}"
    document = parts.names.document(
        "Volume", name, parts.namespace, {"size": f"{size >> 20}Mi", **spec}
    )
    parts.documents.append(document)
    parts.plugged.append({"name": name, "volume": parts.names.of(name)})
    parts.disks.append(DiskWanted(size // SECTOR_BYTES, what))


def _copied_disk(parts: _Parts, name: str, volume: Volume | None, index: int) -> None:
    if volume is None:
        raise FailedPrecondition(
            f"disk {index} names volume {name}, which neither the file nor the node has",
            field=f"spec.disks[{index}].volume",
        )
    kind = volume.spec.class_
    if kind in COPYABLE:
        _new_volume(parts, _kept(volume), f"an empty {kind} volume like {name}")
    else:
        parts.notes.append(f"no second {kind} volume can be made: {name} was left out")


def _copied_network(parts: _Parts, name: str, found: Found, number: int) -> str:
    """Return the network's name; one that only the file has is made for the trial."""
    network = found.networks.get(name)
    if network is None:
        raise FailedPrecondition(f"network {name} is neither in the file nor on the node")
    if network.status is not None:
        return name
    spec = msgspec.to_builtins(network.spec)
    spec.pop("publicAddresses", None)
    what = f"net{number}"
    parts.documents.append(parts.names.document("Network", what, parts.namespace, spec))
    return parts.names.of(what)


# --- what is asked of NICs


def _target(
    check_id: str, nic: NicWanted, kind: Any, target: str, words: str, *addresses: str
) -> Target:
    return Target(check_id, nic.mac, NetCheck(kind=kind, target=target), words, addresses)


def _ways(
    names: Names, nic: NicWanted, domain: str, spec: NetworkSpec, *, open_out: bool = True
) -> list[Target]:
    """Return what every guest may reach. `open_out`: no group says what goes out."""
    ways = [_target("gateway", nic, "ping", "router", "the gateway answers a ping")]
    if domain:
        own = f"{names.of('vm')}.{domain}"
        ways.append(_target("dns", nic, "dns", own, "the VM's name resolves"))
    port = NetCheck(kind="tcp", target="router", port=53)
    ways.append(Target("firewall-open", nic.mac, port, "TCP port 53 of the gateway is open"))
    if spec.metadata:
        check = NetCheck(kind="tcp", target=METADATA, port=80)
        ways.append(Target("metadata", nic.mac, check, f"{METADATA} answers"))
    if spec.uplink is not UplinkModeSpec.NONE and names.uplink and open_out:
        out = f"{names.uplink}, the node's next hop, answers a ping"
        ways.append(_target("uplink", nic, "ping", names.uplink, out))
    return ways


def _closed_port(nic: NicWanted) -> Target:
    check = NetCheck(kind="tcp", target="router", port=CLOSED_PORT, must_fail=True)
    words = f"TCP port {CLOSED_PORT} of the gateway is closed"
    return Target("firewall-closed", nic.mac, check, words)


def _two_nics(parts: _Parts, network: str, addresses: tuple[str, str]) -> None:
    """Two NICs of one VM: eth0 in a group that lets pings in, eth1 in none."""
    group = {
        "ingress": [{"protocol": "ICMP", "cidrs": ["0.0.0.0/0"]}],
        "egress": [{"protocol": "Any", "cidrs": ["0.0.0.0/0"]}],
    }
    names = parts.names
    parts.documents.append(names.document("SecurityGroup", "pings", parts.namespace, group))
    for number, address in enumerate(addresses):
        nic = NicWanted(f"eth{number}", names.mac(number), network, address)
        groups = [names.of("pings")] if number == 0 else []
        parts.nics.append(nic)
        parts.interfaces.append({
            "name": nic.name, "network": network, "mac": nic.mac, "address": address,
            "securityGroups": groups,
        })  # fmt: skip


def _pair(parts: _Parts, ways: list[Target]) -> None:
    """Let the two NICs try what is open and what is closed between them."""
    member, alone = parts.nics
    closed = NetCheck(kind="ping", target=alone.address, must_fail=True)
    no_rule = f"no rule lets a ping in to {alone.name}, and none comes"
    _plan(parts, member, [*ways, Target("firewall-closed", member.mac, closed, no_rule)])
    rule = f"a rule lets pings in to {member.name}, and they come"
    ping = _target("firewall-open", alone, "ping", member.address, rule)
    _plan(parts, alone, [_closed_port(alone), ping])


def _plan(parts: _Parts, nic: NicWanted, targets: list[Target]) -> None:
    """Tell one NIC what to try; what must fail is waited for less long."""
    parts.targets += targets
    checks = tuple(
        msgspec.structs.replace(
            target.check, timeout_ms=CLOSED_MS if target.check.must_fail else OPEN_MS
        )
        for target in targets
    )
    parts.plans.append(NicPlan(nic=nic.mac, checks=checks, lease_ms=LEASE_MS))
