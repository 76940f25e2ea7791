"""What `chv verify` makes on a node and tells the probe. Pure: objects in, manifests out.

Nothing of the user's is changed: his VM is copied with fresh volumes, addresses and names, his
network gets two throw-away NICs, his volume is attached read-only or not at all. Everything that is
made carries the label `chv.dev/verify`, whose value names the process that will remove it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from chv.common.errors import FailedPrecondition
from chv.common.quantity import parse_bytes, parse_cpus
from chv.common.wire.network_resources import Network, NetworkSpec
from chv.common.wire.resources import VirtualMachine, Volume, VolumeClass
from chv.common.wire.types import API_VERSION
from chv.host.verify_targets import (
    NicWanted,
    Target,
    closed_port,
    free_addresses,
    nic_plan,
    target,
    ways,
)
from chv.probe.command import DiskPlan, NetCheck, NicPlan, ProbeCommand

LABEL = "chv.dev/verify"
NAMESPACE = "chv-verify"
# TEST-NET-1 (RFC 5737): nobody's real network.
SUBNET = "192.0.2.0/24"
DOMAIN = "verify.internal"
RECORD, RECORD_ADDRESS = "record", "192.0.2.77"
DISK_BYTES = 16 << 20
STEP_BYTES = 4 << 20
SECTOR_BYTES = 512
SECTORS = 64
SEED = 20_260
NICS_WHOLE_MAX = 3  # more would not fit on the command line: the rest pings its gateway
COPYABLE = (VolumeClass.FILE, VolumeClass.LVM, VolumeClass.RBD)


@dataclass(frozen=True, slots=True)
class DiskWanted:
    """A disk of the trial, told from others by its size. `what`: whose class it proves."""

    sectors: int
    what: str
    read_only: bool = False


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

    def in_domain(self, what: str, domain: str) -> str:
        """Return the name of a VM as the network's DNS knows it; empty without a domain."""
        return f"{self.of(what)}.{domain}" if domain else ""

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
    notes: list[str] = field(default_factory=list)

    def finish(self, spec: Mapping[str, Any]) -> Trial:
        """Return the trial of a VM with these parts and what else its spec says."""
        written = any(not disk.read_only for disk in self.disks)
        read = DiskPlan(kind="verify", sectors=SECTORS, seed=SEED)
        plan = DiskPlan(kind="check", sectors=SECTORS, seed=SEED) if written else read
        first = ProbeCommand(disks=(plan,), nics=tuple(self.plans))
        # Where disks are found differs between VMMs: all are read, those of the user as well.
        off = tuple(NicPlan(nic=nic.mac, off=True) for nic in self.nics)
        second = ProbeCommand(disks=(read,), nics=off)
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
    first, record = parts.nics[0], f"{RECORD}.{DOMAIN}"
    own = f"{names.of('vm')}.{DOMAIN}"
    found = ways(first, msgspec.convert(spec, NetworkSpec), own, names.uplink)
    found.append(target("dns", first, "dns", record, f"{record} resolves", RECORD_ADDRESS))
    _pair(parts, found)
    return parts.finish({})


def of_network(names: Names, network: Network, taken: frozenset[str]) -> Trial:
    """Return a VM with two NICs on a network; `taken`: addresses that others have."""
    parts = _Parts(names, network.metadata.namespace)
    pair = free_addresses(network, taken, 2)
    _two_nics(parts, network.metadata.name, (pair[0], pair[1]))
    domain = network.status.domain if network.status else ""
    own = names.in_domain("vm", domain)
    _pair(parts, ways(parts.nics[0], network.spec, own, names.uplink))
    return parts.finish({})


def of_volume(names: Names, volume: Volume, in_use_by: str) -> Trial:
    """Return a VM with an empty volume of the same kind, and the volume itself, read-only."""
    parts = _Parts(names, volume.metadata.namespace)
    name, kind = volume.metadata.name, volume.spec.class_
    size = parse_bytes(volume.spec.size)
    if kind in COPYABLE:
        _new_volume(parts, _kept(volume), f"an empty {kind} volume beside {name}", size)
    else:
        parts.notes.append(f"a {kind} volume cannot be made beside {name}: nothing was written")
    if in_use_by:
        parts.notes.append(f"{name} is in use by {in_use_by}: its own data was not touched")
    else:
        parts.plugged.append({"name": "subject", "volume": name, "readOnly": True})
        parts.disks.append(DiskWanted(size // SECTOR_BYTES, f"{name}, read-only", read_only=True))
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
        own = names.in_domain("vm", found.domain(nic.network))
        # What a group lets out is the user's business.
        uplink = "" if groups else names.uplink
        asked = ways(made, found.networks[nic.network].spec, own, uplink)
        asked.append(closed_port(made))
        _ask(parts, made, asked if index < NICS_WHOLE_MAX else asked[:1])
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


def _kept(volume: Volume) -> dict[str, Any]:
    """Return what of a volume's spec says where and how its bytes are kept."""
    spec = msgspec.to_builtins(volume.spec)
    keys = ("class", "format", "pool", "lvm", "rbd", "encryption")
    return {key: spec[key] for key in keys if spec.get(key)}


def _new_volume(parts: _Parts, spec: Mapping[str, Any], what: str, other_bytes: int = 0) -> None:
    """Each has a size of its own: that is how the probe's words on it are told from others."""
    size = DISK_BYTES + len(parts.disks) * STEP_BYTES
    size += STEP_BYTES * (size == other_bytes)
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


def _pair(parts: _Parts, open_ways: list[Target]) -> None:
    """Let the two NICs try what is open and what is closed between them."""
    member, alone = parts.nics
    closed = NetCheck(kind="ping", target=alone.address, must_fail=True)
    no_rule = f"no rule lets a ping in to {alone.name}, and none comes"
    _ask(parts, member, [*open_ways, Target("firewall-closed", member.mac, closed, no_rule)])
    rule = f"a rule lets pings in to {member.name}, and they come"
    ping = target("firewall-open", alone, "ping", member.address, rule)
    _ask(parts, alone, [closed_port(alone), ping])


def _ask(parts: _Parts, nic: NicWanted, targets: list[Target]) -> None:
    parts.targets += targets
    parts.plans.append(nic_plan(nic, targets))
