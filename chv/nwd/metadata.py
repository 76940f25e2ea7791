"""What a guest may read about itself, by path. Pure: records in, documents out.

`/meta-data`, `/user-data`, `/vendor-data` and `/network-config` are what cloud-init's NoCloud reads
below `http://169.254.169.254/`; `/chv/v1.json` is a small tree for programs. There is nothing here
that is a secret of ours: host keys come on the seed disk alone. Who asks is told by the address
that the frames came from, which the rules hold to the NIC's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Network, IPv6Address, IPv6Network

import msgspec

from chv.common.wire.nwd import VmMetadata
from chv.nwd.metadata_http import Refused
from chv.nwd.records import Network, Nic

ADDRESS, ADDRESS6 = "169.254.169.254", "fd00:ec2::254"
HOSTS = (ADDRESS, f"[{ADDRESS6}]")
TEXT, YAML, JSON = "text/plain; charset=utf-8", "text/yaml; charset=utf-8", "application/json"


@dataclass(frozen=True, slots=True)
class Interface:
    """A NIC of the VM and the network that it is on."""

    nic: Nic
    network: Network


@dataclass(frozen=True, slots=True)
class Asked:
    """Who asks: the NIC that the question came by, and every interface of its VM."""

    nic: Nic
    interfaces: Sequence[Interface]

    @property
    def about(self) -> VmMetadata | None:
        """What the VM's owner wrote for it, if anything."""
        return self.nic.metadata


def addresses_of(network: Network) -> frozenset[str]:
    """Return the addresses, with prefix lengths, at which a network answers."""
    topology = network.topology
    if not topology.metadata:
        return frozenset()
    six = {f"{ADDRESS6}/128"} if topology.subnet6 else set()
    return frozenset({f"{ADDRESS}/32"} | six)


def who(nics: Sequence[Nic], source: str) -> Nic | None:
    """Return the NIC whose address it is, of those of one network."""
    plain = source.partition("%")[0]
    if ":" in plain:
        wanted = IPv6Address(plain)
        return next((n for n in nics if n.address6 and IPv6Address(n.address6) == wanted), None)
    return next((nic for nic in nics if nic.address == plain), None)


def document(asked: Asked, path: str) -> tuple[bytes, str]:
    """Return content and type of a path; Refused where there is nothing."""
    make = _DOCUMENTS.get(path)
    if make is None:
        raise Refused(404, "there is no such path")
    return make(asked)


def _index(_asked: Asked) -> tuple[bytes, str]:
    return "".join(f"{path[1:]}\n" for path in _DOCUMENTS if path != "/").encode(), TEXT


def _meta_data(asked: Asked) -> tuple[bytes, str]:
    about = asked.about
    data: dict[str, object] = {
        "instance-id": asked.nic.vm_id,
        "local-hostname": about.hostname if about is not None else asked.nic.hostname,
    }
    if about is not None and about.ssh_authorized_keys:
        data["public-keys"] = about.ssh_authorized_keys
    return _json(data), YAML  # JSON is YAML


def _user_data(asked: Asked) -> tuple[bytes, str]:
    return (asked.about.user_data if asked.about is not None else "").encode(), TEXT


def _vendor_data(_asked: Asked) -> tuple[bytes, str]:
    return b"", TEXT


def _network_config(asked: Asked) -> tuple[bytes, str]:
    ethernets = {
        f"nic{number}": {
            "match": {"macaddress": each.nic.mac},
            "dhcp4": True,
            "dhcp6": bool(each.nic.address6),
        }
        for number, each in enumerate(asked.interfaces)
    }
    return _json({"version": 2, "ethernets": ethernets}), YAML


def _tree(asked: Asked) -> tuple[bytes, str]:
    about = asked.about
    tree = {
        "id": asked.nic.vm_id,
        "name": about.name if about is not None else "",
        "namespace": about.namespace if about is not None else "",
        "hostname": about.hostname if about is not None else asked.nic.hostname,
        "interfaces": [_interface(each) for each in asked.interfaces],
    }
    return _json(tree), JSON


def _interface(each: Interface) -> dict[str, object]:
    nic, topology = each.nic, each.network.topology
    addresses = [f"{nic.address}/{IPv4Network(topology.subnet).prefixlen}"]
    if nic.address6 and topology.subnet6:
        addresses.append(f"{nic.address6}/{IPv6Network(topology.subnet6).prefixlen}")
    return {
        "network": topology.name,
        "mac": nic.mac,
        "addresses": addresses,
        "gateway": topology.gateway,
        "mtu": topology.mtu,
        "domain": topology.dns_domain,
    }


def _json(tree: object) -> bytes:
    return msgspec.json.format(msgspec.json.encode(tree), indent=1) + b"\n"


_DOCUMENTS: dict[str, Callable[[Asked], tuple[bytes, str]]] = {
    "/": _index,
    "/meta-data": _meta_data,
    "/user-data": _user_data,
    "/vendor-data": _vendor_data,
    "/network-config": _network_config,
    "/chv/v1.json": _tree,
}
