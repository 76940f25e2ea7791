"""Changing links of a namespace by messages of our own: a tenth of what a library takes.

Call in the namespace, or with a socket that was opened there. For what every attach of a NIC does;
what is done once a network is in `rtnl`.
"""

from __future__ import annotations

import errno
import socket
import struct
from dataclasses import dataclass

from chv.nwd.kernel import netlink
from chv.nwd.kernel.errors import translated
from chv.nwd.kernel.links import Link

_SET_LINK, _DELETE_LINK = 19, 17
_INFO = struct.Struct("=BxHiII")  # ifinfomsg: family, type, index, flags, change
_ADDRESS, _MTU, _MASTER, _PROTINFO, _IFALIAS = 1, 4, 10, 12, 20
_NESTED, _PORT_ISOLATED = 0x8000, 33
_UP = 1


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


def _tell(ask: socket.socket, kind: int, body: bytes) -> None:
    netlink.ask(ask, netlink.message(kind, netlink.ACK, body))
