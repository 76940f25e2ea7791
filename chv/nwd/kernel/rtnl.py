"""Changing links, addresses and routes of one namespace over one netlink socket.

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
from typing import Any

from pyroute2 import AsyncIPRoute
from pyroute2.netlink.exceptions import NetlinkError

from chv.common.errors import Conflict
from chv.nwd.kernel import links, netns
from chv.nwd.kernel.errors import translated
from chv.nwd.kernel.links import Link

_ANY_SCOPE = 255
_NO_DAD = 0x02  # usable at once: nobody else can have an address that we give


class Rtnl:
    """One task's access to the links of one namespace. Made by `open_rtnl`."""

    def __init__(self, fd: int, path: str) -> None:
        self._fd = fd
        self._path = path
        self._opened: AsyncIPRoute | None = None

    @property
    def _ipr(self) -> AsyncIPRoute:
        """The library's view of the socket, which it takes over, and closes, only once it asks."""
        if self._opened is None:
            self._opened = AsyncIPRoute(fileno=self._fd)
        return self._opened

    def close(self) -> None:
        """Close the socket, asked by it or not."""
        if self._opened is None:
            os.close(self._fd)
        else:
            self._opened.close()

    async def link(self, name: str) -> Link | None:
        """Return one link."""
        found = await netns.inside(self._path, lambda: links.read([name]))
        return found.get(name)

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

    async def add_address(self, link: Link, cidr: str) -> None:
        """Add an address; one that is there already is fine."""
        address, _, length = cidr.partition("/")
        flags = {"flags": _NO_DAD} if ":" in address else {}
        with translated(f"adding address {cidr} to {link.name}"):
            try:
                await self._ipr.addr(
                    "add", index=link.index, address=address, prefixlen=int(length), **flags
                )
            except NetlinkError as error:
                if error.code != errno.EEXIST:
                    raise

    async def delete_address(self, link: Link, cidr: str) -> None:
        """Remove an address; one that is gone already is fine."""
        address, _, length = cidr.partition("/")
        with translated(f"removing address {cidr} from {link.name}"):
            try:
                await self._ipr.addr(
                    "del", index=link.index, address=address, prefixlen=int(length)
                )
            except NetlinkError as error:
                if error.code not in (errno.EADDRNOTAVAIL, errno.ENODEV):
                    raise

    async def add_route(self, link: Link, target: str, gateway: str) -> None:
        """Route `target` to a gateway on a link; Conflict when it is routed elsewhere."""
        with translated(f"adding a route to {target}"):
            try:
                await self._ipr.route("add", dst=target, gateway=gateway, oif=link.index)
            except NetlinkError as error:
                if error.code != errno.EEXIST:
                    raise
                raise Conflict(
                    f"there is another route to {target}", hint="remove that route"
                ) from error

    async def delete_route(self, link: Link, target: str, gateway: str) -> None:
        """Remove a route by a link; one that is gone already is fine."""
        by: dict[str, Any] = {"proto": 0, "scope": _ANY_SCOPE}  # whoever made it, and how
        if gateway:
            by["gateway"] = gateway
        with translated(f"removing the route to {target}"):
            try:
                await self._ipr.route("del", dst=target, oif=link.index, **by)
            except NetlinkError as error:
                if error.code not in (errno.ESRCH, errno.ENODEV):
                    raise


@asynccontextmanager
async def open_rtnl(path: str = netns.OWN) -> AsyncIterator[Rtnl]:
    """Yield access to the namespace at `path`; the caller's task alone may use it."""
    with translated("opening a netlink socket"):
        fd = await netns.inside(path, open_socket)
    async with adopt_socket(fd, path) as rtnl:
        yield rtnl


@asynccontextmanager
async def adopt_socket(fd: int, path: str) -> AsyncIterator[Rtnl]:
    """Yield access through a socket from `open_socket`, closed afterwards."""
    rtnl = Rtnl(fd, path)
    try:
        yield rtnl
    finally:
        rtnl.close()


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
