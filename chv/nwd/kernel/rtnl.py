"""Links, addresses and routes of one namespace over one netlink socket.

A socket lives for one piece of work and has one task as owner (`open_rtnl`): dumps are never run
at once and a cancelled piece of work throws its socket away, for a half-read dump would spoil the
next one. The socket is opened by a thread in the namespace; pyroute2's own way forks.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from pyroute2 import AsyncIPRoute
from pyroute2.netlink.exceptions import NetlinkError

from chv.nwd.kernel import netns
from chv.nwd.kernel.errors import translated

_IPV4 = socket.AF_INET
_TABLE_LOCAL = 255
_ROUTE_UNICAST = 1
_ANY = "0.0.0.0"  # noqa: S104  a route's destination, nothing is bound to it
DEFAULT_ROUTE = f"{_ANY}/0"


@dataclass(frozen=True, slots=True)
class Link:
    """A link as the kernel has it."""

    index: int
    name: str
    kind: str = ""
    mac: str = ""
    mtu: int = 0
    up: bool = False
    alias: str = ""
    master: int = 0
    isolated: bool = False
    owner_uid: int = -1


class Rtnl:
    """One task's access to the links of one namespace. Made by `open_rtnl`."""

    def __init__(self, ipr: AsyncIPRoute) -> None:
        self._ipr = ipr

    async def links(self) -> dict[str, Link]:
        """Return every link by name. About 0.3 ms each: not on a hot path."""
        with translated("listing links"):
            messages = [message async for message in await self._ipr.get_links()]
        return {link.name: link for link in map(_link, messages)}

    async def link(self, name: str) -> Link | None:
        """Return one link."""
        with translated(f"looking up link {name}"):
            try:
                messages = await self._ipr.link("get", ifname=name)
            except NetlinkError as error:
                if error.code == errno.ENODEV:
                    return None
                raise
        return _link(messages[0])

    async def add_bridge(self, name: str, mac: str, mtu: int) -> None:
        """Make a bridge with its MAC and MTU from the start: neither then follows a port."""
        with translated(f"making bridge {name}"):
            await self._ipr.link(
                "add",
                ifname=name,
                kind="bridge",
                address=mac,
                mtu=mtu,
                br_stp_state=0,
                br_forward_delay=0,
                br_mcast_snooping=0,
            )

    async def add_veth(self, name: str, mtu: int, peer: tuple[str, str, int]) -> None:
        """Make a pair: `name` here with an alias, `peer` = (alias, peer's name, its netns fd)."""
        alias, peer_name, peer_fd = peer
        with translated(f"making link {name}"):
            await self._ipr.link(
                "add",
                ifname=name,
                kind="veth",
                mtu=mtu,
                ifalias=alias,
                peer={"ifname": peer_name, "net_ns_fd": peer_fd, "mtu": mtu},
            )

    async def change(self, link: Link, **changes: Any) -> None:
        """Change attributes of a link: mtu, alias, master, up, isolated, mac."""
        with translated(f"changing link {link.name}"):
            if "isolated" in changes:
                isolated = int(changes.pop("isolated"))
                await self._ipr.brport("set", index=link.index, isolated=isolated)
            if changes:
                await self._ipr.link("set", index=link.index, **_attributes(changes))

    async def delete(self, link: Link) -> None:
        """Remove a link; one that is gone already is fine."""
        with translated(f"removing link {link.name}"):
            try:
                await self._ipr.link("del", index=link.index)
            except NetlinkError as error:
                if error.code != errno.ENODEV:
                    raise

    async def addresses(self) -> dict[int, frozenset[str]]:
        """Return the IPv4 addresses with prefix lengths by link index."""
        found: dict[int, set[str]] = {}
        with translated("listing addresses"):
            async for message in await self._ipr.get_addr(family=_IPV4):
                # A peer address stands in IFA_ADDRESS; the link's own one in IFA_LOCAL.
                address = message.get("local") or message.get("address")
                text = f"{address}/{message['prefixlen']}"
                found.setdefault(message["index"], set()).add(text)
        return {index: frozenset(texts) for index, texts in found.items()}

    async def add_address(self, link: Link, cidr: str) -> None:
        """Add an IPv4 address; one that is there already is fine."""
        address, _, length = cidr.partition("/")
        with translated(f"adding address {cidr} to {link.name}"):
            try:
                await self._ipr.addr(
                    "add", index=link.index, address=address, prefixlen=int(length)
                )
            except NetlinkError as error:
                if error.code != errno.EEXIST:
                    raise

    async def delete_address(self, link: Link, cidr: str) -> None:
        """Remove an IPv4 address; one that is gone already is fine."""
        address, _, length = cidr.partition("/")
        with translated(f"removing address {cidr} from {link.name}"):
            try:
                await self._ipr.addr(
                    "del", index=link.index, address=address, prefixlen=int(length)
                )
            except NetlinkError as error:
                if error.code not in (errno.EADDRNOTAVAIL, errno.ENODEV):
                    raise

    async def routes(self) -> dict[str, str]:
        """Return the unicast IPv4 routes: destination to gateway, empty for a direct one."""
        found = {}
        with translated("listing routes"):
            async for message in await self._ipr.get_routes(family=_IPV4):
                if message["type"] != _ROUTE_UNICAST or message.get("table") == _TABLE_LOCAL:
                    continue
                destination = f"{message.get('dst') or _ANY}/{message['dst_len']}"
                found[destination] = message.get("gateway") or ""
        return found

    async def replace_default_route(self, gateway: str) -> None:
        """Make `gateway` the default route."""
        with translated(f"setting the default route to {gateway}"):
            await self._ipr.route("replace", dst=DEFAULT_ROUTE, gateway=gateway)


