"""Which addresses and MACs may be used, and which one a NIC gets. Pure.

Every refusal names the value, the field and what it collides with. What a whole network may ask
for is checked in `topology`.
"""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Collection, Iterable, Set
from functools import lru_cache
from ipaddress import (
    IPv4Address,
    IPv4Interface,
    IPv4Network,
    IPv6Address,
    IPv6Network,
)
from itertools import chain, filterfalse
from operator import methodcaller

from chv.common import names
from chv.common.errors import InUse, InvalidArgument, ResourceExhausted
from chv.common.names import check_mac, shown

PREFIX_MIN, PREFIX_MAX = 8, 30
PREFIX6_MIN, PREFIX6_MAX = 64, 112
_PACK4 = methodcaller("to_bytes", 4, "big")
_CANDIDATES_STEP, _CANDIDATES_KEPT_MAX = 256, 64


def check_subnet(text: str) -> IPv4Network:
    """Check that a text is a subnet that can hold a gateway and a NIC."""
    try:
        interface = IPv4Interface(text)
    except ValueError as error:
        raise InvalidArgument(
            f"{shown(text)} is not an IPv4 subnet", field="spec.subnet", hint="such as 10.0.0.0/24"
        ) from error
    if str(interface.network) != text:
        raise InvalidArgument(
            f"{shown(text)} is not a network address",
            field="spec.subnet",
            hint=f"write {interface.network}",
        )
    if not PREFIX_MIN <= interface.network.prefixlen <= PREFIX_MAX:
        raise InvalidArgument(
            f"{text} has a prefix outside /{PREFIX_MIN} to /{PREFIX_MAX}", field="spec.subnet"
        )
    return interface.network


def check_subnet6(text: str) -> IPv6Network:
    """Check that a text is an IPv6 subnet that can hold a gateway and NICs."""
    subnet = names.check_cidr(text, field="spec.subnet6")
    if not isinstance(subnet, IPv6Network):
        raise InvalidArgument(
            f"{text} is not an IPv6 subnet",
            field="spec.subnet6",
            hint="such as fd12:3456:789a::/64",
        )
    if not PREFIX6_MIN <= subnet.prefixlen <= PREFIX6_MAX:
        raise InvalidArgument(
            f"{text} has a prefix outside /{PREFIX6_MIN} to /{PREFIX6_MAX}", field="spec.subnet6"
        )
    return subnet


def gateway6(subnet: IPv6Network) -> IPv6Address:
    """Return the gateway: the first address after that of the subnet, which means any router."""
    return subnet.network_address + 1


def check_gateway(text: str, subnet: IPv4Network) -> IPv4Address:
    """Return the gateway: what was asked for, else the first host address."""
    if not text:
        return subnet.network_address + 1
    return _host_address(text, subnet, "spec.gateway")


def _host_address(text: str, subnet: IPv4Network, field: str) -> IPv4Address:
    try:
        address = IPv4Address(text)
    except ValueError as error:
        raise InvalidArgument(f"{shown(text)} is not an IPv4 address", field=field) from error
    if address not in subnet:
        raise InvalidArgument(f"{text} is not in {subnet}", field=field)
    if address in (subnet.network_address, subnet.broadcast_address):
        what = "network" if address == subnet.network_address else "broadcast"
        raise InvalidArgument(f"{text} is the {what} address of {subnet}", field=field)
    return address


def check_address(
    text: str, subnet: IPv4Network, gateway: IPv4Address, owners: dict[str, str]
) -> str:
    """Check an address that a NIC asks for; `owners` maps used addresses to their NICs."""
    address = str(_host_address(text, subnet, "address"))
    if address == str(gateway):
        raise InvalidArgument(f"{address} is the gateway of {subnet}", field="address")
    if address in owners:
        raise InUse(
            f"{address} belongs to NIC {owners[address]}", field="address", resource=owners[address]
        )
    return address


