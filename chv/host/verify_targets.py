"""What the NICs of a trial are asked to try, and what must come of it. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network

import msgspec

from chv.common.errors import FailedPrecondition
from chv.common.wire.network_resources import Network, NetworkSpec, UplinkModeSpec
from chv.probe.command import CheckKind, NetCheck, NicPlan

METADATA = "169.254.169.254"
LEASE_MS = 4000
OPEN_MS = 2000
CLOSED_MS = 500  # a neighbour on the same machine answers within milliseconds
CLOSED_PORT = 9


@dataclass(frozen=True, slots=True)
class NicWanted:
    """A NIC of the trial. `address`: what was asked for; empty: the node chooses."""

    name: str
    mac: str
    network: str
    address: str = ""


@dataclass(frozen=True, slots=True)
class Target:
    """A check of the probe's, and what must come of it. `words`: what that is to people."""

    id: str
    mac: str
    check: NetCheck
    words: str
    addresses: tuple[str, ...] = ()


def ways(nic: NicWanted, spec: NetworkSpec, name: str, uplink: str) -> list[Target]:
    """Return what every guest may reach. `name`: of the VM itself, to be resolved; `uplink`: the
    address that proves the way out; each empty where it is not to be tried.
    """
    found = [target("gateway", nic, "ping", "router", "the gateway answers a ping")]
    if name:
        found.append(target("dns", nic, "dns", name, "the VM's name resolves"))
    port = NetCheck(kind="tcp", target="router", port=53)
    found.append(Target("firewall-open", nic.mac, port, "TCP port 53 of the gateway is open"))
    if spec.metadata:
        check = NetCheck(kind="tcp", target=METADATA, port=80)
        found.append(Target("metadata", nic.mac, check, f"{METADATA} answers"))
    if spec.uplink is not UplinkModeSpec.NONE and uplink:
        out = f"{uplink}, the node's next hop, answers a ping"
        found.append(target("uplink", nic, "ping", uplink, out))
    return found


def target(
    check_id: str, nic: NicWanted, kind: CheckKind, where: str, words: str, address: str = ""
) -> Target:
    """Return a target without a port; `address`: what a name must resolve to."""
    check = NetCheck(kind=kind, target=where)
    return Target(check_id, nic.mac, check, words, (address,) if address else ())


def closed_port(nic: NicWanted) -> Target:
    """Return a port of the gateway that nothing opens."""
    check = NetCheck(kind="tcp", target="router", port=CLOSED_PORT, must_fail=True)
    words = f"TCP port {CLOSED_PORT} of the gateway is closed"
    return Target("firewall-closed", nic.mac, check, words)


def nic_plan(nic: NicWanted, targets: list[Target]) -> NicPlan:
    """Return what one NIC is told to try; what must fail is waited for less long."""
    checks = tuple(
        msgspec.structs.replace(
            target.check, timeout_ms=CLOSED_MS if target.check.must_fail else OPEN_MS
        )
        for target in targets
    )
    return NicPlan(nic=nic.mac, checks=checks, lease_ms=LEASE_MS)


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
