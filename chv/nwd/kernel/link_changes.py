"""Changing links, addresses and routes of a namespace, the host's or a network's.

Call with a socket that was opened there.
"""

from __future__ import annotations

import errno
import socket
import struct
from dataclasses import dataclass
from ipaddress import ip_address, ip_interface, ip_network

from chv.common.errors import Conflict
from chv.nwd.kernel import netlink
from chv.nwd.kernel.errors import translated
from chv.nwd.kernel.links import Link

_NEW_LINK, _SET_LINK, _DELETE_LINK = 16, 19, 17
_NEW_ADDRESS, _DELETE_ADDRESS, _NEW_ROUTE, _DELETE_ROUTE = 20, 21, 24, 25
_REPLACE, _EXCLUSIVE, _CREATE = 0x100, 0x200, 0x400
_INFO = struct.Struct("=BxHiII")  # ifinfomsg: family, type, index, flags, change
_ADDRESS, _MTU, _MASTER, _PROTINFO, _IFALIAS = 1, 4, 10, 12, 20
_IFNAME, _LINKINFO, _INFO_KIND, _INFO_DATA = 3, 18, 1, 2
_PEER, _NAMESPACE = 1, 28
_FORWARD_DELAY, _STP_STATE, _SNOOPING = 1, 5, 23
_NESTED, _PORT_ISOLATED = 0x8000, 33
_IP = struct.Struct("=4Bi")  # ifaddrmsg: family, length, flags, scope, link
_IP_ADDRESS, _IP_LOCAL = 1, 2
_NO_DAD = 0x02  # usable at once: nobody else can have an address that we give
_ROUTE = struct.Struct("=8BI")  # rtmsg: family, lengths, tos, table, protocol, scope, type, flags
_TARGET, _OUT, _GATEWAY = 1, 4, 5
_ANYBODY, _ANY_SCOPE = 0, 255
_MAIN, _STATIC, _UNIVERSE, _UNICAST = 254, 4, 0, 1
_UP = 1
_MTU_MAX = 65535


@dataclass(frozen=True, slots=True)
class Change:
    """What is to be different; the empty values leave things as they are."""

    alias: str = ""
    mac: str = ""
    mtu: int = 0
    master: int = 0


def change(ask: socket.socket, link: Link, wanted: Change) -> None:
    """Change a link at once."""
    body = b""
    if wanted.alias:
        body += netlink.attribute(_IFALIAS, wanted.alias.encode())
    if wanted.mac:
        body += netlink.attribute(_ADDRESS, bytes.fromhex(wanted.mac.replace(":", "")))
    if wanted.mtu:
        body += netlink.attribute(_MTU, struct.pack("=I", wanted.mtu))
    if wanted.master:
        body += netlink.attribute(_MASTER, struct.pack("=I", wanted.master))
    if body:
        with translated(f"changing link {link.name}"):
            _tell(ask, _SET_LINK, _INFO.pack(0, 0, link.index, 0, 0) + body)


def difference(link: Link, wanted: Change) -> Change:
    """Return what of `wanted` the link has otherwise."""
    return Change(
        alias=wanted.alias if wanted.alias != link.alias else "",
        mac=wanted.mac if wanted.mac != link.mac else "",
        mtu=wanted.mtu if wanted.mtu != link.mtu else 0,
        master=wanted.master if wanted.master != link.master else 0,
    )


def set_up(ask: socket.socket, link: Link) -> None:
    """Take a link into use."""
    with translated(f"changing link {link.name}"):
        _tell(ask, _SET_LINK, _INFO.pack(0, 0, link.index, _UP, _UP))


def isolate(ask: socket.socket, link: Link, *, isolated: bool) -> None:
    """Let a port of a bridge reach those that are not isolated alone, or all."""
    inner = netlink.attribute(_PORT_ISOLATED, bytes((isolated,)))
    body = _INFO.pack(socket.AF_BRIDGE, 0, link.index, 0, 0)
    body += netlink.attribute(_PROTINFO | _NESTED, inner)
    with translated(f"changing link {link.name}"):
        _tell(ask, _SET_LINK, body)


def delete(ask: socket.socket, link: Link) -> None:
    """Remove a link; one that is gone already is fine."""
    with translated(f"removing link {link.name}"):
        try:
            _tell(ask, _DELETE_LINK, _INFO.pack(0, 0, link.index, 0, 0))
        except OSError as error:
            if error.errno != errno.ENODEV:
                raise


def add_bridge(ask: socket.socket, name: str, mac: str, mtu: int) -> None:
    """Make a bridge with its MAC and MTU from the start: neither then follows a port.

    An MTU counts as ours only where setting it changes it: a bridge would take 1500 again when its
    last port goes.
    """
    other = mtu + 1 if mtu < _MTU_MAX else mtu - 1
    options = netlink.attribute(_STP_STATE, struct.pack("=I", 0))
    options += netlink.attribute(_FORWARD_DELAY, struct.pack("=I", 0))
    options += netlink.attribute(_SNOOPING, b"\0")
    kind = netlink.attribute(_INFO_KIND, b"bridge") + netlink.attribute(_INFO_DATA, options)
    body = _INFO.pack(0, 0, 0, 0, 0) + netlink.attribute(_IFNAME, name.encode() + b"\0")
    body += netlink.attribute(_ADDRESS, bytes.fromhex(mac.replace(":", "")))
    body += netlink.attribute(_MTU, struct.pack("=I", other)) + netlink.attribute(_LINKINFO, kind)
    mine = _INFO.pack(0, 0, 0, 0, 0) + netlink.attribute(_IFNAME, name.encode() + b"\0")
    mine += netlink.attribute(_MTU, struct.pack("=I", mtu))
    with translated(f"making bridge {name}"):
        _tell(ask, _NEW_LINK, body, _CREATE | _EXCLUSIVE)
        _tell(ask, _SET_LINK, mine)


