"""Puts a frame into a namespace as if it had come out of a tap, whoever holds that tap.

A pair of links of ours: what is sent on one end is redirected, where it arrives on the other, to
the ingress of the tap. The tap must be up and held open, as the kernel drops what is redirected
to a link without a carrier. The pair has no IPv6 address, so that it says nothing by itself, and
only frames with the guest's MAC are redirected. Call through `netns.inside`; blocks some
milliseconds. What a kill leaves is two links that no plan wants: the next pass removes them.
"""

from __future__ import annotations

import errno
import socket
import struct

from chv.common.errors import Unsupported
from chv.nwd.kernel import links, netlink
from chv.nwd.kernel.errors import translated

SENDER, MIRROR = "chvx0", "chvx1"
_NEW_LINK, _DELETE_LINK, _SET_LINK, _NEW_QDISC, _NEW_FILTER = 16, 17, 19, 36, 44
_MAKE = netlink.ACK | 0x200 | 0x400  # exclusive, create
_INFO = struct.Struct("=BxHiII")  # ifinfomsg
_TC = struct.Struct("=BxxxiIII")  # tcmsg
_UP = 1
_IFNAME, _LINKINFO, _IFALIAS, _AF_SPEC = 3, 18, 20, 26
_KIND, _DATA, _PEER = 1, 2, 1
_GENERATION_MODE, _NO_ADDRESS = 8, 1
_INGRESS_HANDLE, _INGRESS_PARENT = 0xFFFF0000, 0xFFFFFFF1
_TC_KIND, _TC_OPTIONS = 1, 2
_SELECTOR, _ACTIONS, _PARAMETERS = 5, 7, 2
_TERMINAL, _REDIRECT_INGRESS, _STOLEN = 1, 3, 4
_SOURCE_MAC_AT = -8  # from the network header
_ANY_PROTOCOL = socket.htons(3)


def make(tap: str, mac: str, alias: str) -> socket.socket:
    """Return a packet socket: what is sent on it is received from `tap`. `alias`: whose it is."""
    with translated(f"making a way into {tap}"):
        remove()
        with netlink.open_socket(netlink.ROUTE) as ask:
            _make_pair(ask, alias)
            found = links.read([SENDER, MIRROR, tap])
            if len(found) != 3:
                raise OSError(errno.ENODEV, tap)
            # The sender last: a link that is raised before its peer drops for a while.
            for name in (MIRROR, SENDER):
                _silence_and_raise(ask, found[name].index)
            _redirect(
                ask, found[MIRROR].index, found[tap].index, bytes.fromhex(mac.replace(":", ""))
            )
        sender = socket.socket(socket.AF_PACKET, socket.SOCK_RAW | socket.SOCK_CLOEXEC, 0)
        try:
            sender.bind((SENDER, 0))
            sender.setblocking(False)
        except BaseException:
            sender.close()
            raise
        return sender


def remove() -> None:
    """Remove the pair; one that is not there is fine."""
    with translated("removing a way into a tap"), netlink.open_socket(netlink.ROUTE) as ask:
        found = links.read([SENDER, MIRROR])
        for link in found.values():
            try:
                netlink.ask(ask, _message(_DELETE_LINK, netlink.ACK, link.index))
            except OSError as error:
                if error.errno != errno.ENODEV:  # it went with its peer
                    raise


def _make_pair(ask: socket.socket, alias: str) -> None:
    named = netlink.attribute(_IFALIAS, alias.encode())
    peer = _INFO.pack(0, 0, 0, 0, 0) + _name(MIRROR) + named
    kind = netlink.attribute(_KIND, b"veth")
    data = netlink.attribute(_DATA, netlink.attribute(_PEER, peer))
    extra = _name(SENDER) + named + netlink.attribute(_LINKINFO, kind + data)
    netlink.ask(ask, _message(_NEW_LINK, _MAKE, 0, extra))


def _silence_and_raise(ask: socket.socket, index: int) -> None:
    mode = netlink.attribute(_GENERATION_MODE, bytes((_NO_ADDRESS,)))
    extra = netlink.attribute(_AF_SPEC, netlink.attribute(socket.AF_INET6, mode))
    try:
        netlink.ask(ask, _message(_SET_LINK, netlink.ACK, index, extra))
    except OSError as error:
        if error.errno not in (errno.EAFNOSUPPORT, errno.EOPNOTSUPP):  # no IPv6, nothing to say
            raise
    body = _INFO.pack(0, 0, index, _UP, _UP)
    netlink.ask(ask, netlink.message(_SET_LINK, netlink.ACK, body))


def _redirect(ask: socket.socket, source: int, tap: int, mac: bytes) -> None:
    qdisc = _TC.pack(0, source, _INGRESS_HANDLE, _INGRESS_PARENT, 0)
    qdisc += netlink.attribute(_TC_KIND, b"ingress\0")
    options = netlink.attribute(_SELECTOR, _selector(mac)) + netlink.attribute(
        _ACTIONS, netlink.attribute(1, _mirred(tap))
    )
    rule = _TC.pack(0, source, 0, _INGRESS_HANDLE, 1 << 16 | _ANY_PROTOCOL)
    rule += netlink.attribute(_TC_KIND, b"u32\0") + netlink.attribute(_TC_OPTIONS, options)
    try:
        netlink.ask(ask, netlink.message(_NEW_QDISC, _MAKE, qdisc))
        netlink.ask(ask, netlink.message(_NEW_FILTER, _MAKE, rule))
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.EOPNOTSUPP):
            raise Unsupported(
                "this kernel cannot redirect frames into a tap",
                hint="it lacks sch_ingress, cls_u32 or act_mirred",
            ) from error
        raise


def _selector(mac: bytes) -> bytes:
    """Return what matches frames from `mac`."""
    keys = (
        (0xFFFFFFFF, mac[:4], _SOURCE_MAC_AT),
        (0xFFFF0000, mac[4:] + b"\0\0", _SOURCE_MAC_AT + 4),
    )
    head = struct.pack("=BBBxHHhhI", _TERMINAL, 0, len(keys), 0, 0, 0, 0, 0)
    return head + b"".join(
        struct.pack("!I4s", mask, value) + struct.pack("=ii", at, 0) for mask, value, at in keys
    )


def _mirred(target: int) -> bytes:
    parameters = struct.pack("=IIiiiiI", 0, 0, _STOLEN, 0, 0, _REDIRECT_INGRESS, target)
    return netlink.attribute(_TC_KIND, b"mirred\0") + netlink.attribute(
        _TC_OPTIONS, netlink.attribute(_PARAMETERS, parameters)
    )


def _name(name: str) -> bytes:
    return netlink.attribute(_IFNAME, name.encode() + b"\0")


def _message(kind: int, flags: int, index: int, extra: bytes = b"") -> bytes:
    return netlink.message(kind, flags, _INFO.pack(0, 0, index, 0, 0) + extra)