def allocate(
    subnet: IPv4Network,
    gateway: IPv4Address,
    used: Iterable[Collection[str]],
    released: Collection[str],
) -> str:
    """Return a free address: the lowest never used, else the one that is free longest.

    `released` holds those of both families, the longest free first. Looked into a thousand times,
    so nothing is copied, and no candidate is made twice.
    """
    taken: list[Collection[str]] = [(str(gateway),), *used]
    # At most one candidate more than there are addresses to avoid, however large the subnet.
    hosts = subnet.num_addresses - 2
    count = min(hosts, sum(map(len, taken)) + len(released) + 1)
    rounded = min(hosts, -(-count // _CANDIDATES_STEP) * _CANDIDATES_STEP)
    fresh: Iterable[str] = _candidates(int(subnet.network_address), rounded)
    for each in (*reversed(taken), released):
        fresh = filterfalse(each.__contains__, fresh)
    for candidate in fresh:
        return candidate
    for candidate in released:
        is_taken = any(candidate in each for each in taken)
        if not is_taken and ":" not in candidate and IPv4Address(candidate) in subnet:
            return candidate
    raise ResourceExhausted(
        f"all {hosts - 1} addresses of {subnet} for NICs are used",
        field="address",
        hint="detach a NIC or use a larger subnet",
    )


@lru_cache(_CANDIDATES_KEPT_MAX)
def _candidates(base: int, count: int) -> tuple[str, ...]:
    """Return the lowest host addresses; str() of an address takes ten times as long."""
    return tuple(map(socket.inet_ntoa, map(_PACK4, range(base + 1, base + count + 1))))


def check_address6(text: str, subnet: IPv6Network, owners: dict[str, str]) -> str:
    """Check an IPv6 address that a NIC asks for; return it as it is always written."""
    address = names.check_address(text, field="address6")
    if not isinstance(address, IPv6Address):
        raise InvalidArgument(f"{text} is not an IPv6 address", field="address6")
    if address not in subnet:
        raise InvalidArgument(f"{text} is not in {subnet}", field="address6")
    if address == subnet.network_address:
        raise InvalidArgument(f"{text} means any router of {subnet}", field="address6")
    if address == gateway6(subnet):
        raise InvalidArgument(f"{text} is the gateway of {subnet}", field="address6")
    owner = owners.get(str(address))
    if owner is not None:
        raise InUse(f"{address} belongs to NIC {owner}", field="address6", resource=owner)
    return str(address)


def allocate6(
    subnet: IPv6Network,
    host_number: int,
    used: Iterable[Collection[str]],
    released: Collection[str] = (),
) -> str:
    """Return a free IPv6 address: that with the number of the IPv4 one, else the lowest free.

    `host_number` counts from the address of the IPv4 subnet. One that was given back comes last.
    """
    reserved = (str(gateway6(subnet)), str(subnet.network_address))
    taken_by = [reserved, *used]
    if 0 < host_number < subnet.num_addresses:
        candidate = str(subnet.network_address + host_number)
        if not any(candidate in each for each in (*taken_by, released)):
            return candidate
    taken = set(chain.from_iterable(taken_by))
    avoided = taken | set(released)
    for offset in range(1, min(subnet.num_addresses - 1, len(avoided) + 1) + 1):
        candidate = str(subnet.network_address + offset)
        if candidate not in avoided:
            return candidate
    for candidate in released:
        if ":" in candidate and candidate not in taken and IPv6Address(candidate) in subnet:
            return candidate
    raise ResourceExhausted(
        f"all addresses of {subnet} are used", field="address6", hint="use a larger subnet6"
    )


def mac_of(uid: str) -> str:
    """Return a locally administered unicast MAC that follows from a uid."""
    digest = hashlib.sha256(f"chv mac {uid}".encode()).digest()
    return ":".join(f"{byte:02x}" for byte in (0x02, *digest[:5]))


def check_nic_mac(text: str, bridge_mac: str) -> str:
    """Check the MAC that a NIC asks for."""
    mac = check_mac(text)
    if mac == bridge_mac:
        raise InvalidArgument(f"{mac} is the MAC of the gateway", field="mac")
    return mac


def uplink_addresses(pool: str, slot: int) -> tuple[str, str]:
    """Return the host's and the network's end of the /31 in a slot of the pool."""
    base = IPv4Network(pool).network_address + 2 * slot
    return str(base), str(base + 1)


def uplink_addresses6(pool: str, slot: int) -> tuple[str, str]:
    """Return the host's and the network's end of the /127 in a slot of the IPv6 pool."""
    base = IPv6Network(pool).network_address + 2 * slot
    return str(base), str(base + 1)


def free_slot(pool: str, network_id: str, used: Collection[int], occupied: Set[str]) -> int:
    """Return a slot that neither a record nor an address on the host uses.

    It starts where the uid points to: two nodes in one namespace then seldom meet.
    """
    slots = IPv4Network(pool).num_addresses // 2
    start = int(hashlib.sha256(network_id.encode()).hexdigest(), 16) % slots
    for offset in range(slots):
        slot = (start + offset) % slots
        if slot not in used and not occupied & set(uplink_addresses(pool, slot)):
            return slot
    raise ResourceExhausted(f"all {slots} uplinks of {pool} are used", field="network.uplink_pool")