def add_veth(ask: socket.socket, name: str, mtu: int, peer: tuple[str, int]) -> None:
    """Make a pair: `name` here, and `peer` = (its name, a descriptor of its namespace)."""
    size = netlink.attribute(_MTU, struct.pack("=I", mtu))
    peer_name, namespace = peer
    other = _INFO.pack(0, 0, 0, 0, 0) + size
    other += netlink.attribute(_IFNAME, peer_name.encode() + b"\0")
    other += netlink.attribute(_NAMESPACE, struct.pack("=I", namespace))
    data = netlink.attribute(_INFO_DATA, netlink.attribute(_PEER, other))
    body = _INFO.pack(0, 0, 0, 0, 0) + size
    body += netlink.attribute(_IFNAME, name.encode() + b"\0")
    body += netlink.attribute(_LINKINFO, netlink.attribute(_INFO_KIND, b"veth") + data)
    with translated(f"making link {name}"):
        _tell(ask, _NEW_LINK, body, _CREATE | _EXCLUSIVE)


def add_address(ask: socket.socket, link: Link, cidr: str) -> None:
    """Add an address; one that is there already is fine."""
    with translated(f"adding address {cidr} to {link.name}"):
        try:
            _tell(ask, _NEW_ADDRESS, _address(link, cidr), _CREATE | _EXCLUSIVE)
        except FileExistsError:
            return


def delete_address(ask: socket.socket, link: Link, cidr: str) -> None:
    """Remove an address; one that is gone already is fine."""
    with translated(f"removing address {cidr} from {link.name}"):
        try:
            _tell(ask, _DELETE_ADDRESS, _address(link, cidr))
        except OSError as error:
            if error.errno not in (errno.EADDRNOTAVAIL, errno.ENODEV):
                raise


def _address(link: Link, cidr: str) -> bytes:
    interface = ip_interface(cidr)
    is_v6, packed = interface.version == 6, interface.ip.packed
    family, flags = (socket.AF_INET6, _NO_DAD) if is_v6 else (socket.AF_INET, 0)
    body = _IP.pack(family, interface.network.prefixlen, flags, 0, link.index)
    body += netlink.attribute(_IP_ADDRESS, packed)
    return body if is_v6 else body + netlink.attribute(_IP_LOCAL, packed)


def replace_default_route(ask: socket.socket, link: Link, gateway: str) -> None:
    """Make `gateway`, on `link`, the default route of its family."""
    address = ip_address(gateway)
    family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
    body = _ROUTE.pack(family, 0, 0, 0, _MAIN, _STATIC, 0, _UNICAST, 0)
    body += netlink.attribute(_GATEWAY, address.packed)
    body += netlink.attribute(_OUT, struct.pack("=i", link.index))
    with translated(f"setting the default route to {gateway}"):
        _tell(ask, _NEW_ROUTE, body, _CREATE | _REPLACE)


def add_route(ask: socket.socket, link: Link, target: str, gateway: str) -> None:
    """Route `target` to a gateway on a link; Conflict when it is routed elsewhere."""
    with translated(f"adding a route to {target}"):
        try:
            _tell(ask, _NEW_ROUTE, _route(link, target, gateway), _CREATE | _EXCLUSIVE)
        except FileExistsError as error:
            raise Conflict(
                f"there is another route to {target}", hint="remove that route"
            ) from error


def delete_route(ask: socket.socket, link: Link, target: str, gateway: str) -> None:
    """Remove a route by a link, whoever made it; one that is gone already is fine."""
    body = _route(link, target, gateway, by=(_ANYBODY, _ANY_SCOPE))
    with translated(f"removing the route to {target}"):
        try:
            _tell(ask, _DELETE_ROUTE, body)
        except OSError as error:
            if error.errno not in (errno.ESRCH, errno.ENODEV):
                raise


def _route(
    link: Link, target: str, gateway: str, by: tuple[int, int] = (_STATIC, _UNIVERSE)
) -> bytes:
    network = ip_network(target)
    family = socket.AF_INET6 if network.version == 6 else socket.AF_INET
    body = _ROUTE.pack(family, network.prefixlen, 0, 0, _MAIN, *by, _UNICAST, 0)
    body += netlink.attribute(_TARGET, network.network_address.packed)
    if gateway:
        body += netlink.attribute(_GATEWAY, ip_address(gateway).packed)
    return body + netlink.attribute(_OUT, struct.pack("=i", link.index))


def _tell(ask: socket.socket, kind: int, body: bytes, flags: int = 0) -> None:
    netlink.ask(ask, netlink.message(kind, flags | netlink.ACK, body))