@asynccontextmanager
async def open_rtnl(path: str = netns.OWN) -> AsyncIterator[Rtnl]:
    """Yield access to the namespace at `path`; the caller's task alone may use it."""
    with translated("opening a netlink socket"):
        fd = await netns.inside(path, open_socket)
    async with adopt_socket(fd) as rtnl:
        yield rtnl


@asynccontextmanager
async def adopt_socket(fd: int) -> AsyncIterator[Rtnl]:
    """Yield access through a socket from `open_socket`, closed afterwards."""
    try:
        ipr = AsyncIPRoute(fileno=fd)
    except BaseException:
        os.close(fd)
        raise
    try:
        yield Rtnl(ipr)
    finally:
        ipr.close()


def open_socket() -> int:
    """Return a netlink socket for the namespace of this thread."""
    # asyncio refuses SOCK_RAW for a datagram endpoint; netlink takes both alike.
    kind = socket.SOCK_DGRAM | socket.SOCK_CLOEXEC
    return socket.socket(socket.AF_NETLINK, kind, socket.NETLINK_ROUTE).detach()


def _attributes(changes: dict[str, Any]) -> dict[str, Any]:
    names = {"alias": "ifalias", "mac": "address"}
    attributes = {names.get(name, name): value for name, value in changes.items() if name != "up"}
    if "up" in changes:
        attributes["state"] = "up" if changes["up"] else "down"
    return attributes


def _link(message: Any) -> Link:
    information = message.get("linkinfo")
    kind, owner, isolated = "", -1, False
    if information is not None:
        kind = information.get("kind") or ""
        data = information.get("data")
        if kind == "tun" and data is not None:
            owner = -1 if data.get("IFLA_TUN_OWNER") is None else data.get("IFLA_TUN_OWNER")
        port = information.get("slave_data")
        if information.get("slave_kind") == "bridge" and port is not None:
            isolated = bool(port.get("IFLA_BRPORT_ISOLATED"))
    return Link(
        index=message["index"],
        name=message.get("ifname"),
        kind=kind,
        mac=message.get("address") or "",
        mtu=message.get("mtu") or 0,
        up=bool(message["flags"] & 1),
        alias=message.get("ifalias") or "",
        master=message.get("master") or 0,
        isolated=isolated,
        owner_uid=owner,
    )
